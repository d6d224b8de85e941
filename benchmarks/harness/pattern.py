"""Values whose sum is known exactly, so that every round is checked element by element.

Element i of rank r in round t is (i mod 1021) (r + 1) + t: a chunk that arrives twice, not at all, in another
place or from another round gives a wrong number. All sums are whole numbers far below 2^24, which float32
holds exactly.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Arrays", "fill", "wrong_sum"]

Block = NDArray[np.float32]

_PERIOD = 1021
_BLOCK = 1 << 20
"""Elements at a time, so that filling and checking need next to no memory of their own."""


class Arrays(Protocol):
    """Float32 arrays that are reduced in place."""

    sizes: list[int]
    """Elements of each array."""

    def write(self, index: int, start: int, values: Block) -> None:
        """Overwrite a part of array `index`."""

    def read(self, index: int, start: int, stop: int) -> Block:
        """Return a part of array `index`."""


def fill(arrays: Arrays, *, rank: int, number: int) -> None:
    """Write this rank's addend of round `number`."""
    for index, start, stop in _blocks(arrays):
        arrays.write(index, start, _ramp(index, start, stop) * np.float32(rank + 1) + np.float32(number))


def wrong_sum(arrays: Arrays, *, nodes: int, number: int, tolerance: float = 0.0) -> str | None:
    """Return where and how the sum of round `number` is wrong, or None if it is right.

    Args:
        tolerance: what part of the largest value a sum may be off, for systems whose arithmetic rounds.
    """
    most = tolerance * (_PERIOD * nodes * (nodes + 1) / 2 + nodes * number)
    total = np.float32(nodes * (nodes + 1) // 2)
    for index, start, stop in _blocks(arrays):
        found = arrays.read(index, start, stop)
        expected = _ramp(index, start, stop) * total + np.float32(nodes * number)
        wrong = np.abs(found - expected) > most
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            where = f"array {index} has {found[at]} at {start + at}, expected {expected[at]}"
            return f"wrong sum in round {number}: {where}"
    return None


def _blocks(arrays: Arrays) -> list[tuple[int, int, int]]:
    return [
        (index, start, min(start + _BLOCK, size))
        for index, size in enumerate(arrays.sizes)
        for start in range(0, size, _BLOCK)
    ]


def _ramp(index: int, start: int, stop: int) -> Block:
    return ((np.arange(start, stop, dtype=np.int64) + 17 * index) % _PERIOD).astype(np.float32)
