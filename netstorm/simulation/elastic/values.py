"""What each rank of a simulated job contributes to each round, and the exact sum over any ranks. Pure.

Values are small whole numbers, so that sums are exact in every type. They are windows of one long row of
random numbers a rank, so they cost no time, and differ from rank to rank, key to key and round to round.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.protocol.frames import ranks_in
from netstorm.simulation.pending import Array

__all__ = ["THRESHOLD", "ExactValues", "KeyKind", "KeyUse"]

THRESHOLD: Final = 0.5
"""Of keys with gradient compression."""

_LARGEST: Final = 40
"""Largest value: sums of sixteen are exact in float16."""

_ROW: Final = 4099
"""Numbers a rank: prime, so that windows do not repeat soon."""


class KeyKind(enum.Enum):
    """How the values of a key travel."""

    DENSE = "dense"
    QUANTISED = "quantised"
    ROWS = "rows"
    INITIAL = "initial"
    """Dense, one round alone: the value of the lowest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyUse:
    """One key of a program."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: KeyKind = KeyKind.DENSE
    rounds: int = 1
    """In each step of the program."""

    def rounds_before(self, step: int) -> int:
        """Return how many rounds the steps before `step` have."""
        return min(step, 1) if self.kind is KeyKind.INITIAL else step * self.rounds

    def rounds_of(self, step: int) -> range:
        """Return the rounds of a step."""
        return range(self.rounds_before(step), self.rounds_before(step + 1))


class ExactValues:
    """The contributions of all ranks of one job."""

    def __init__(self, seed: int, ranks: int) -> None:
        """Draw the numbers of `ranks` ranks; the same seed draws the same."""
        numbers = np.random.default_rng([seed, ranks])
        drawn = numbers.integers(1, _LARGEST + 1, (ranks, _ROW)) * numbers.choice((-1, 1), (ranks, _ROW))
        self._numbers: Final[npt.NDArray[np.int64]] = drawn.astype(np.int64)

    def of(self, key: KeyUse, rank: int, round: int) -> Array:
        """Return what a rank contributes to a round, as float64 or the key's own integers."""
        return self._whole(key, rank, round).astype(key.dtype).reshape(key.shape) * _unit(key)

    def total(self, key: KeyUse, ranks: Iterable[int], round: int) -> Array:
        """Return the right result of a round, flat: the exact sum over some ranks."""
        chosen = sorted(ranks)[:1] if key.kind is KeyKind.INITIAL else list(ranks)
        total = np.zeros(int(np.prod(key.shape)), np.int64)
        for rank in chosen:
            total += self._whole(key, rank, round)
        found: Array = total.astype(key.dtype) * _unit(key)
        return found

    def expected(
        self, key: KeyUse, contributors: Iterable[tuple[int, list[tuple[int, int]]]], round: int
    ) -> Array:
        """Return the right result of a round whose parts have different contributors.

        Args:
            key: the key.
            contributors: bit sets of ranks, each with the (start, end) of elements that are their sum.
            round: the round.
        """
        parts = list(contributors)
        if len(parts) == 1:
            return self.total(key, ranks_in(parts[0][0]), round)
        result = np.zeros(int(np.prod(key.shape)), key.dtype)
        for bits, spans in parts:
            total = self.total(key, ranks_in(bits), round)
            for start, end in spans:
                result[start:end] = total[start:end]
        return result

    def _whole(self, key: KeyUse, rank: int, round: int) -> npt.NDArray[np.int64]:
        size = int(np.prod(key.shape))
        seed = sum(map(ord, key.name))
        start = (seed * 977 + round * 131) % (_ROW - size)
        values = self._numbers[rank, start : start + size]
        if key.kind is KeyKind.QUANTISED:
            return values % 3 - 1
        if key.kind is KeyKind.ROWS:
            rows = values.reshape(key.shape[0], -1)
            chosen: npt.NDArray[np.int64] = np.where(rows[:, :1] % 3 == 0, rows, 0).ravel()
            return chosen
        return values


def _unit(key: KeyUse) -> Array:
    return np.asarray(THRESHOLD if key.kind is KeyKind.QUANTISED else 1, key.dtype)
