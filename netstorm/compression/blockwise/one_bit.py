"""The sign of each value, and a magnitude a block (Seide et al., "1-bit stochastic gradient descent",
Interspeech 2014; EF-SignSGD: Karimireddy et al., arXiv 1901.09847). Pure.

A first round sums the mean magnitudes of the blocks; all ranks use their average. Then the signs are counted,
exactly. What that leaves of a gradient is added to the next one.
"""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from netstorm.compression.blockwise.blocks import BLOCK, blocks_of, each, pieces, scaled, sums
from netstorm.compression.codec import Floats, Part, Place, Rounds, State, Transfer, take_residual
from netstorm.compression.packed_numbers import sums_into
from netstorm.protocol.codecs import packed

__all__ = ["OneBit"]

_SIGNS: Final = packed(1)


class OneBit:
    """Signs with error feedback; zeros have one, too.

    A block in which any rank has NaN or infinity, or values whose sum is infinite in float32, becomes NaN or
    infinite at all ranks, and leaves no residual.
    """

    name: ClassVar[str] = "1bit"
    fingerprint: ClassVar[str] = "1bit"

    def form(self, shape: tuple[int, ...]) -> int:
        """Return the codec of most rounds."""
        return _SIGNS

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Return the key of the magnitudes."""
        return (Part("scales", blocks_of(int(np.prod(shape, dtype=np.int64)))),)

    def rounds(self, gradient: Floats, state: State, place: Place) -> Rounds:
        """Agree on magnitudes, then count signs."""
        residual = take_residual(gradient, state)
        counts = np.full(blocks_of(len(gradient)), BLOCK, np.float32)
        counts[-1:] -= -len(gradient) % BLOCK
        with np.errstate(all="ignore"):
            magnitudes = sums(gradient) / counts
        ranks = yield Transfer(1, 0, magnitudes, magnitudes)
        magnitudes /= np.float32(max(1, ranks))
        negative = np.packbits(np.signbit(gradient), bitorder="little")
        with np.errstate(all="ignore"):
            for piece, blocks, sent in pieces(len(gradient)):
                np.copysign(each(magnitudes[blocks], len(sent)), gradient[piece], out=sent)
                np.subtract(gradient[piece], sent, out=residual[piece])
        if not np.isfinite(magnitudes).all():
            residual[~np.isfinite(residual)] = 0
        results: list[tuple[int, int, bytes, int]] = []
        yield Transfer(0, _SIGNS, np.invert(negative)[np.newaxis], results)
        with np.errstate(all="ignore"):
            for start, end, payload, contributors in results:
                sums_into(gradient[start:end], payload, contributors.bit_count(), 1)
                if not contributors >> place.rank & 1:
                    _take_back(residual, negative, magnitudes, range(start, end))
            scaled(gradient, 2 * magnitudes, gradient)  # sums count halves


def _take_back(
    residual: Floats,
    negative: np.ndarray[tuple[int], np.dtype[np.uint8]],
    magnitudes: Floats,
    elements: range,
) -> None:
    """Add what this rank has sent of some elements to its residual again: their sums came without it."""
    start, end = elements.start, elements.stop
    sent = each(magnitudes, end)[start:]
    sent[np.unpackbits(negative, count=end, bitorder="little")[start:].view(np.bool_)] *= -1
    sent[~np.isfinite(sent)] = 0
    residual[start:end] += sent
