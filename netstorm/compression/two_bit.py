"""MXNet's gradient compression of type 2bit: of each value only whether it has reached +t, or -t. Pure.

A residual keeps what is lost, and is added to the next gradient, so small values count once they have
accumulated (Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech
2015). The arithmetic is that of MXNet's `quantize_2bit`, in float32 and in the same order, so the numbers are
the same bit for bit.

On the wire a sum over n ranks is, for each value, the integer s + n, where s from -n to n times t is the sum,
in as many bits as 2n has (`bit_planes`). One rank's values take 2 bits, a 16th of float32; those of 9 take 5.
Sums are never rounded or quantised again on the way, so all trees give the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.compression.bit_planes import Planes, plane_bytes, unpacked
from netstorm.compression.codec import Floats
from netstorm.compression.packed_numbers import packed_planes_of, packed_problem, parted_planes
from netstorm.protocol.frames import Buffer

__all__ = ["TWO_BIT_MOST", "Signs", "quantised", "two_bit_planes_of", "two_bit_problem", "two_bit_values"]

TWO_BIT_MOST: Final = 2
"""Of one rank's numbers (`packed_numbers`): 0 for -t, 1 for 0, 2 for +t."""

Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Signs:
    """A quantised gradient: one bit a value, eight to a byte, the first value in the least significant."""

    positive: Bits
    """Which values are +t."""
    negative: Bits
    """Which values are -t."""

    def planes(self, start: int, end: int) -> Planes | None:
        """Return values `start` to `end` as the sum over one rank; None: all are 0."""
        positive, negative = _cut(self.positive, start, end), _cut(self.negative, start, end)
        either = positive | negative
        if not either.any():
            return None
        found = np.empty((2, len(either)), np.uint8)
        np.invert(either, out=found[0])
        found[1] = positive
        return found


def quantised(gradient: Floats, residual: Floats, threshold: np.float32) -> Signs:
    """Return the quantised gradient; `residual` is updated, and keeps the rest. 6 GB/s.

    Args:
        gradient: flat.
        residual: of the same size, 0 at first.
        threshold: t, which is greater than 0.
    """
    with np.errstate(all="ignore"):  # the user sees inf and nan in the values, as with MXNet
        np.add(residual, gradient, out=residual)
        positive, negative = residual >= threshold, residual <= -threshold
        taken = np.multiply(positive.view(np.int8) - negative.view(np.int8), threshold, dtype=np.float32)
        np.subtract(residual, taken, out=residual)
    return Signs(np.packbits(positive, bitorder="little"), np.packbits(negative, bitorder="little"))


def two_bit_planes_of(ranks: int) -> int:
    """Return the bits of a value that is summed over `ranks` ranks."""
    return packed_planes_of(ranks, TWO_BIT_MOST)


def two_bit_problem(payload: Buffer, count: int, ranks: int) -> str | None:
    """Return what is wrong with a payload of `count` values summed over `ranks` ranks; None: nothing."""
    return packed_problem(payload, count, ranks, TWO_BIT_MOST)


def two_bit_values(payload: Buffer, ranks: int, threshold: np.float32, out: Floats) -> None:
    """Write the sums over `ranks` ranks to `out`, as values of the gradient. 4 GB/s."""
    count = len(out)
    found = unpacked(parted_planes(payload, ranks, TWO_BIT_MOST)[0], count)
    if ranks < 128:
        signed: npt.NDArray[np.int8] | npt.NDArray[np.int32] = np.subtract(
            found, ranks, dtype=np.uint8, casting="unsafe"
        ).view(np.int8)
    else:
        signed = found.astype(np.int32) - ranks
    np.multiply(signed, threshold, out=out, dtype=np.float32, casting="unsafe")


def _cut(bits: Bits, start: int, end: int) -> Bits:
    """Return bits `start` to `end`, beginning at a byte; the bits after the last one are undefined."""
    first, offset = divmod(start, 8)
    whole = bits[first : plane_bytes(end)]
    if not offset:
        return whole
    return np.packbits(
        np.unpackbits(whole, bitorder="little")[offset : offset + end - start], bitorder="little"
    )
