"""Small integers in bit planes, added without being unpacked. Pure.

A plane has one bit of each integer, eight to a byte. Integers of n bits take n planes, the least significant
first. Two such arrays are added by full adders, as hardware does it, with NumPy's bitwise operations on whole
planes: that handles 8 integers a byte, where unpacked ones would take a byte each. Unused bits at the end of
a plane belong to integers that are never read.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

N = TypeVar("N", np.uint8, np.uint16)

__all__ = ["MOST_BITS", "Planes", "add_constant", "add_planes", "exceeds", "plane_bytes", "unpacked"]

Planes = npt.NDArray[np.uint8]
"""Of shape (planes, bytes of a plane)."""

MOST_BITS = 16
"""Of an integer."""

Plane = npt.NDArray[np.uint8]
"""Of shape (bytes,)."""


def plane_bytes(count: int) -> int:
    """Return the bytes of a plane of `count` integers."""
    return -(-count // 8)


def add_planes(first: Planes, second: Planes, planes: int) -> Planes:
    """Return the sums of the integers of two arrays.

    Args:
        planes: of the result: enough for every sum, and at least those of either array.
    """
    total = np.empty((planes, first.shape[1]), np.uint8)
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    carry: Plane | None = None
    for plane in range(planes):
        if plane < len(shorter):
            left, right = longer[plane], shorter[plane]
            differ = np.bitwise_xor(left, right, out=total[plane])
            both = left & right
            if carry is not None:
                both |= carry & differ
                differ ^= carry
            carry = both
        else:
            carry = _carried(longer[plane] if plane < len(longer) else None, carry, total[plane])
    return total


def add_constant(values: Planes, constant: int, planes: int) -> Planes:
    """Return the sums of integers and one constant; see `add`."""
    total = np.empty((planes, values.shape[1]), np.uint8)
    carry: Plane | None = None
    for plane in range(planes):
        bits = values[plane] if plane < len(values) else None
        if not constant >> plane & 1:
            carry = _carried(bits, carry, total[plane])
        elif bits is None:  # 1 + carry
            total[plane] = 0xFF if carry is None else ~carry
        elif carry is None:
            np.invert(bits, out=total[plane])
            carry = bits
        else:
            np.invert(bits ^ carry, out=total[plane])
            carry = bits | carry
    return total


def _carried(bits: Plane | None, carry: Plane | None, total: Plane) -> Plane | None:
    """Write one plane plus a carry; return the next carry."""
    if bits is None or carry is None:
        total[:] = carry if bits is None and carry is not None else 0 if bits is None else bits
        return None
    np.bitwise_xor(bits, carry, out=total)
    return bits & carry


def exceeds(values: Planes, limit: int) -> bool:
    """Return whether any of the integers is larger than `limit`."""
    if limit >= (1 << len(values)) - 1:
        return False
    equal: Plane | None = None
    """Which integers have the same more significant bits as `limit`; None: all."""
    found: Plane | None = None
    for plane in reversed(range(len(values))):
        bits = values[plane]
        if limit >> plane & 1:
            equal = bits if equal is None else equal & bits
        else:
            larger = bits if equal is None else equal & bits
            found = larger if found is None else found | larger
            equal = ~bits if equal is None else equal & ~bits
    return found is not None and bool(found.any())


def unpacked(values: Planes, count: int) -> npt.NDArray[np.uint8] | npt.NDArray[np.uint16]:
    """Return `count` integers, a byte each, or two if they have more than 8 bits."""
    if len(values) <= 8:
        return _joined_bits(values, count, np.dtype(np.uint8))
    return _joined_bits(values, count, np.dtype(np.uint16))


def _joined_bits(values: Planes, count: int, kind: np.dtype[N]) -> npt.NDArray[N]:
    total = np.unpackbits(values[0], count=count, bitorder="little").astype(kind, copy=False)
    for plane in range(1, len(values)):
        bits = np.unpackbits(values[plane], count=count, bitorder="little").astype(kind, copy=False)
        # A product, since NumPy's shifts are several times as slow.
        np.bitwise_or(total, np.multiply(bits, kind.type(1 << plane), out=bits), out=total)
    return total
