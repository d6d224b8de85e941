"""Barriers: the n-th barrier of every rank is the same one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from netstorm.errors import ProtocolViolation

__all__ = ["BarrierCount"]

_OUTSTANDING: Final = 64
"""Barriers that a rank may come to before the first is reached. A thread blocks at each; only many threads
have several."""


class BarrierCount:
    """How many barriers each rank has come to."""

    def __init__(self, ranks: int) -> None:
        self._come: Final = [0] * ranks
        self._reached = 0
        self._excused: Final[set[int]] = set()
        self._since: dict[int, float] = {}
        """When the first rank came, by barrier; those not reached."""

    @property
    def oldest(self) -> int:
        """Number of the first barrier that has not been reached."""
        return self._reached

    @property
    def since(self) -> float:
        """When the first rank came to the oldest barrier; inf if nobody has."""
        return self._since.get(self._reached, math.inf)

    def come(self, rank: int, number: int, now: float) -> list[int]:
        """Note that a rank has come to barrier `number`; return the barriers that are reached by it.

        Raises:
            ProtocolViolation: a barrier out of order, or far too many.
        """
        if number != self._come[rank] or number >= self._reached + _OUTSTANDING:
            raise ProtocolViolation(
                f"rank {rank} comes to barrier {number}; its next one is {self._come[rank]}, and at most "
                f"{_OUTSTANDING} may be outstanding"
            )
        self._come[rank] += 1
        self._since.setdefault(number, now)
        return self._advance()

    def restore(self, come: Sequence[int], now: float) -> None:
        """Go on where another process has stopped; `come`: by rank, to how many it had come."""
        self._come[:] = come
        for number in range(max(come)):
            self._since.setdefault(number, now)
        self._advance()

    def is_reached(self, number: int) -> bool:
        """Return whether all have come to a barrier."""
        return number < self._reached

    def excuse(self, rank: int) -> list[int]:
        """Let nobody wait for a rank any more; return the barriers that are reached by it."""
        self._excused.add(rank)
        return self._advance()

    def _advance(self) -> list[int]:
        reached = []
        while self._since and not self.missing():
            reached.append(self._reached)
            del self._since[self._reached]
            self._reached += 1
        return reached

    def has_come(self, rank: int, number: int) -> bool:
        """Return whether a rank has come to barrier `number`; an excused one need not have."""
        return self._come[rank] > number

    def waiting(self) -> list[int]:
        """Return the ranks that wait at the oldest barrier."""
        return [rank for rank, come in enumerate(self._come) if come > self._reached]

    def missing(self) -> list[int]:
        """Return the ranks that have not come to the oldest barrier; none if nobody waits at it."""
        if not self._since:
            return []
        return [
            rank
            for rank, come in enumerate(self._come)
            if come <= self._reached and rank not in self._excused
        ]

    def never_coming(self, finished: Iterable[int]) -> list[int]:
        """Return which of the `finished` ranks somebody waits for at a barrier, in vain."""
        return sorted(set(self.missing()).intersection(finished))
