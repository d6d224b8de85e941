"""Size and place of chunks in a job: arithmetic that the scheduler and all nodes must do alike. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from netstorm.protocol.codecs import fraction_of

__all__ = [
    "COLLECTIVE",
    "ITEM_BYTES",
    "LEAST_FACTORS",
    "QUANTISED",
    "ROW_SPARSE",
    "ROW_SPARSE_CHUNK_BYTES",
    "SLOT_ELEMENT_BYTES",
    "UNDETERMINED_FORM",
    "ChunkSizes",
    "aligned",
    "counted_bytes",
    "encoded_fraction",
    "pitch",
    "row_length",
    "slot_of",
]

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
