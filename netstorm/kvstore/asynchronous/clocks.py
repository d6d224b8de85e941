"""The clock of each rank, as an owner knows it (stale synchronous parallel; MLNET, HotCloud'15). Pure.

A clock of a rank has ended at an owner once all that the rank pushed in it has been applied there. A tick
carries the number of those pushes, since it may overtake them on the network. In an elastic job, where blocks
change owners, a rank sends it once its pushes have been confirmed, and none need to be counted.

A process that joins later counts its clocks from the slowest one of the others, which owners tell it. Until
its first clock has ended, nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from netstorm.errors import ProtocolViolation

__all__ = ["MOST_COUNTED", "Clocks", "check_counts"]

MOST_COUNTED: Final = 2**53
"""Clocks, or pushes: more than any job makes. Messages carry sums of such numbers, of at most 64 bits."""


class Clocks:
    """The clocks of one store, by rank."""

    def __init__(self, ranks: int) -> None:
        self._ended: Final = [0] * ranks
        """-1: a process that has joined later, and has not ended a clock."""
        self._applied: Final[list[dict[int, int]]] = [{} for _ in range(ranks)]
        self._expected: Final[list[dict[int, int]]] = [{} for _ in range(ranks)]

    @property
    def ended_by_rank(self) -> tuple[int, ...]:
        """How many clocks of each rank have ended; -1: see `forget`."""
        return tuple(self._ended)

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

    def reached(self, rank: int, clock: int) -> bool:
        """Record that `clock` clocks of a rank have ended, with all their pushes; return whether that is
        news.
        """
        if clock <= self._ended[rank]:
            return False
        self._ended[rank] = clock
        return True

    def merge(self, ended: Sequence[int]) -> None:
        """Take over what another rank has heard, where that is more."""
        for rank, clocks in enumerate(ended):
            self._ended[rank] = max(clocks, self._ended[rank])

    def forget(self, rank: int) -> None:
        """Record that a rank's process has left, or that it has joined later: nobody waits for it."""
        self._ended[rank] = -1
        self._applied[rank].clear()
        self._expected[rank].clear()

    def slowest(self, ranks: Iterable[int]) -> int | None:
        """Return the least number of ended clocks of some ranks, without those that have just joined; None of
        none.
        """
        return min((self._ended[rank] for rank in ranks if self._ended[rank] >= 0), default=None)

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


def check_counts(*counts: int) -> None:
    """Check counts of pushes or clocks that another rank has sent; -1 stands for none.

    Raises:
        ProtocolViolation: one is out of range.
    """
    for count in counts:
        if not -1 <= count <= MOST_COUNTED:
            raise ProtocolViolation(f"a count of {count} pushes or clocks: expected at most {MOST_COUNTED}")
