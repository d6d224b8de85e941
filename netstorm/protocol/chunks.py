"""Where chunks are in a job: arithmetic that the scheduler and every node must do alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["ITEM_BYTES", "SLOT_ELEMENT_BYTES", "ChunkSizes", "aligned", "slot_of"]

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

    def of(self, elements: int) -> int:
        """Return the elements of a chunk of a key of so many elements."""
        return max(self.smallest, min(self.largest, -(-elements // self.enough)))


def aligned(offset_bytes: int, item_bytes: int) -> int:
    """Return the first multiple of `item_bytes` from `offset_bytes` on."""
    return -(-offset_bytes // item_bytes) * item_bytes
