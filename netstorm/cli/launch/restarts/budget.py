"""How often, and how soon, something that has failed is started again. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

__all__ = ["PlannedRestart", "RestartBudget"]

_FIRST_S: Final = 0.5
"""Before the first restart: what the failed process held, such as a port, is free by then."""
_LONGEST_S: Final = 30.0
"""The time doubles from one failure to the next: what is broken for long should not be tried all the time."""
_STABLE_S: Final = 60.0
"""What has run for this long begins again with the shortest time."""


@dataclass(frozen=True, slots=True)
class PlannedRestart:
    """One restart."""

    count: int
    """Which restart of this process it is, from 1."""
    limit: int
    at: float
    """When."""
    delay_s: float

    def in_words(self) -> str:
        """Return when and which, for messages."""
        return f"in {self.delay_s:g} s (restart {self.count} of {self.limit})"


class RestartBudget:
    """Counts the restarts of each process. Times are in seconds."""

    def __init__(self, limit: int) -> None:
        """Allow `limit` restarts of each process."""
        self._limit: Final = limit
        self._counts: Final[dict[Hashable, int]] = {}
        self._started: Final[dict[Hashable, float]] = {}
        self._delays: Final[dict[Hashable, float]] = {}

    def started(self, who: Hashable, now: float) -> None:
        """Record that a process runs."""
        self._started[who] = now

    def is_left(self, who: Hashable) -> bool:
        """Return whether a process may be started again once more."""
        return self._counts.get(who, 0) < self._limit

    def after_failure(self, who: Hashable, now: float) -> PlannedRestart | None:
        """Return the next restart of a process that has failed; None: there is none left."""
        if not self.is_left(who):
            return None
        count = self._counts.get(who, 0) + 1
        delay = _FIRST_S
        if who in self._delays and now - self._started.get(who, now) < _STABLE_S:
            delay = min(2 * self._delays[who], _LONGEST_S)
        self._counts[who], self._delays[who] = count, delay
        return PlannedRestart(count, self._limit, now + delay, delay)
