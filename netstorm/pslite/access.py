"""Whether the links of a node share an access line: is there a ceiling that their total keeps to while each
of them could do more? Pure.

Looked at are windows of time in which several links were busy. Behind a common line the total is often the
same, at its highest, although the links that were busy then, or their shares, differ, and together they have
shown rates, at other times, that would make more. Links that know nothing of each other reach their highest
total when each is at its best, and reach it rarely.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from netstorm.pslite.busy_link import Stretch

__all__ = ["Access", "Slice", "Verdict", "slices"]

_WINDOW_S: Final = 0.2
"""Least duration of a window; it is as long as its longest stretch, too, which has only one rate."""

_MEMORY_S: Final = 20.0
_LEAST_WINDOWS: Final = 6
_KEPT_WINDOWS: Final = 30
"""So many are kept for longer, where chunks take seconds."""

_LONG_MEMORY_S: Final = 60.0

_CEILING: Final = 0.9
"""Where in the order of the windows' totals the ceiling is looked for: below those that only look fast
because a batch came late."""

_NEAR: Final = 0.05
"""Totals that are so near to it are at the ceiling."""

_OFTEN: Final = 0.25
"""Part of the time that they make at a cap."""

_TOP: Final = 0.9
"""Where in the order of a link's rates its best is."""

_COULD_DO_MORE: Final = 1.18
"""What the best rates of the links add up to, over their total at a cap. These numbers found, in simulated
networks, three of four caps that were reached for a quarter of the time, and named none that were off by 15 %
or not there."""

_AT_THEIR_BEST: Final = 1.12
"""The same for links that are independent."""

_ALWAYS: Final = 0.75
"""A total that was at its ceiling for a larger part of the time has told nothing of what it could be."""


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
        if self._window.duration >= max(_WINDOW_S, self._window.longest):
            self._windows.append(self._window)
            self._window = _Window()
            self._forget(part.end)

    def _forget(self, now: float) -> None:
        for windows in (self._windows, self._alone):
            while windows:
                memory_s = _MEMORY_S if len(windows) > _KEPT_WINDOWS else _LONG_MEMORY_S
                if windows[0].at >= now - memory_s:
                    break
                windows.popleft()

    def verdict(self) -> tuple[Verdict, float]:
        """Return what is known, and the cap in bit/s (0 unless capped)."""
        windows = self._windows
        if len(windows) < _LEAST_WINDOWS:
            return Verdict.UNKNOWN, 0.0
        ceiling = _quantile([(one.total, one.duration) for one in windows], _CEILING)
        near = [one for one in windows if abs(one.total - ceiling) <= _NEAR * ceiling]
        time = sum(one.duration for one in near)
        often = time / sum(one.duration for one in windows)
        best = self._best_rates()
        could_do = statistics.median(
            sum(best[link] * busy for link, busy in one.busy.items()) / sum(one.bits.values()) for one in near
        )
        if often >= _OFTEN and could_do >= _COULD_DO_MORE:
            return Verdict.CAPPED, sum(sum(one.bits.values()) for one in near) / time
        if often <= _ALWAYS and could_do <= min(_AT_THEIR_BEST, 1 + _deviation(windows)):
            return Verdict.INDEPENDENT, 0.0
        return Verdict.UNKNOWN, 0.0

    def _best_rates(self) -> dict[int, float]:
        """Return how fast each link was at its best, alone or not."""
        rates: dict[int, list[tuple[float, float]]] = {}
        for one in (*self._windows, *self._alone):
            for link, busy in one.busy.items():
                rates.setdefault(link, []).append((one.bits[link] / busy, busy))
        return {link: _quantile(rows, _TOP) for link, rows in rates.items()}


def _deviation(windows: Iterable[_Window]) -> float:
    """Return the relative standard deviation of the windows' totals."""
    totals = [one.total for one in windows]
    return statistics.pstdev(totals) / statistics.fmean(totals)


def _quantile(rows: list[tuple[float, float]], part: float) -> float:
    """Return the value that is not exceeded for this part of the time; rows are (value, duration)."""
    rows.sort()
    left = part * sum(duration for _, duration in rows)
    for value, duration in rows:
        left -= duration
        if left <= 0:
            return value
    return rows[-1][0]
