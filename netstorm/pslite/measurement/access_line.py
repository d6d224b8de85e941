"""Whether the links of a node share an access line: is there a ceiling that their total keeps to while each
of them could do more? Pure.

Looked at are windows of time in which several links were busy. Behind a common line the total is often the
same, at its highest, and links that had less company before and after did clearly more then: both before
and after, since rates change, and a link that has become slow would look like one in company. Links that know
nothing of each other do the same in any company.
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

__all__ = ["AccessLineDetector", "Slice", "Verdict", "slices"]

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

_COULD_DO_MORE: Final = 1.18
"""What the links do in less company, over their total at a cap."""

_AT_THEIR_BEST: Final = 1.12
"""The same for links that are independent."""

_ALONE_S: Final = 0.05
"""How long a link must have been busy for its rate to count."""

_KEPT_RATES: Final = 256

_LESS: Final = 0.5
"""Links fewer that are less company."""

_SAMPLES: Final = 5
"""Rates in less company, before and after, of which the last but one counts: some were slow for other
reasons."""

_COMPARED: Final = 0.3
"""Part of a window's bits that must be of links that were seen in less company, too."""

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
    busy: Mapping[int, BusyPeriod]
    """By link."""


def slices(links: Mapping[int, Iterable[tuple[float, float, BusyPeriod]]]) -> Iterable[Slice]:
    """Cut the time in which any link was busy where one begins or ends to be.

    Args:
        links: start, end and stretch of each, by link; all on one clock.
    """
    events: list[tuple[float, bool, int, BusyPeriod]] = []
    for link, stretches in links.items():
        for start, end, stretch in stretches:
            if end > start:
                events.append((start, True, link, stretch))
                events.append((end, False, link, stretch))
    events.sort(key=lambda event: event[:3])  # at one moment, ends come before begins
    busy: dict[int, BusyPeriod] = {}
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
    """Some time, and what each link did in it."""

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
        for link, stretch in part.busy.items():
            self.busy[link] = self.busy.get(link, 0.0) + duration
            self.bits[link] = self.bits.get(link, 0.0) + stretch.bits * duration / stretch.duration
            self.longest = max(self.longest, stretch.duration)


@dataclass(frozen=True, slots=True)
class _Rate:
    """What a link did in a window."""

    at: float
    rate: float
    company: float


class _Compared:
    """A window that is over, and what its links did in less company before and after."""

    __slots__ = ("_after", "_before", "at", "bits", "busy", "company", "duration", "total", "volume")

    def __init__(self, window: _Window, rates: Mapping[int, Iterable[_Rate]]) -> None:
        """`rates`: of each link, all that came before the window's end, the newest first."""
        self.at: Final = window.at
        self.duration: Final = window.duration
        self.bits: Final = window.bits
        self.busy: Final = window.busy
        self.volume: Final = sum(window.bits.values())
        self.total: Final = self.volume / self.duration
        self.company: Final = sum(window.busy.values()) / window.duration
        """How many links were busy, on average."""
        self._before: Final[dict[int, float]] = {}
        self._after: Final[dict[int, list[float]]] = {}
        for link in self.bits:
            near = itertools.takewhile(lambda one: one.at >= self.at - _MEMORY_S, rates.get(link, ()))
            less = (one.rate for one in near if one.company <= self.company - _LESS)
            if found := list(itertools.islice(less, _SAMPLES)):
                self._before[link] = _last_but_one(found)
                self._after[link] = []

    def later(self, link: int, one: _Rate) -> None:
        """Take note of what a link did after this window."""
        after = self._after.get(link)
        if after is not None and len(after) < _SAMPLES and one.company <= self.company - _LESS:
            after.append(one.rate)

    def could_do(self) -> float | None:
        """Return what the links that were busy do in less company, over what they did; None: nobody knows."""
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
        """Of each link, the newest first."""
        self._alone: Final[dict[int, _Window]] = {}

    def take(self, part: Slice) -> None:
        """Take note of a slice; they come in order."""
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
            self._note(self._window, over.company)
            self._windows.append(over)
            self._window = _Window()
            self._forget(part.end)

    def _note(self, window: _Window, company: float) -> None:
        for link, busy in window.busy.items():
            if busy < _ALONE_S:
                continue
            one = _Rate(window.at, window.bits[link] / busy, company)
            self._rates.setdefault(link, deque(maxlen=_KEPT_RATES)).appendleft(one)
            for earlier in reversed(self._windows):
                if earlier.at < window.at - _MEMORY_S:
                    break
                earlier.later(link, one)

    def _forget(self, now: float) -> None:
        windows = self._windows
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
        more = [found for one in near if (found := one.could_do()) is not None]
        if 2 * len(more) < len(near):
            return Verdict.UNKNOWN, 0.0
        could_do = statistics.median(more)
        if often >= _OFTEN and could_do >= _COULD_DO_MORE:
            return Verdict.CAPPED, sum(one.volume for one in near) / time
        if often <= _ALWAYS and could_do <= min(_AT_THEIR_BEST, 1 + _deviation(windows)):
            return Verdict.INDEPENDENT, 0.0
        return Verdict.UNKNOWN, 0.0


def _last_but_one(rates: list[float]) -> float:
    """Return the rate that counts of some that a link had in less company."""
    return sorted(rates)[(3 * len(rates)) // 4]


def _deviation(windows: Iterable[_Compared]) -> float:
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
