"""A heap of timers, each of which is only ever set earlier. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Final, Generic, TypeVar

__all__ = ["Timers"]

T = TypeVar("T")


class Timers(Generic[T]):
    """At most one timer for each item. Whoever takes an item checks whether anything is due, and sets the
    next timer.

    A deadline that moves into the future, as with every acknowledgement, costs nothing: the old timer just
    goes off early.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._set: dict[T, float] = {}
        self._numbers: Final = itertools.count()

    def set(self, item: T, due: float) -> None:
        """Make an item due at `due` at the latest; `math.inf`: never."""
        if due < self._set.get(item, math.inf):
            self._set[item] = due
            heapq.heappush(self._heap, (due, next(self._numbers), item))

    def take(self, now: float) -> T | None:
        """Return an item that is due, and drop its timer; None if there is none."""
        while self._heap and self._heap[0][0] <= now:
            due, _, item = heapq.heappop(self._heap)
            if self._set.get(item) == due:
                del self._set[item]
                return item
        return None

    def next(self) -> float:
        """Return when the next item is due."""
        return self._heap[0][0] if self._heap else math.inf
