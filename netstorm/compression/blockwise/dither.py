"""Noise for stochastic rounding, at the cost of an addition. Pure.

To draw a number for each value takes as long as all else that encoding does. So noise is cut from one table,
at a place that depends on rank, gradient and tensor. The table has equally spaced numbers, each as often as
any other, in random order. Over all places each value gets them equally often, too, so rounding is right on
the average, to half of their distance.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final
from zlib import crc32

import numpy as np

from netstorm.compression.codec import Floats, Place

__all__ = ["RESOLUTION", "noise"]

_NUMBERS: Final = 1 << 17
"""Of the table: 512 KiB. More would leave a processor's cache."""

_DIFFERENT: Final = 1 << 12
"""Numbers that differ. Of more, the largest plus 127 would be 128 in float32."""

RESOLUTION: Final = 1 / (2 * _DIFFERENT)
"""How far, at most, the mean of a rounded value is from the value, in steps."""

_STRIDE: Final = 54_037
"""From one cut to the next, modulo the numbers; odd, so that all places occur."""

_SEED: Final = 1


def noise(place: Place, most: int) -> Iterator[Floats]:
    """Yield noise for one piece of a gradient after the other: views, between 0 and 1.

    Args:
        place: which gradient it is.
        most: values of a piece.
    """
    table = _table(most)
    start = crc32(repr((place.rank, place.round, place.shape)).encode())
    while True:
        start %= _NUMBERS
        yield table[start : start + most]
        start += _STRIDE


@functools.lru_cache(maxsize=2)
def _table(most: int) -> Floats:
    """Return the numbers in a random order, and the first `most` of them again."""
    random = np.random.Generator(np.random.SFC64(_SEED))
    numbers = (random.permutation(_NUMBERS) % _DIFFERENT).astype(np.float32)
    numbers += np.float32(0.5)
    numbers /= np.float32(_DIFFERENT)
    found = np.resize(numbers, _NUMBERS + most)
    found.flags.writeable = False
    return found
