"""How far each rank has come, as an owner knows it (stale synchronous parallel; MLNET, HotCloud'15). Pure.

A clock of a rank has come once all that the rank pushed in it has been applied here: a tick says how much
that is, since on the network it may overtake the pushes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["Clocks"]


class Clocks:
    """Clocks that one store's scripts count, by rank."""

    def __init__(self, ranks: int) -> None:
        self._come: Final = [0] * ranks
        self._applied: Final[list[dict[int, int]]] = [{} for _ in range(ranks)]
        self._expected: Final[list[dict[int, int]]] = [{} for _ in range(ranks)]

    def applied(self, rank: int, clock: int) -> bool:
        """Note that a push of a rank's clock has been applied; return whether a clock has come by that."""
        counts = self._applied[rank]
        counts[clock] = counts.get(clock, 0) + 1
        return self._advance(rank)

    def ended(self, rank: int, clock: int, pushed: int) -> bool:
        """Note that a rank's clock is `clock` now, and that it pushed so often in the one before."""
        if clock <= self._come[rank]:  # said before
            return False
        self._expected[rank][clock - 1] = pushed
        return self._advance(rank)

    def slowest(self, ranks: Iterable[int]) -> int | None:
        """Return the least clock of some ranks; None of none."""
        return min((self._come[rank] for rank in ranks), default=None)

    def of(self, rank: int) -> int:
        """Return how many clocks of a rank have come."""
        return self._come[rank]

    def _advance(self, rank: int) -> bool:
        began, expected, applied = self._come[rank], self._expected[rank], self._applied[rank]
        while True:
            clock = self._come[rank]
            if clock not in expected or applied.get(clock, 0) < expected[clock]:
                return clock > began
            del expected[clock]
            applied.pop(clock, None)
            self._come[rank] += 1
