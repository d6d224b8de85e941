"""What the scheduler and all nodes compute alike: forms' numbers, chunks, collective rounds. Pure."""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = [
    "BFLOAT16",
    "COLLECTIVE",
    "ELEMENT_BYTES",
    "FACTORS",
    "FLOAT16",
    "ITEM_BYTES",
    "LEAST_FACTORS",
    "MAXIMA",
    "MOST_BYTES",
    "MOST_PACKED",
    "MOST_SEGMENTS",
    "NARROW",
    "PACKED",
    "QUANTISED",
    "ROW_SPARSE",
    "ROW_SPARSE_CHUNK_BYTES",
    "SLOT_ELEMENT_BYTES",
    "SPARSE",
    "UNDETERMINED_FORM",
    "ChunkSizes",
    "Element",
    "Reduction",
    "Signature",
    "aligned",
    "argument_of",
    "can_reduce",
    "capacity_of",
    "counted_bytes",
    "encoded_fraction",
    "family_of",
    "granted_at_first",
    "granted_by",
    "narrow",
    "packed",
    "pitch",
    "rounds_under_way",
    "row_length",
    "slot_of",
    "sparse",
]


# The number of a form of values, which travels with each part: a family, and what its members differ in.
#
# The lowest bits are the family, the others its argument. Families without an argument have numbers of their
# own below; those of collective rounds are made of signatures (`Signature`).

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


# Size and place of chunks in a job: arithmetic that the scheduler and all nodes must do alike.

ITEM_BYTES: Final = {
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}
"""Types that can be summed, by NumPy name, and the bytes of one value."""

SLOT_ELEMENT_BYTES: Final = 4
"""A slot has as many bytes as a chunk of float32, the usual gradient."""

QUANTISED: Final = 1
"""Codec of rounds with gradient compression, and of keys most of whose rounds have it."""

_QUANTISED_FRACTION: Final = 1 / 8
"""Quantised values count this part of float32 among the job's bytes: they have 2 bits at a leaf, more
above."""

_MOST_GROWTH: Final = 4
"""Factor by which a chunk has more elements, at most, if they take fewer bytes. A leaf's part then has a
quarter of the bytes of a plain chunk: the least by which a link is measured."""

_FACTORS_CHUNKS: Final = 8
"""Chunks of a small key of factors, at most. With more of them, rounds take no less time."""

LEAST_FACTORS: Final = 1024
"""Elements of such a chunk, at least: 4 KiB, of which headers are 3 %."""

UNDETERMINED_FORM: Final = -1
"""Codec of zeros that fit a round of any form: the contribution of a rank whose program has ended."""

ROW_SPARSE: Final = 2
"""Codec of row-sparse keys, of which only the rows that have values are sent."""

COLLECTIVE: Final = 3
"""Codec of keys whose rounds may be of any type, shape and operation (`protocol.collectives`)."""

_COLLECTIVE_ALIGNMENT: Final = 4
"""Elements of a collective key's chunk come in this multiple, since 16 bytes hold whole elements of any
type."""

ROW_SPARSE_CHUNK_BYTES: Final = 32_768
"""Size of a row-sparse chunk among the job's bytes. How many of its rows will have values is unknown, but in
embeddings, which such keys are for, they are few."""

_FEW_CHUNKS: Final = 32
"""Chunks of a row-sparse key: enough for all trees of a policy. Hops are short all the same, since most rows
are not sent. Each chunk costs processor time even if it has no rows."""

_NUMBER_ELEMENTS: Final = 2
"""Most elements that the number of a row (4 bytes), which is sent with it, corresponds to."""


def row_length(shape: tuple[int, ...]) -> int:
    """Return the elements of one row of an array; at least 1."""
    return max(1, math.prod(shape[1:]))


def slot_of(offset_bytes: int, chunk_size: int) -> int:
    """Return the slot of the first chunk of a key; a policy maps slots to trees.

    Slots of first chunks follow the job's bytes, not its keys. So hundreds of tiny keys share a tree
    according to their bytes, and registering a key never moves another key's chunks. Further chunks of a key,
    which have equal bytes, take the next slots, so that each key's bytes are shared among the trees as the
    policy says.

    Args:
        offset_bytes: of the key in the job.
        chunk_size: of the job, in elements.
    """
    return offset_bytes // (chunk_size * SLOT_ELEMENT_BYTES)


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """How many elements a chunk has, by the size of its key."""

    smallest: int
    """Of all keys but large ones (CHUNK_SIZE)."""
    largest: int
    enough: int
    """Number of chunks that keeps all trees and hops of a pipeline busy. A key that would have more has
    larger chunks instead, since each costs processor time."""
    most: int = 2**20
    """Elements that fit into a message, of any type."""

    def of(self, elements: int) -> int:
        """Return the elements of a chunk of a key of so many elements."""
        return max(self.smallest, min(self.largest, -(-elements // self.enough)))

    def of_collective(self, elements: int) -> int:
        """Return the elements (of 4 bytes) of a chunk of a collective key: whole elements of any type."""
        return -(-self.of(elements) // _COLLECTIVE_ALIGNMENT) * _COLLECTIVE_ALIGNMENT

    def of_encoded(self, elements: int, codec: int) -> int:
        """Return the elements of a chunk of a key whose rounds travel in fewer bytes: a multiple of 8."""
        growth = min(_MOST_GROWTH, int(1 / encoded_fraction(codec)))
        return max(8, min(growth * self.of(elements), self.most) // 8 * 8)

    def of_factors(self, elements: int) -> int:
        """Return the elements of a chunk of a key of factors: small ones have several chunks, which take all
        trees, and of which a node forwards the first while the others arrive.
        """
        return min(self.of(elements), max(LEAST_FACTORS, -(-elements // _FACTORS_CHUNKS)))

    def of_rows(self, shape: tuple[int, ...]) -> int:
        """Return the elements of a chunk of a row-sparse key, in whole rows; 0: a row is too long for a
        message.
        """
        length = row_length(shape)
        rows = max(self.smallest // length, -(-shape[0] // _FEW_CHUNKS), 1) if shape else 1
        return min(rows, self.most // (length + _NUMBER_ELEMENTS)) * length


def pitch(chunk_size: int, item_bytes: int, codec: int) -> int:
    """Return the bytes from a chunk of a key to the next one, in the order of the job's bytes.

    Args:
        chunk_size: of the key, in elements.
        item_bytes: of one element.
        codec: the key's form.
    """
    size = chunk_size * item_bytes
    if codec == ROW_SPARSE:
        return min(size, ROW_SPARSE_CHUNK_BYTES)
    return int(size * encoded_fraction(codec))


def encoded_fraction(codec: int) -> float:
    """Return about which part of the bytes of its values a key's rounds have; 1: they travel as they are."""
    return _QUANTISED_FRACTION if codec == QUANTISED else fraction_of(codec)


def counted_bytes(size: int, chunk_size: int, item_bytes: int, codec: int) -> int:
    """Return the size of a key of `size` bytes among the job's bytes; see `pitch`."""
    if codec == ROW_SPARSE:
        return -(-size // (chunk_size * item_bytes)) * pitch(chunk_size, item_bytes, codec)
    return math.ceil(size * encoded_fraction(codec))


def aligned(offset_bytes: int, item_bytes: int) -> int:
    """Return the first multiple of `item_bytes` from `offset_bytes` on."""
    return -(-offset_bytes // item_bytes) * item_bytes


# Collective keys: what their rounds may be, and how many are under way at once. Arithmetic that the
# scheduler and all nodes must do alike.
#
# A push of an ordinary key is always of the key's own type and shape, and a sum. A collective key takes
# rounds of any type, shape and operation; all that they have in common is the order of magnitude of their
# bytes. So a process group needs a few dozen keys, whatever its program calls.

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
        signature = Signature(Reduction(reduction), Element(element), segments, codec)
        return signature if can_reduce(signature.reduction, signature.element) else None

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
