"""Whether the links of a node share an access line: does their total keep to a ceiling that each of them
alone is not bound by? Pure.

The detector compares windows of time in which several links were busy. Behind a common line the total often
reaches the same highest value, and the links carry clearly more while fewer of them are busy. That must be so
both before and after the window: rates change, and a link that has just become slow looks like one under
contention. Independent links carry the same under any contention.

docs/measurements/awareness.md, "Access caps by chunks", says how many access lines this finds in simulated
networks, and how exactly.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from netstorm.pslite.measurement.busy_periods import BusyPeriod

__all__ = ["AccessLineDetector", "Contention", "Slice", "slices"]

_WINDOW_S: Final = 0.2
"""Least duration of a window. It also lasts as long as its longest busy period, which has only one rate."""

_MEMORY_S: Final = 20.0
_LEAST_WINDOWS: Final = 6
_KEPT_WINDOWS: Final = 30
"""So many windows are kept for longer, where chunks take seconds."""

_LONG_MEMORY_S: Final = 60.0

_CEILING: Final = 0.9
"""The ceiling is this quantile of the windows' totals: higher ones may look fast only because a batch came
late."""

_NEAR: Final = 0.05
"""Relative distance up to which a total counts as being at the ceiling."""

_OFTEN: Final = 0.25
"""Least part of the time at the ceiling, if it is a cap."""

_CAPPED_RATIO: Final = 1.18
"""Least ratio of what the links carry under less contention to their total, if that is at a cap."""

_INDEPENDENT_RATIO: Final = 1.12
"""Largest such ratio of independent links."""

_ALONE_S: Final = 0.05
"""Least time for which a link must have been busy for its rate to count."""

_KEPT_RATES: Final = 256

_FEWER_LINKS: Final = 0.5
"""Contention is less if so many fewer links were busy on average."""

_SAMPLES: Final = 5
"""Most rates under less contention, before and after each. Of these the last but one counts, since some were
slow for other reasons."""

_COMPARED: Final = 0.3
"""Least part of a window's bits from links that were also seen under less contention."""

_ALWAYS: Final = 0.75
"""A total that was at its ceiling for a larger part of the time does not show that the links are
independent."""


class Contention(enum.Enum):
    """How the links of a node affect each other."""

    UNKNOWN = "unknown"
    CAPPED = "capped"
    INDEPENDENT = "independent"


@dataclass(frozen=True, slots=True)
class Slice:
    """A time during which the same links were busy, in s on one clock."""

    start: float
    end: float
    busy: Mapping[int, BusyPeriod]
    """By link."""


def slices(links: Mapping[int, Iterable[tuple[float, float, BusyPeriod]]]) -> Iterable[Slice]:
    """Cut the time in which any link was busy wherever a busy period begins or ends.

    Args:
        links: start, end and the busy period itself, by link; all on one clock.
    """
    events: list[tuple[float, bool, int, BusyPeriod]] = []
    for link, periods in links.items():
        for start, end, period in periods:
            if end > start:
                events.append((start, True, link, period))
                events.append((end, False, link, period))
    events.sort(key=lambda event: event[:3])  # at one moment, ends come before begins
    busy: dict[int, BusyPeriod] = {}
    last = -math.inf
    for time, begins, link, period in events:
        if busy and time > last:
            yield Slice(last, time, dict(busy))
        last = time
        if begins:
            busy[link] = period
        elif busy.get(link) is period:
            del busy[link]


class _Window:
    """Some time, and how much each link carried in it."""

    __slots__ = ("at", "bits", "busy", "duration", "longest")

    def __init__(self) -> None:
        self.at = 0.0
        self.duration = 0.0
        self.longest = 0.0
        self.busy: dict[int, float] = {}
        self.bits: dict[int, float] = {}

    def add(self, part: Slice) -> None:
        duration = part.end - part.start
        self.at = part.end
        self.duration += duration
        for link, period in part.busy.items():
            self.busy[link] = self.busy.get(link, 0.0) + duration
            self.bits[link] = self.bits.get(link, 0.0) + period.bits * duration / period.duration
            self.longest = max(self.longest, period.duration)


@dataclass(frozen=True, slots=True)
class _Rate:
    """What a link carried in a window, in bit/s."""

    at: float
    rate: float
    busy_links: float


class _Compared:
    """A window that is over, and its links' rates under less contention before and after."""

    __slots__ = ("_after", "_before", "at", "bits", "busy", "busy_links", "duration", "total", "volume")

    def __init__(self, window: _Window, rates: Mapping[int, Iterable[_Rate]]) -> None:
        """`rates`: of each link, all rates before the window's end, newest first."""
        self.at: Final = window.at
        self.duration: Final = window.duration
        self.bits: Final = window.bits
        self.busy: Final = window.busy
        self.volume: Final = sum(window.bits.values())
        self.total: Final = self.volume / self.duration
        self.busy_links: Final = sum(window.busy.values()) / window.duration
        """How many links were busy on average."""
        self._before: Final[dict[int, float]] = {}
        self._after: Final[dict[int, list[float]]] = {}
        for link in self.bits:
            near = itertools.takewhile(lambda rate: rate.at >= self.at - _MEMORY_S, rates.get(link, ()))
            less = (rate.rate for rate in near if rate.busy_links <= self.busy_links - _FEWER_LINKS)
            if found := list(itertools.islice(less, _SAMPLES)):
                self._before[link] = _last_but_one(found)
                self._after[link] = []

    def add_later(self, link: int, rate: _Rate) -> None:
        """Record a link's rate after this window."""
        after = self._after.get(link)
        if after is not None and len(after) < _SAMPLES and rate.busy_links <= self.busy_links - _FEWER_LINKS:
            after.append(rate.rate)

    def unshared_ratio(self) -> float | None:
        """Return what the busy links carry under less contention, relative to this window; None: unknown."""
        able, compared = 0.0, 0.0
        for link, bits in self.bits.items():
            after = self._after.get(link)
            if not after:
                able += bits
                continue
            compared += bits
            rate = min(self._before[link], _last_but_one(after))  # before and after, since rates change
            able += max(rate * self.busy[link], bits)
        return able / self.volume if compared >= _COMPARED * self.volume else None


class AccessLineDetector:
    """One direction of a node's access line."""

    def __init__(self) -> None:
        self._windows: Final[deque[_Compared]] = deque()
        self._window = _Window()
        self._rates: Final[dict[int, deque[_Rate]]] = {}
        """Of each link, newest first."""
        self._alone: Final[dict[int, _Window]] = {}

    def add(self, part: Slice) -> None:
        """Add the next slice."""
        if len(part.busy) == 1:
            (link,) = part.busy
            alone = self._alone.setdefault(link, _Window())
            alone.add(part)
            if alone.duration >= _ALONE_S:
                self._note(self._alone.pop(link), 1.0)
            return
        self._window.add(part)
        if self._window.duration >= max(_WINDOW_S, self._window.longest):
            over = _Compared(self._window, self._rates)
            self._note(self._window, over.busy_links)
            self._windows.append(over)
            self._window = _Window()
            self._forget(part.end)

    def _note(self, window: _Window, busy_links: float) -> None:
        for link, busy in window.busy.items():
            if busy < _ALONE_S:
                continue
            rate = _Rate(window.at, window.bits[link] / busy, busy_links)
            self._rates.setdefault(link, deque(maxlen=_KEPT_RATES)).appendleft(rate)
            for earlier in reversed(self._windows):
                if earlier.at < window.at - _MEMORY_S:
                    break
                earlier.add_later(link, rate)

    def _forget(self, now: float) -> None:
        windows = self._windows
        while windows:
            memory_s = _MEMORY_S if len(windows) > _KEPT_WINDOWS else _LONG_MEMORY_S
            if windows[0].at >= now - memory_s:
                break
            windows.popleft()

    def classify(self) -> tuple[Contention, float]:
        """Return how the links affect each other, and the line's cap in bit/s (0 unless capped)."""
        windows = self._windows
        if len(windows) < _LEAST_WINDOWS:
            return Contention.UNKNOWN, 0.0
        ceiling = _quantile([(window.total, window.duration) for window in windows], _CEILING)
        near = [window for window in windows if abs(window.total - ceiling) <= _NEAR * ceiling]
        time = sum(window.duration for window in near)
        often = time / sum(window.duration for window in windows)
        more = [ratio for window in near if (ratio := window.unshared_ratio()) is not None]
        if 2 * len(more) < len(near):
            return Contention.UNKNOWN, 0.0
        unshared_ratio = statistics.median(more)
        if often >= _OFTEN and unshared_ratio >= _CAPPED_RATIO:
            return Contention.CAPPED, sum(window.volume for window in near) / time
        if often <= _ALWAYS and unshared_ratio <= min(_INDEPENDENT_RATIO, 1 + _deviation(windows)):
            return Contention.INDEPENDENT, 0.0
        return Contention.UNKNOWN, 0.0


def _last_but_one(rates: list[float]) -> float:
    """Return the rate that counts of some that a link had under less contention."""
    return sorted(rates)[(3 * len(rates)) // 4]


def _deviation(windows: Iterable[_Compared]) -> float:
    """Return the relative standard deviation of the windows' totals."""
    totals = [window.total for window in windows]
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
