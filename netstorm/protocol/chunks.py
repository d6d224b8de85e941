"""Where chunks are in a job: arithmetic that the scheduler and every node must do alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

__all__ = [
    "ITEM_BYTES",
    "QUANTISED",
    "ROW_SPARSE",
    "ROW_SPARSE_CHUNK_BYTES",
    "SLOT_ELEMENT_BYTES",
    "UNDETERMINED_FORM",
    "ChunkSizes",
    "aligned",
    "counted_bytes",
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
"""Codec of rounds under gradient compression, and of keys of which most rounds are under it."""

_QUANTISED_PART: Final = 8
"""What a float32 is divided by among the job's bytes if it is quantised: 2 bits at a leaf, more above."""

_QUANTISED_GROWTH: Final = 4
"""How many times as many elements a chunk has whose rounds are quantised. A leaf's part then has a quarter of
the bytes of a plain chunk, which is the least that a link is measured by.
"""

UNDETERMINED_FORM: Final = -1
"""Codec of zeros that fit a round of whatever form: those that stand for a rank whose program has ended."""

ROW_SPARSE: Final = 2
"""Codec of keys of which some rows travel, those that have values."""

ROW_SPARSE_CHUNK_BYTES: Final = 32_768
"""What a chunk of such a key counts among the job's bytes. How many of its rows will have values nobody
knows, but in embeddings, for which there are such keys, they are few.
"""

_FEW_CHUNKS: Final = 32
"""Of a row-sparse key: enough for the trees of a policy to share it, and since most of what is in them does
not travel, hops are short all the same. Each chunk costs processor time even if it has no rows.
"""

_NUMBER_ELEMENTS: Final = 2
"""At most so many elements is the number of a row, which travels with it: 4 bytes."""


def row_length(shape: tuple[int, ...]) -> int:
    """Return the elements of one row of an array; at least 1."""
    return max(1, math.prod(shape[1:]))


def slot_of(offset_bytes: int, chunk_size: int) -> int:
    """Return the slot of the first chunk of a key; a policy maps slots to trees.

    The first slots of keys number the job's bytes, not its keys, so that hundreds of tiny keys share a tree,
    as their bytes deserve, and registering a key never moves another's chunks. Within a key the chunks, which
    have equal bytes, take one slot after the other, so that each key's bytes are shared as the policy says.

    Args:
        offset_bytes: of the key in the job.
        chunk_size: of the job, in elements.
    """
    return offset_bytes // (chunk_size * SLOT_ELEMENT_BYTES)


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """How many elements a chunk has, by the size of its key."""

    smallest: int
    """CHUNK_SIZE: of all keys but large ones."""
    largest: int
    enough: int
    """Chunks that keep all trees and hops of a pipeline busy. A key that would have more has larger ones
    instead, since each costs processor time.
    """
    most: int = 2**20
    """Elements that fit into a message, whatever their type."""

    def of(self, elements: int) -> int:
        """Return the elements of a chunk of a key of so many elements."""
        return max(self.smallest, min(self.largest, -(-elements // self.enough)))

    def of_quantised(self, elements: int) -> int:
        """Return the elements of a chunk of a key whose rounds are quantised: whole bytes of their bits."""
        return max(8, min(_QUANTISED_GROWTH * self.of(elements), self.most) // 8 * 8)

    def of_rows(self, shape: tuple[int, ...]) -> int:
        """Return the elements of a chunk of a row-sparse key: of whole rows; 0: a row is too long for a
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
    return size // _QUANTISED_PART if codec == QUANTISED else size


def counted_bytes(size: int, chunk_size: int, item_bytes: int, codec: int) -> int:
    """Return what a key of `size` bytes counts among the job's bytes; see `pitch`."""
    if codec == ROW_SPARSE:
        return -(-size // (chunk_size * item_bytes)) * pitch(chunk_size, item_bytes, codec)
    return -(-size // _QUANTISED_PART) if codec == QUANTISED else size


def aligned(offset_bytes: int, item_bytes: int) -> int:
    """Return the first multiple of `item_bytes` from `offset_bytes` on."""
    return -(-offset_bytes // item_bytes) * item_bytes
