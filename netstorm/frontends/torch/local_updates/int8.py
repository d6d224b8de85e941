"""Outer gradients in one byte a value, over process groups other than NetStorm's.

Each block of values has one scale, which all ranks share: the largest magnitude of any rank. Each rank sends
whole numbers from -levels to levels, with `levels` so small that the sum over all ranks still fits. Whole
numbers add up without rounding, so every tree gives the same bits. What a rank rounds off it adds to its next
update (error feedback: Karimireddy et al., arXiv 1901.09847).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar, Final

import torch
from torch.nn import functional

from netstorm.errors import UsageError
from netstorm.frontends.torch.local_updates.ranks import Ranks, Waitable

__all__ = ["BLOCK", "Int8", "whole_number_form"]

BLOCK: Final = 256
"""Values that share a scale: scales are 4 bytes a block, 1.6 % of the payload."""

_MOST_RANKS_IN_INT8: Final = 16
"""With more, a rank would have fewer than 7 levels on each side of zero."""
_MOST_RANKS_IN_INT16: Final = 4096
"""As above, of int16."""


class Int8:
    """Block-wise whole numbers with error feedback: int8 up to 16 ranks, int16 or int32 beyond.

    An average takes two collectives: the scales (MAX), then the numbers (SUM).
    """

    name: ClassVar[str] = "int8"
    collectives: ClassVar[int] = 2

    def __init__(self) -> None:
        self._residual: torch.Tensor | None = None

    def average(self, update: torch.Tensor, ranks: Ranks) -> Generator[Waitable, None, torch.Tensor]:
        """Agree on scales, sum whole numbers, and keep what was rounded off."""
        if self._residual is not None:
            update.add_(self._residual)
        blocks = functional.pad(update, (0, -update.numel() % BLOCK)).view(-1, BLOCK)
        # Backends differ in the maximum of NaN and a number; all agree on infinity.
        scales = blocks.abs().amax(dim=1, keepdim=True).nan_to_num_(nan=torch.inf, posinf=torch.inf)
        yield ranks.begin_max(scales)
        dtype, levels = whole_number_form(ranks.size, short_integers=ranks.short_integers)
        # A block of zeros has scale 0. The average of one with an infinite scale is NaN, whatever is sent.
        numbers = (blocks / scales).mul_(levels).round_().nan_to_num_(nan=0.0)
        sums = numbers.to(dtype)
        rounded_off = blocks.sub_(numbers.div_(levels).mul_(scales)).nan_to_num_(
            nan=0.0, posinf=0.0, neginf=0.0
        )
        self._residual = rounded_off.view(-1)[: update.numel()]
        yield ranks.begin_sum(sums)
        return sums.to(update.dtype).div_(levels * ranks.size).mul_(scales).view(-1)[: update.numel()]

    def kept(self) -> torch.Tensor | None:
        """Return the residual."""
        return self._residual

    def keep(self, kept: torch.Tensor | dict[str, Any] | None) -> None:
        """Set the residual.

        Raises:
            UsageError: it is of a NetStorm group.
        """
        if isinstance(kept, dict):
            raise UsageError("the checkpoint's int8 is that of a NetStorm group: go on over one")
        self._residual = kept


def whole_number_form(ranks: int, *, short_integers: bool) -> tuple[torch.dtype, int]:
    """Return the type of the numbers, and the largest one, so that a sum over `ranks` cannot overflow.

    Args:
        ranks: how many are added.
        short_integers: whether the backend sums int16; if it does not, int32 takes its place.
    """
    if ranks <= _MOST_RANKS_IN_INT8:
        return torch.int8, torch.iinfo(torch.int8).max // ranks
    levels = torch.iinfo(torch.int16).max // ranks
    if short_integers and ranks <= _MOST_RANKS_IN_INT16:
        return torch.int16, levels
    return torch.int32, max(levels, torch.iinfo(torch.int8).max)
