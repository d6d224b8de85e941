"""Virtual time: actions and when they are due, in a deterministic order. Pure.

A test or a simulated cluster drives it; nothing here waits. Actions that are due at the same time run in the
order in which they were scheduled, so a run is a function of its inputs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

__all__ = ["Timeline", "Timer"]


class Timer:
    """A scheduled action, which can be cancelled."""

    __slots__ = ("_action", "time")

    def __init__(self, time: float, action: Callable[[], None]) -> None:
        self.time = time
        self._action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Cancel the action; a late or second call does nothing."""
        self._action = None

    def take(self) -> Callable[[], None] | None:
        """Return the action, once; None if it was cancelled."""
        action, self._action = self._action, None
        return action


class Timeline:
    """A clock that jumps from one due action to the next. Times are in s."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._due: list[tuple[float, int, Timer]] = []
        self._scheduled = 0
        self.steps = 0
        """Number of actions run so far."""

    @property
    def now(self) -> float:
        """The time."""
        return self._now

    def at(self, time: float, action: Callable[[], None]) -> Timer:
        """Schedule `action` at `time`, or at once if that is past. An infinite time is never kept."""
        timer = Timer(max(time, self._now), action)
        if timer.time < math.inf:
            heapq.heappush(self._due, (timer.time, self._scheduled, timer))
            self._scheduled += 1
        return timer

    def after(self, delay: float, action: Callable[[], None]) -> Timer:
        """Schedule `action` after `delay`."""
        return self.at(self._now + delay, action)

    def step(self, limit: float = math.inf) -> bool:
        """Go to the next action and run it; False, and the time is `limit`, if none is due until then."""
        while self._due:
            time, _, timer = self._due[0]
            if time > limit:
                break
            heapq.heappop(self._due)
            action = timer.take()
            if action is not None:
                self._now = time
                self.steps += 1
                action()
                return True
        if limit < math.inf:
            self._now = max(self._now, limit)
        return False

    def run_until(self, wanted: Callable[[], bool], limit: float) -> bool:
        """Run actions until `wanted` holds or `limit` is reached; return whether it holds."""
        while not wanted():
            if not self.step(limit):
                return wanted()
        return True
