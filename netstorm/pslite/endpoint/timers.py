"""When to look at what again: a heap of timers that are only ever set earlier. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Final, Generic, TypeVar

__all__ = ["Timers"]

T = TypeVar("T")


class Timers(Generic[T]):
    """At most one timer for each item. Whoever takes one looks whether anything is due, and sets the next.

    A time that moves away, as it does with every acknowledgement, costs nothing: the old timer just goes off
    early.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._set: dict[T, float] = {}
        self._numbers: Final = itertools.count()

    def set(self, item: T, due: float) -> None:
        """Have an item taken at `due` at the latest; `math.inf`: no matter when."""
        if due < self._set.get(item, math.inf):
            self._set[item] = due
            heapq.heappush(self._heap, (due, next(self._numbers), item))

    def take(self, now: float) -> T | None:
        """Take an item that is due; None if there is none."""
        while self._heap and self._heap[0][0] <= now:
            due, _, item = heapq.heappop(self._heap)
            if self._set.get(item) == due:
                del self._set[item]
                return item
        return None

    def next(self) -> float:
        """Return when the next item is due."""
        return self._heap[0][0] if self._heap else math.inf
