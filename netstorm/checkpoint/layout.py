"""Where each tensor's bytes are in a checkpoint, and which rank writes which of them. Pure.

All tensors are one run of bytes. It is cut into as many shares as there are ranks, wherever the cuts fall, so
that every rank writes and copies the same amount.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = ["ALIGNMENT", "Layout", "Piece"]

ALIGNMENT: Final = 64
"""Tensors begin, and shares are cut, at multiples of this: a cache line, and more than any type needs."""


class Piece(NamedTuple):
    """Bytes of one tensor in one share."""

    tensor: int
    begin: int
    """First byte of the tensor."""
    end: int
    at: int
    """Where they are in the share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where everything is."""

    sizes: tuple[int, ...]
    """Bytes of each tensor."""
    offsets: tuple[int, ...]
    """First byte of each tensor."""
    cuts: tuple[int, ...]
    """Rank r's share is from `cuts[r]` to `cuts[r + 1]`."""

    @classmethod
    def of(cls, sizes: Sequence[int], ranks: int, *, rank_0: Collection[int] = ()) -> Layout:
        """Lay tensors out, in order.

        Args:
            sizes: bytes of each tensor.
            ranks: number of shares.
            rank_0: tensors that are wholly in rank 0's share; they come first.
        """
        offsets = [0] * len(sizes)
        end = 0
        for tensor in (*sorted(rank_0), *(one for one in range(len(sizes)) if one not in rank_0)):
            offsets[tensor] = end
            end = _aligned(end + sizes[tensor])
        fixed = sum(_aligned(sizes[tensor]) for tensor in rank_0)
        first = max(fixed, _aligned(end // ranks) if ranks > 1 else end)
        cuts = [0, min(first, end)]
        for rank in range(1, ranks):
            left = end - cuts[-1]
            cuts.append(end if rank == ranks - 1 else min(end, cuts[-1] + _aligned(left // (ranks - rank))))
        return cls(sizes=tuple(sizes), offsets=tuple(offsets), cuts=tuple(cuts))

    @property
    def total(self) -> int:
        """Bytes of all tensors, and between them."""
        return self.cuts[-1]

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Yield what a rank's share holds of each tensor."""
        begin, end = self.cuts[rank], self.cuts[rank + 1]
        for tensor, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            first, last = max(begin, offset), min(end, offset + size)
            if first < last:
                yield Piece(tensor, first - offset, last - offset, first - begin)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
