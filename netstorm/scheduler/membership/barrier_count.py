"""Counting arrivals at barriers: the n-th barrier of every rank is the same one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from netstorm.errors import ProtocolViolation, UsageError

__all__ = ["BarrierCount"]

_OUTSTANDING: Final = 64
"""Barriers at which a rank may arrive before the first is reached. A thread blocks at each, so only a process
with many threads has several."""


class BarrierCount:
    """At how many barriers each rank has arrived."""

    def __init__(self, ranks: int) -> None:
        self._arrivals: Final = [0] * ranks
        self._reached = 0
        self._excluded: Final[set[int]] = set()
        self._late: Final[dict[int, int]] = {}
        """By rank that joined later: the barrier from which on it is waited for."""
        self._since: dict[int, float] = {}
        """By barrier that is not reached: when the first rank arrived."""

    @property
    def oldest(self) -> int:
        """Number of the first barrier that is not reached."""
        return self._reached

    @property
    def since(self) -> float:
        """When the first rank arrived at the oldest barrier; inf if none has."""
        return self._since.get(self._reached, math.inf)

    def arrive(self, rank: int, number: int, now: float) -> list[int]:
        """Record that a rank has arrived at barrier `number`. Returns the barriers that are reached by it.

        A rank that is not waited for, since it has joined later, may begin with any barrier, and be behind.

        Raises:
            ProtocolViolation: a barrier out of order, or far too many.
        """
        if rank in self._excluded:
            self._arrivals[rank] = max(self._arrivals[rank], number)
        if 0 <= number < self._late.get(rank, 0):  # it was behind when it was included
            return []
        if number != self._arrivals[rank] or number >= self._reached + _OUTSTANDING:
            raise ProtocolViolation(
                f"rank {rank} comes to barrier {number}; its next one is {self._arrivals[rank]}, and at most "
                f"{_OUTSTANDING} may be outstanding"
            )
        self._arrivals[rank] += 1
        if number < self._reached:
            return []
        self._since.setdefault(number, now)
        return self._advance()

    def restore(self, arrivals: Sequence[int], now: float) -> None:
        """Go on where another process stopped. `arrivals`: by rank, at how many barriers it had arrived.

        Raises:
            UsageError: more are outstanding than can be.
        """
        self._arrivals[:] = arrivals
        waited_for = [count for rank, count in enumerate(arrivals) if rank not in self._excluded]
        self._reached = min(waited_for, default=max(arrivals))
        if max(arrivals) > self._reached + _OUTSTANDING:
            raise UsageError(
                f"a rank has arrived at {max(arrivals)} barriers, another one at {self._reached}: at most "
                f"{_OUTSTANDING} may be outstanding; remove the log to begin anew"
            )
        for number in range(self._reached, max(arrivals)):
            self._since.setdefault(number, now)
        self._advance()

    def is_reached(self, number: int) -> bool:
        """Return whether all ranks have arrived at a barrier."""
        return number < self._reached

    def exclude(self, rank: int) -> list[int]:
        """Wait for a rank at no barrier any more. Returns the barriers that are reached by it."""
        self._excluded.add(rank)
        return self._advance()

    def remove(self, rank: int) -> list[int]:
        """Do as `exclude` says, and forget where the rank is: another process may have its place."""
        self._arrivals[rank] = 0
        self._late.pop(rank, None)
        return self.exclude(rank)

    def include(self, rank: int) -> None:
        """Wait for a rank, which has joined late, from the oldest barrier that is not reached on."""
        self._excluded.discard(rank)
        self._arrivals[rank] = self._late[rank] = max(self._arrivals[rank], self._reached)

    def _advance(self) -> list[int]:
        reached = []
        while self._since and not self.missing():
            reached.append(self._reached)
            del self._since[self._reached]
            self._reached += 1
        return reached

    def has_arrived(self, rank: int, number: int) -> bool:
        """Return whether a rank has arrived at barrier `number`. An excluded rank need not have."""
        return self._arrivals[rank] > number

    def waiting(self) -> list[int]:
        """Return the ranks that wait at the oldest barrier."""
        return [rank for rank, arrivals in enumerate(self._arrivals) if arrivals > self._reached]

    def missing(self) -> list[int]:
        """Return the ranks that have not arrived at the oldest barrier; none if no rank waits at it."""
        if not self._since:
            return []
        return [
            rank
            for rank, arrivals in enumerate(self._arrivals)
            if arrivals <= self._reached and rank not in self._excluded
        ]

    def never_coming(self, finished: Iterable[int]) -> list[int]:
        """Return the `finished` ranks that others wait for at the oldest barrier, in vain."""
        return sorted(set(self.missing()).intersection(finished))
