"""The agenda of a discrete-event simulation: events in order of time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

__all__ = ["Agenda"]


class Agenda:
    """Future events in order of time.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: Final[list[tuple[float, int, Callable[..., None], tuple[object, ...]]]] = []
        self._number: Final = itertools.count().__next__

    def at(self, time: float, action: Callable[..., None], *arguments: object) -> None:
        """Schedule an event. Events of the same time happen in the order in which they were scheduled."""
        heappush(self._entries, (time, self._number(), action, arguments))

    def next(self) -> None:
        """Run the next event, and advance the time to it."""
        self.now, _, action, arguments = heappop(self._entries)
        action(*arguments)

    def at_rest(self) -> bool:
        """Return whether no event is left at the present time."""
        return not self._entries or self._entries[0][0] > self.now
