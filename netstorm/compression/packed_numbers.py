"""Whole numbers as bit planes, and back. Pure.

One rank's numbers are 0 to `most`, and stand for -most/2 to most/2. If `most` is odd, none of them stands for
0, which a rank with nothing to say contributes. So such a sum has a last byte beside its planes: 1 if half a
unit is to be added to each of its numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from netstorm.compression.bit_planes import MOST_BITS, Planes, exceeds, plane_bytes, unpacked
from netstorm.compression.codec import Floats
from netstorm.protocol.frames import Buffer

__all__ = [
    "as_planes",
    "cut_planes",
    "joined_planes",
    "packed_planes_of",
    "packed_problem",
    "parted_planes",
    "sums_into",
]

Numbers = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


def as_planes(numbers: Numbers, most: int) -> Planes:
    """Return numbers from 0 to `most` as bit planes. 1 ns a number of 8 bits."""
    planes = np.empty((most.bit_length(), plane_bytes(len(numbers))), np.uint8)
    bits = np.empty_like(numbers)
    for plane in range(len(planes)):
        np.bitwise_and(numbers, numbers.dtype.type(1 << plane), out=bits)
        planes[plane] = np.packbits(bits, bitorder="little")
    return planes


def cut_planes(planes: Planes, start: int, end: int) -> Planes:
    """Return numbers `start` to `end`, beginning at a byte; the bits after the last one are undefined."""
    first, offset = divmod(start, 8)
    whole = planes[:, first : plane_bytes(end)]
    if not offset:
        return np.ascontiguousarray(whole)
    bits = np.unpackbits(whole, axis=1, bitorder="little")[:, offset : offset + end - start]
    return np.packbits(bits, axis=1, bitorder="little")


def packed_planes_of(ranks: int, most: int) -> int:
    """Return the bits of a sum over `ranks` ranks."""
    return (ranks * most).bit_length()


def joined_planes(planes: Planes, half: int, most: int) -> Buffer:
    """Return sums as a payload; `half`: 1 if half a unit is to be added to each."""
    content = planes.reshape(-1)
    return np.append(content, np.uint8(half)) if most % 2 else content


def parted_planes(payload: Buffer, ranks: int, most: int) -> tuple[Planes, int]:
    """Return a view of the sums of a payload, and what `joined` has got as `half`."""
    content = np.frombuffer(payload, np.uint8)
    half = int(content[-1]) if most % 2 else 0
    return content[: len(content) - most % 2].reshape(packed_planes_of(ranks, most), -1), half


def packed_problem(payload: Buffer, count: int, ranks: int, most: int) -> str | None:
    """Return what is wrong with a payload of `count` numbers summed over `ranks` ranks; None: nothing."""
    planes = packed_planes_of(ranks, most)
    if not 0 < planes <= MOST_BITS:
        return f"has sums of {planes} bits: expected 1 to {MOST_BITS}"
    size, right = memoryview(payload).nbytes, planes * plane_bytes(count) + most % 2
    if size != right:
        return f"has {size} bytes, not {right}: {count} sums over {ranks} ranks of {planes} bits"
    sums, half = parted_planes(payload, ranks, most)
    if half > 1:
        return f"has {half} halves: expected 0 or 1"
    return f"has values that no sum over {ranks} ranks has" if exceeds(sums, ranks * most - half) else None


def sums_into(out: Floats, payload: Buffer | None, ranks: int, most: int) -> None:
    """Write the sums over `ranks` ranks to `out`, as numbers from -ranks * most / 2 on."""
    if payload is None:
        out[:] = 0
        return
    planes, half = parted_planes(payload, ranks, most)
    lowest = np.float32((ranks * most - half) / 2)
    np.subtract(unpacked(planes, len(out)), lowest, out=out, dtype=np.float32)
