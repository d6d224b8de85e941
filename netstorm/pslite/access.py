"""Whether the links of a node share an access line: in times in which several were busy, was their total
constant while the shares varied, or each link's own rate? Pure.

Both are compared as sums of squares over windows of such times: `joint`, of the total's deviations from its
mean, and `own`, of each link's deviations from its own mean. Links that know nothing of each other deviate
independently, so that both sums are equal, or, if now these and now those are busy, `joint` is larger. Behind
a common line what one gets another loses, and `joint` is smaller.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.pslite.busy_link import Stretch

__all__ = ["Access", "Slice", "Verdict", "slices"]

_WINDOW_S: Final = 0.2
"""Least duration of a window: some chunks of even slow links."""

_CHUNKS: Final = 2.0
"""And so many times the longest stretch in it, since a stretch has only one rate."""

_MEMORY_S: Final = 20.0
_LEAST_WINDOWS: Final = 5
_DIFFERENCE: Final = 2.0
"""How many times larger one sum must be than the other to count."""

_CONSTANT: Final = 0.05
"""Relative deviation below which nothing has varied."""

_STEADY: Final = 0.15
"""Relative deviation of their own rates up to which links may count as independent."""

_AT_CAP: Final = 0.7
"""Where in the order of the windows' totals the cap is looked for: above those in which too little was sent
to fill it, below those that only look fast because a batch came late."""


class Verdict(enum.Enum):
    """What the links of a node are to each other."""

    UNKNOWN = "unknown"
    CAPPED = "capped"
    INDEPENDENT = "independent"


@dataclass(frozen=True, slots=True)
class Slice:
    """A time during which the same links were busy."""

    start: float
    end: float
    busy: Mapping[int, Stretch]
    """By link."""


def slices(links: Mapping[int, Iterable[tuple[float, float, Stretch]]]) -> Iterable[Slice]:
    """Cut the time in which any link was busy where one begins or ends to be.

    Args:
        links: start, end and stretch of each, by link; all on one clock.
    """
    events: list[tuple[float, bool, int, Stretch]] = []
    for link, stretches in links.items():
        for start, end, stretch in stretches:
            if end > start:
                events.append((start, True, link, stretch))
                events.append((end, False, link, stretch))
    events.sort(key=lambda event: event[:3])  # at one moment, ends come before begins
    busy: dict[int, Stretch] = {}
    last = -math.inf
    for time, begins, link, stretch in events:
        if busy and time > last:
            yield Slice(last, time, dict(busy))
        last = time
        if begins:
            busy[link] = stretch
        elif busy.get(link) is stretch:
            del busy[link]


class _Window:
    __slots__ = ("at", "bits", "busy", "duration", "longest")

    def __init__(self) -> None:
        self.at = 0.0
        self.duration = 0.0
        self.longest = 0.0
        self.busy: dict[int, float] = {}
        self.bits: dict[int, float] = {}

    @property
    def total(self) -> float:
        return sum(self.bits.values()) / self.duration

    def add(self, part: Slice) -> None:
        duration = part.end - part.start
        self.at = part.end
        self.duration += duration
        for link, stretch in part.busy.items():
            self.busy[link] = self.busy.get(link, 0.0) + duration
            self.bits[link] = self.bits.get(link, 0.0) + stretch.bits * duration / stretch.duration
            self.longest = max(self.longest, stretch.duration)


class Access:
    """One direction of a node's access line."""

    def __init__(self) -> None:
        self._windows: Final[deque[_Window]] = deque()
        self._alone: Final[deque[_Window]] = deque()
        self._window = _Window()
        self._one = _Window()

    def take(self, part: Slice) -> None:
        """Take note of a slice; they come in order."""
        if len(part.busy) == 1:
            self._one.add(part)
            if self._one.duration >= _WINDOW_S:
                self._alone.append(self._one)
                self._one = _Window()
            return
        self._window.add(part)
        if self._window.duration >= max(_WINDOW_S, _CHUNKS * self._window.longest):
            self._windows.append(self._window)
            self._window = _Window()
            for windows in (self._windows, self._alone):
                while windows and windows[0].at < part.end - _MEMORY_S:
                    windows.popleft()

    def verdict(self) -> tuple[Verdict, float]:
        """Return what is known, and the cap in bit/s (0 unless capped)."""
        windows = self._windows
        if len(windows) < _LEAST_WINDOWS:
            return Verdict.UNKNOWN, 0.0
        means = self._own_means()
        time = sum(one.duration for one in windows)
        mean = sum(one.total * one.duration for one in windows) / time
        joint = sum((one.total - mean) ** 2 * one.duration for one in windows) / time
        own = sum(
            ((one.bits[link] - means[link] * busy) / one.duration) ** 2 * one.duration
            for one in windows
            for link, busy in one.busy.items()
        )
        own /= time
        deviation = math.sqrt(own) / mean
        if deviation > _CONSTANT and own > _DIFFERENCE * joint:
            return Verdict.CAPPED, _quantile(windows, _AT_CAP)
        if deviation <= _STEADY and (joint > _DIFFERENCE * own or self._alone):
            return Verdict.INDEPENDENT, 0.0
        return Verdict.UNKNOWN, 0.0

    def _own_means(self) -> dict[int, float]:
        """Return each link's mean rate while it was busy, alone or not."""
        busy: dict[int, float] = {}
        bits: dict[int, float] = {}
        for one in (*self._windows, *self._alone):
            for link, seconds in one.busy.items():
                busy[link] = busy.get(link, 0.0) + seconds
                bits[link] = bits.get(link, 0.0) + one.bits[link]
        return {link: bits[link] / seconds for link, seconds in busy.items()}


def _quantile(windows: Iterable[_Window], part: float) -> float:
    """Return the total that the windows of this part of the time do not exceed."""
    ordered: Sequence[tuple[float, float]] = sorted((one.total, one.duration) for one in windows)
    left = part * sum(duration for _, duration in ordered)
    for total, duration in ordered:
        left -= duration
        if left <= 0:
            return total
    return ordered[-1][0]
