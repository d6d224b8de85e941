"""Comparing replicas: whether all ranks still hold the same values, which an optimizer could make differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from netstorm.protocol.frames import bits_of

__all__ = ["Drift", "ReplicaCheck"]

_OPEN: Final = 10_000
"""Most (key, round) pairs that some ranks have reported and others have not; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Two ranks hold different values of a key after the same round."""

    key: int
    round: int
    first_rank: int
    rank: int


@dataclass(slots=True)
class _Report:
    rank: int
    digest: int
    ranks: int
    """Bit set of the ranks that reported this digest."""


class ReplicaCheck:
    """Compares the digests that ranks report."""

    def __init__(self, ranks: int) -> None:
        self._everybody = (1 << ranks) - 1
        self._open: Final[dict[tuple[int, int], _Report]] = {}

    def set_ranks(self, ranks: Iterable[int]) -> None:
        """Compare the values of these ranks from now on."""
        self._everybody = bits_of(ranks)
        self._open.clear()

    def record(self, rank: int, key: int, round: int, digest: int) -> Drift | None:
        """Record a rank's digest of a key's value after a round. Returns the first difference, if any."""
        if not self._everybody >> rank & 1:
            return None
        report = self._open.setdefault((key, round), _Report(rank, digest, 0))
        if report.digest != digest:
            return Drift(key, round, report.rank, rank)
        report.ranks |= 1 << rank
        if report.ranks == self._everybody:
            del self._open[key, round]
        while len(self._open) > _OPEN:
            del self._open[next(iter(self._open))]
        return None
