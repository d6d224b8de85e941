"""The number of a form of values, which travels with each part: a family, and what its members differ in.
Pure.

The lowest bits are the family, the others its argument. Families without an argument have numbers of their
own in `protocol.chunks`; those of collective rounds are made of signatures (`protocol.collectives`).
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "BFLOAT16",
    "FACTORS",
    "FLOAT16",
    "MAXIMA",
    "MOST_PACKED",
    "NARROW",
    "PACKED",
    "SPARSE",
    "argument_of",
    "family_of",
    "fraction_of",
    "narrow",
    "packed",
    "sparse",
]

_FAMILY_BITS: Final = 4
_ARGUMENT_BITS: Final = 24

NARROW: Final = 4
"""float32 that travels as a float of 16 bits, which is the argument: `FLOAT16` or `BFLOAT16`."""

FLOAT16: Final = 1
BFLOAT16: Final = 2
"""As in `collectives.Element`."""

PACKED: Final = 5
"""Whole numbers in as few bits as a sum needs; the argument is the largest number of one rank."""

SPARSE: Final = 6
"""Some elements of many. The argument is how many of them the result keeps, in hundredths of what a rank has
contributed on the average; 0: all."""

MAXIMA: Final = 7
"""Of each element the largest value of any rank."""

FACTORS: Final = 8
"""float32 as it is, of keys that are small and stand for large ones, as PowerSGD's factors do: a step sends
little else. It is the form of the key alone; its rounds are dense. Such keys have smaller chunks, and are
shared among the trees by themselves."""

MOST_PACKED: Final = 255
"""The largest number of one rank."""

_SUM_BITS: Final = 3
"""Bits of a packed sum beyond those of one rank's number, as sizes are counted."""

_SPARSE_FRACTION: Final = 1 / 16
"""Of the bytes of float32. How many entries there will be is unknown."""


def family_of(codec: int) -> int:
    """Return the family that a codec is of; -1: none, such as that of zeros of any form."""
    return codec & (1 << _FAMILY_BITS) - 1 if codec >= 0 else -1


def argument_of(codec: int) -> int | None:
    """Return the argument of a codec of these families; None: no such codec exists."""
    family, argument = family_of(codec), codec >> _FAMILY_BITS
    if family == NARROW:
        return argument if argument in (FLOAT16, BFLOAT16) else None
    if family == PACKED:
        return argument if 1 <= argument <= MOST_PACKED else None
    if family == SPARSE:
        return argument if 0 <= argument < 1 << _ARGUMENT_BITS else None
    return 0 if family == MAXIMA and argument == 0 else None


def fraction_of(codec: int) -> float:
    """Return about which part of float32's bytes values of a codec have, of these families; of others 1."""
    family, argument = family_of(codec), argument_of(codec)
    if family == NARROW:
        return 1 / 2
    if family == PACKED and argument is not None:
        return min(1.0, (argument.bit_length() + _SUM_BITS) / 32)
    return _SPARSE_FRACTION if family == SPARSE else 1.0


def narrow(element: int) -> int:
    """Return the codec of float32 that travels as a type of 16 bits."""
    return _codec(NARROW, element)


def packed(most: int) -> int:
    """Return the codec of whole numbers from 0 to `most` at each rank."""
    return _codec(PACKED, most)


def sparse(kept: float) -> int:
    """Return the codec of sparse values whose result keeps `kept` times what a rank has contributed on the
    average; 0: all.
    """
    return _codec(SPARSE, round(kept * 100))


def _codec(family: int, argument: int) -> int:
    codec = argument << _FAMILY_BITS | family
    if argument_of(codec) is None:
        raise ValueError(f"family {family} has no codec with argument {argument}")
    return codec
