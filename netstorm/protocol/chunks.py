"""Where chunks are in a job: arithmetic that the scheduler and every node must do alike."""

from __future__ import annotations

from typing import Final

__all__ = ["ITEM_BYTES", "SLOT_ELEMENT_BYTES", "aligned", "slot_of"]

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
    """Return the slot of a chunk that begins at byte `offset_bytes` of the job; a policy maps slots to trees.

    Slots number the job's bytes, not its chunks, for two reasons. Trees then get their shares by bytes, as
    the capacities that they were planned for demand: two float16 chunks share a slot, hundreds of tiny keys
    do, and a float64 chunk uses up two. And a chunk's slot depends on nothing but where it begins, so that
    registering a key never moves another's chunks.

    Args:
        offset_bytes: offset of the key in the job plus that of the chunk in the key.
        chunk_size: of the job, in elements.
    """
    return offset_bytes // (chunk_size * SLOT_ELEMENT_BYTES)


def aligned(offset_bytes: int, item_bytes: int) -> int:
    """Return the first multiple of `item_bytes` from `offset_bytes` on."""
    return -(-offset_bytes // item_bytes) * item_bytes
