"""Collective keys: what their rounds may be, and how many are under way at once. Arithmetic that the
scheduler and all nodes must do alike. Pure.

A push of an ordinary key is always of the key's own type and shape, and a sum. A collective key takes rounds
of any type, shape and operation; all that they have in common is the order of magnitude of their bytes. So a
process group needs a few dozen keys, whatever its program calls.
"""

from __future__ import annotations

import enum
import functools
from typing import Final, NamedTuple

from netstorm.protocol.chunks import COLLECTIVE

__all__ = [
    "ELEMENT_BYTES",
    "MOST_BYTES",
    "MOST_SEGMENTS",
    "Element",
    "Reduction",
    "Signature",
    "can_reduce",
    "capacity_of",
    "granted_at_first",
    "granted_by",
    "rounds_under_way",
]

_FAMILY_BITS: Final = 4
"""The lowest bits of a codec say which family it is of (`protocol.codecs`)."""

_OPERATION_BITS: Final = 4
_ELEMENT_BITS: Final = 5
_SEGMENT_BITS: Final = 14
_LENGTH_BITS: Final = 36

MOST_SEGMENTS: Final = 2**_SEGMENT_BITS - 1
MOST_BYTES: Final = 2**_LENGTH_BITS - 1

_SMALLEST_CAPACITY: Final = 65_536
"""Elements of the smallest class: one chunk. Most collectives are small, and share one key."""

_STEPS: Final = 4
"""Classes an octave: a round has at least four fifths of its key's bytes, by which the job is planned."""

_BYTES_UNDER_WAY: Final = 16 * 2**20
"""About what all rounds under way of one key may have: enough to fill a long link."""

_MOST_UNDER_WAY: Final = 32
_FEWEST_UNDER_WAY: Final = 2
"""One round in which results come back while sums of the next one go up. New policies apply from the first
round on that is not under way, so large keys have no more."""

ELEMENT_BYTES: Final = 4
"""Collective keys are registered in units of float32."""


class Reduction(enum.IntEnum):
    """How the contributions to one element become its result."""

    SUM = 0
    AVERAGE = 1
    PRODUCT = 2
    MINIMUM = 3
    MAXIMUM = 4
    AND = 5
    OR = 6
    XOR = 7
    COPY = 8
    """One rank contributes."""


class Element(enum.IntEnum):
    """The type of one element."""

    BYTES = 0
    """Not to be reduced."""
    FLOAT16 = 1
    BFLOAT16 = 2
    FLOAT32 = 3
    FLOAT64 = 4
    INT8 = 5
    INT16 = 6
    INT32 = 7
    INT64 = 8
    UINT8 = 9
    UINT16 = 10
    UINT32 = 11
    UINT64 = 12
    BOOL = 13


_FLOATS: Final = frozenset({Element.FLOAT16, Element.BFLOAT16, Element.FLOAT32, Element.FLOAT64})
_BITWISE: Final = frozenset({Reduction.AND, Reduction.OR, Reduction.XOR})


def can_reduce(reduction: Reduction, element: Element) -> bool:
    """Return whether elements of a type can be reduced so: bits only of whole numbers, bytes not at all."""
    if element is Element.BYTES:
        return reduction is Reduction.COPY
    if element is Element.BOOL:
        return reduction is not Reduction.AVERAGE
    return element not in _FLOATS or reduction not in _BITWISE


class Signature(NamedTuple):
    """What all ranks must agree on in a collective round: it is the round's codec."""

    reduction: Reduction
    element: Element
    segments: int
    """Equal parts of the values, each with chunks of its own: one, or as many as the group has ranks."""
    segment_bytes: int

    @functools.lru_cache(maxsize=1024)  # noqa: B019 -- a signature is a value
    def codec(self) -> int:
        """Return the signature as a number below 2⁶³."""
        value = self.segment_bytes
        for part, bits in (
            (self.segments, _SEGMENT_BITS),
            (self.element, _ELEMENT_BITS),
            (self.reduction, _OPERATION_BITS),
            (COLLECTIVE, _FAMILY_BITS),
        ):
            value = value << bits | part
        return value

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of_codec(codec: int) -> Signature | None:
        """Return the signature that a codec stands for; None: none."""
        if codec < 0 or codec & (1 << _FAMILY_BITS) - 1 != COLLECTIVE:
            return None
        parts = []
        for bits in (_FAMILY_BITS, _OPERATION_BITS, _ELEMENT_BITS, _SEGMENT_BITS):
            parts.append(codec & (1 << bits) - 1)
            codec >>= bits
        _, reduction, element, segments = parts
        if reduction > max(Reduction) or element > max(Element) or segments < 1 or codec > MOST_BYTES:
            return None
        found = Signature(Reduction(reduction), Element(element), segments, codec)
        return found if can_reduce(found.reduction, found.element) else None

    def chunks(self, chunk_bytes: int) -> int:
        """Return the number of chunks, if a chunk has at most so many bytes."""
        return self.segments * -(-self.segment_bytes // chunk_bytes)


def capacity_of(size: int) -> int:
    """Return the elements of the key that takes rounds of `size` bytes."""
    elements = -(-size // ELEMENT_BYTES)
    if elements <= _SMALLEST_CAPACITY:
        return _SMALLEST_CAPACITY
    octave = 1 << (elements - 1).bit_length() - 1
    step = max(1, octave // _STEPS)
    return octave + -(-(elements - octave) // step) * step


def rounds_under_way(elements: int, form: int) -> int:
    """Return how many rounds of a key may be under way at once at one rank.

    Args:
        elements: of the key.
        form: its codec.
    """
    if form != COLLECTIVE:
        return _FEWEST_UNDER_WAY
    fitting = _BYTES_UNDER_WAY // max(1, elements * ELEMENT_BYTES)
    return max(_FEWEST_UNDER_WAY, min(_MOST_UNDER_WAY, fitting))


def granted_at_first(under_way: int) -> int:
    """Return the last round that comes with the registration of a key, if so many may be under way."""
    return under_way - _FEWEST_UNDER_WAY


def granted_by(round: int, under_way: int) -> int:
    """Return the last round that a rank is granted by beginning `round`, if so many may be under way."""
    return round + under_way - 1
