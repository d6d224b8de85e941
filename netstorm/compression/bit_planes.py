"""Small integers in as few bits as hold them, added without being unpacked.

Integers of `planes` bits are stored bit by bit: a plane has one bit of each, eight to a byte, and the planes
follow one another, the least significant first. Two such arrays are added as hardware would do it, by full
adders, with NumPy's bitwise operations on whole planes: 8 integers a byte, where unpacked ones would take a
byte each. Unused bits at the end of a plane belong to integers that nobody reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Planes", "add", "add_constant", "exceeds", "plane_bytes", "unpacked"]

Planes = npt.NDArray[np.uint8]
"""Of shape (planes, bytes of a plane)."""


def plane_bytes(count: int) -> int:
    """Return the bytes of a plane of so many integers."""
    return -(-count // 8)


def add(first: Planes, second: Planes, planes: int) -> Planes:
    """Return the sums of the integers of two arrays.

    Args:
        planes: of the result: so many that no sum is too large for them, and at least those of either.
    """
    total = np.empty((planes, first.shape[1]), np.uint8)
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    carry: Any = None
    for plane in range(planes):
        if plane < len(shorter):
            one, other = longer[plane], shorter[plane]
            differ = np.bitwise_xor(one, other, out=total[plane])
            both = one & other
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
    carry: Any = None
    for plane in range(planes):
        one = values[plane] if plane < len(values) else None
        if not constant >> plane & 1:
            carry = _carried(one, carry, total[plane])
        elif one is None:  # 1 + carry
            total[plane] = 0xFF if carry is None else ~carry
        elif carry is None:
            np.invert(one, out=total[plane])
            carry = one
        else:
            np.invert(one ^ carry, out=total[plane])
            carry = one | carry
    return total


def _carried(one: Planes | None, carry: Any, total: Planes) -> Any:
    """Write one plane plus a carry; return the next carry."""
    if one is None or carry is None:
        total[:] = carry if one is None and carry is not None else 0 if one is None else one
        return None
    np.bitwise_xor(one, carry, out=total)
    return one & carry


def exceeds(values: Planes, limit: int) -> bool:
    """Return whether any of the integers is larger than `limit`."""
    if limit >= (1 << len(values)) - 1:
        return False
    equal: Any = None
    """Whether the more significant bits are those of `limit`; None: all are."""
    found: Any = None
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
    kind: Any = np.uint8 if len(values) <= 8 else np.uint16
    total = np.unpackbits(values[0], count=count, bitorder="little").astype(kind, copy=False)
    for plane in range(1, len(values)):
        bits = np.unpackbits(values[plane], count=count, bitorder="little").astype(kind, copy=False)
        total |= np.left_shift(bits, plane, out=bits)
    return total
