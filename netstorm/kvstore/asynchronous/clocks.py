"""The clock of each rank, as an owner knows it (stale synchronous parallel; MLNET, HotCloud'15). Pure.

A clock of a rank has ended at an owner once all that the rank pushed in it has been applied there. A tick
carries the number of those pushes, since it may overtake them on the network.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["Clocks"]


class Clocks:
    """The clocks of one store, by rank."""

    def __init__(self, ranks: int) -> None:
        self._ended: Final = [0] * ranks
        self._applied: Final[list[dict[int, int]]] = [{} for _ in range(ranks)]
        self._expected: Final[list[dict[int, int]]] = [{} for _ in range(ranks)]

    def applied(self, rank: int, clock: int) -> bool:
        """Count an applied push of a rank's clock; return whether that ends a clock."""
        counts = self._applied[rank]
        counts[clock] = counts.get(clock, 0) + 1
        return self._advance(rank)

    def ended(self, rank: int, clock: int, pushed: int) -> bool:
        """Record that a rank's clock is `clock` now, after `pushed` pushes in the one before. Return whether
        that ends a clock.
        """
        if clock <= self._ended[rank]:  # known already
            return False
        self._expected[rank][clock - 1] = pushed
        return self._advance(rank)

    def slowest(self, ranks: Iterable[int]) -> int | None:
        """Return the least number of ended clocks of some ranks; None of none."""
        return min((self._ended[rank] for rank in ranks), default=None)

    def of(self, rank: int) -> int:
        """Return how many clocks of a rank have ended."""
        return self._ended[rank]

    def _advance(self, rank: int) -> bool:
        began, expected, applied = self._ended[rank], self._expected[rank], self._applied[rank]
        while True:
            clock = self._ended[rank]
            if clock not in expected or applied.get(clock, 0) < expected[clock]:
                return clock > began
            del expected[clock]
            applied.pop(clock, None)
            self._ended[rank] += 1
