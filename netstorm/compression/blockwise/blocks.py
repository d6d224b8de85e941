"""Blocks of values that share a scale, and pieces of a gradient that fit into a processor's cache. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from netstorm.compression.codec import Floats

__all__ = ["BLOCK", "PIECE", "blocks_of", "each", "maxima", "pieces", "scaled", "sums"]

BLOCK: Final = 256
"""Values that share a scale: scales are 4 bytes a block, 1.6 % of the bytes of float32."""

PIECE: Final = 128 * BLOCK
"""Elements: 128 KiB. A gradient is encoded piece by piece, so that intermediate results stay in the cache."""

_NO_SIGN: Final = np.int32(0x7FFFFFFF)


def blocks_of(elements: int) -> int:
    """Return how many blocks so many values have; the last one may be shorter."""
    return -(-elements // BLOCK)


def pieces(elements: int) -> Iterator[tuple[slice, slice, Floats]]:
    """Yield which elements a piece has, which blocks, and memory for as many elements, the same each time."""
    memory = np.empty(min(elements, PIECE), np.float32)
    for start in range(0, elements, PIECE):
        end = min(elements, start + PIECE)
        yield slice(start, end), slice(start // BLOCK, blocks_of(end)), memory[: end - start]


def maxima(values: Floats) -> Floats:
    """Return the largest magnitude of each block; NaN is the largest of all."""
    # Floats without their sign have the order of whole numbers, NaN above infinity; those compare faster.
    found = np.empty(blocks_of(len(values)), np.int32)
    bits = values.view(np.int32)
    for elements, blocks, memory in pieces(len(values)):
        magnitudes = np.bitwise_and(bits[elements], _NO_SIGN, out=memory.view(np.int32))
        np.maximum.reduceat(magnitudes, _starts(memory), out=found[blocks])
    return found.view(np.float32)


def sums(values: Floats) -> Floats:
    """Return the sum of the magnitudes of each block."""
    found = np.empty(blocks_of(len(values)), np.float32)
    for elements, blocks, magnitudes in pieces(len(values)):
        np.abs(values[elements], out=magnitudes)
        np.add.reduceat(magnitudes, _starts(magnitudes), out=found[blocks])
    return found


def scaled(values: Floats, of_blocks: Floats, out: Floats) -> None:
    """Write values, each times what belongs to its block, to `out`, which may be the same memory."""
    full = len(values) // BLOCK * BLOCK
    np.multiply(
        values[:full].reshape(-1, BLOCK),
        of_blocks[: full // BLOCK, np.newaxis],
        out=out[:full].reshape(-1, BLOCK),
    )
    if full < len(values):
        np.multiply(values[full:], of_blocks[-1], out=out[full:])


def each(of_blocks: Floats, elements: int) -> Floats:
    """Return what belongs to the block of each of so many elements."""
    return np.repeat(of_blocks, BLOCK)[:elements]


def _starts(piece: Floats) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(0, len(piece), BLOCK)
