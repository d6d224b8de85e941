"""Virtual time: what is due when, in an order that nothing but the program decides.

Whoever runs a test or a simulated cluster drives it; nothing here waits. Actions due at the same time run in
the order in which they were asked for, so a run is a function of its inputs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

__all__ = ["Timeline", "Timer"]


class Timer:
    """Something that will be done. It can be called off until then."""

    __slots__ = ("_action", "time")

    def __init__(self, time: float, action: Callable[[], None]) -> None:
        self.time = time
        self._action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Don't do it; late or twice does no harm."""
        self._action = None

    def take(self) -> Callable[[], None] | None:
        """Return the action, once; None if it was called off."""
        action, self._action = self._action, None
        return action


class Timeline:
    """A clock that jumps from one due action to the next. Times are in s."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._due: list[tuple[float, int, Timer]] = []
        self._asked = 0
        self.steps = 0
        """Actions done so far."""

    @property
    def now(self) -> float:
        """The time."""
        return self._now

    def at(self, time: float, action: Callable[[], None]) -> Timer:
        """Do `action` at `time`, or as soon as may be if that is past. What never comes (inf) is not kept."""
        timer = Timer(max(time, self._now), action)
        if timer.time < math.inf:
            heapq.heappush(self._due, (timer.time, self._asked, timer))
            self._asked += 1
        return timer

    def after(self, delay: float, action: Callable[[], None]) -> Timer:
        """Do `action` when `delay` has passed."""
        return self.at(self._now + delay, action)

    def step(self, limit: float = math.inf) -> bool:
        """Go to the next due action and do it; False, and the time is `limit`, if none is due up to then."""
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
        """Go on until `wanted` holds or `limit` is reached; return whether it holds."""
        while not wanted():
            if not self.step(limit):
                return wanted()
        return True
