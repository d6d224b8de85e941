"""One byte a value: whole numbers with a scale a block, whose sums are exact. Pure.

A first round finds the scale of each block: the largest magnitude that any rank has in it. Then each rank
sends whole numbers from -levels to levels, with `levels` so small that a sum over all ranks has 9 bits. They
add up without rounding, so all trees give the same bits. What a rank rounds off it adds to its next gradient
(error feedback: Karimireddy et al., arXiv 1901.09847).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from netstorm.compression.blockwise.blocks import PIECE, blocks_of, each, maxima, pieces, scaled
from netstorm.compression.blockwise.dither import noise
from netstorm.compression.codec import Floats, Part, Place, Rounds, State, Transfer, take_residual
from netstorm.compression.packed_numbers import as_planes, sums_into
from netstorm.errors import UsageError
from netstorm.protocol.codecs import MAXIMA, packed

__all__ = ["Int8", "levels_of"]

_MOST_LEVELS: Final = 127
_LARGEST_SUM: Final = 255
"""A sum takes 9 bits, up to 36 ranks; a rank's own numbers 8 or fewer."""
_FEWEST_LEVELS: Final = 7

_SMALLEST_SCALE: Final = np.float32(2.0**-100)
"""Blocks of smaller values wait in the residual: their steps would be so small that float32 rounds them."""


class Int8:
    """Block-wise whole numbers with error feedback.

    A block in which any rank has NaN or infinity becomes NaN at all ranks, and leaves no residual.
    """

    name: ClassVar[str] = "int8"

    def __init__(self, rounding: Literal["nearest", "stochastic"] = "nearest") -> None:
        """Describe the numbers.

        Args:
            rounding: to the nearest; or up or down at random, right on the average, to `dither.RESOLUTION`.

        Raises:
            UsageError: another rounding.
        """
        if rounding not in {"nearest", "stochastic"}:
            raise UsageError(f"int8 with rounding={rounding!r}: expected 'nearest' or 'stochastic'")
        self._stochastic: Final = rounding == "stochastic"
        self.fingerprint: Final = f"int8 rounding={rounding}"

    def form(self, shape: tuple[int, ...]) -> int:
        """Return the codec of most rounds: as if the job had four ranks."""
        return packed(2 * levels_of(4))

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Return the key of the scales."""
        return (Part("scales", blocks_of(int(np.prod(shape, dtype=np.int64)))),)

    def rounds(self, gradient: Floats, state: State, place: Place) -> Rounds:
        """Agree on scales, then sum whole numbers."""
        residual = take_residual(gradient, state)
        own = maxima(gradient)
        scales = own.copy()
        yield Transfer(1, MAXIMA, scales, scales)
        finite = bool(np.isfinite(own).all() and np.isfinite(scales).all())
        within = finite and bool((own <= scales).all())  # not so if this rank is not in the maxima
        scales[scales < _SMALLEST_SCALE] = 0
        levels = levels_of(place.ranks)
        dither = noise(place, PIECE) if self._stochastic else None
        steps = scales / np.float32(levels)
        numbers = np.empty(len(gradient), np.uint8)
        with np.errstate(all="ignore"):
            factors = np.where(scales > 0, np.float32(levels) / scales, np.float32(0))
            for piece, blocks, whole in pieces(len(gradient)):
                scaled(gradient[piece], factors[blocks], whole)
                _round(whole, dither)
                if not finite:
                    # Where the scale is NaN or infinite, sums become NaN, whatever is sent.
                    np.nan_to_num(whole, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
                if not within:
                    np.minimum(whole, np.float32(levels), out=whole)
                    np.maximum(whole, np.float32(-levels), out=whole)
                np.copyto(numbers[piece].view(np.int8), whole, casting="unsafe")
                scaled(whole, steps[blocks], whole)
                np.subtract(gradient[piece], whole, out=residual[piece])
        numbers += np.uint8(levels)  # modulo 256: faster than in float32
        if not finite:
            residual[~np.isfinite(residual)] = 0
        sums: list[tuple[int, int, bytes, int]] = []
        yield Transfer(0, packed(2 * levels), as_planes(numbers, 2 * levels), sums)
        for start, end, payload, contributors in sums:
            sums_into(gradient[start:end], payload, contributors.bit_count(), 2 * levels)
            if not contributors >> place.rank & 1:
                _take_back(residual, numbers, steps, levels, range(start, end))
        with np.errstate(all="ignore"):
            scaled(gradient, steps, gradient)


def levels_of(ranks: int) -> int:
    """Return the largest whole number of one rank, on either side of 0."""
    return max(_FEWEST_LEVELS, min(_MOST_LEVELS, _LARGEST_SUM // ranks))


def _round(exact: Floats, dither: Iterator[Floats] | None) -> None:
    """Make whole numbers, in place: the nearest ones; or at random, the one below or the one above."""
    if dither is None:
        np.rint(exact, out=exact)
        return
    exact += next(dither)[: len(exact)]
    np.floor(exact, out=exact)


def _take_back(
    residual: Floats, numbers: npt.NDArray[np.uint8], steps: Floats, levels: int, elements: range
) -> None:
    """Add what this rank has sent of some elements to its residual again: their sums came without it."""
    start, end = elements.start, elements.stop
    sent = (numbers[start:end].astype(np.float32) - np.float32(levels)) * each(steps, end)[start:]
    with np.errstate(all="ignore"):
        sent[~np.isfinite(sent)] = 0
        residual[start:end] += sent
