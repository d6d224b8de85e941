"""What both ends of a link have said of it, and what of that is believed. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from netstorm.scheduler.awareness.readings import Readings

__all__ = ["LinkReports", "Rate", "as_the_way_back", "percentile"]

_FASTER: Final = 1.2
"""A link that does so much more in company than it did alone has become faster."""

_LATENCIES: Final = 20
"""Reports, of both ends, that a latency is a small one of."""

_FREE_FOR_S: Final = 30.0
"""How long what a link did alone is believed over what it does in company, if that does not change."""

_LATER_S: Final = 2.0
"""How much newer the word of a link's target must be to count more than that of its source's kernel."""

_SILENT_S: Final = 60.0
"""After so long without a word from a link's target, its source's counts."""

_ALIKE: Final = 1.25
"""Directions whose rates differ by no more belong to one line: what changes one changes the other."""


class End:
    """What one end of a link makes of its rate."""

    __slots__ = ("free", "held")

    def __init__(self) -> None:
        self.free = Readings()
        """While other links of the same node were mostly idle."""
        self.held = Readings()
        """In company."""

    def was_in_company(self) -> None:
        """Others were not idle: they shared a line that nobody knew of."""
        best = self.free if self.free.value >= self.held.value else self.held
        self.free, self.held = Readings(), best

    def best(self, now: float) -> Readings | None:
        """Return the readings that say most."""
        free, held = self.free, self.held
        if not free or not held:
            return free or held or None
        if free.age(now) > held.age(now) + _FREE_FOR_S or held.changed_at > now - free.age(now):
            return held
        # Company makes no link faster: then it has become so, and what it was alone is outdated.
        return held if held.value > _FASTER * free.value and held.age(now) <= free.age(now) else free


@dataclass(frozen=True, slots=True)
class Rate:
    """What is known of a link's rate."""

    readings: Readings
    held: tuple[bool, bool]
    """At its source, and at its target: in company, by that end's own word."""
    shares: tuple[bool, bool]
    """The same, or nobody knows."""

    @property
    def value(self) -> float:
        """Bit/s."""
        return self.readings.value


class LinkReports:
    """All that was reported of one link."""

    __slots__ = ("_latencies", "delivered_at", "latency", "signal", "source", "target", "trip")

    def __init__(self) -> None:
        self.source = End()
        self.target = End()
        self.delivered_at = -math.inf
        """When its source's kernel last said what it had delivered."""
        self.signal = math.inf
        """Seconds that something small took at least, by two clocks."""
        self.trip = 0.0
        """Seconds there and back, the shortest, by its source's kernel; 0: it does not say."""
        self.latency = -1.0
        """Seconds; -1: not known. Of the last reports a small one: what was more waited in queues, and what
        was least may rest on a rate that was no longer true."""
        self._latencies: Final[deque[float]] = deque(maxlen=_LATENCIES)

    def forget(self) -> None:
        """Know nothing of its rate any more."""
        self.source, self.target = End(), End()

    def was_in_company(self) -> None:
        """What was taken for its own rate was measured while an access line was the limit."""
        for end in (self.source, self.target):
            end.was_in_company()

    def carried(self, end: End, rate: float, error: float, now: float) -> None:
        """Take what one end says that it carried while an access line was the limit."""
        known = self.rate(now)
        (end.held if known is None else known.readings).at_least(rate, error, now)

    def took(self, latency: float) -> None:
        """Take a reading of its latency."""
        self._latencies.append(latency)
        known = percentile((latency for latency in self._latencies if latency > 0.0), 0.25)
        self.latency = max(self._latencies) if known is None else known

    def rate(self, now: float) -> Rate | None:
        """Return what is known of its rate: by its source's kernel, which sees what TCP delivers; else by its
        target, which sees chunks arrive; by its source, which only hears of that, if the target says nothing
        any more.
        """
        ends = [self.source.best(now), self.target.best(now)]
        source, target = ends
        if source is None and target is None:
            return None
        says = source or target
        assert says is not None
        if source and target and target.age(now) <= _SILENT_S:
            exact = self.delivered_at >= now - target.age(now) - _LATER_S
            says = source if exact else target
        return Rate(
            says,
            held=(ends[0] is self.source.held, ends[1] is self.target.held),
            shares=(
                ends[0] is None or ends[0] is self.source.held,
                ends[1] is None or ends[1] is self.target.held,
            ),
        )


def as_the_way_back(there: Rate | None, back: Rate | None, now: float) -> Rate | None:
    """Return the rate of the way back if it has changed since the way there was measured last, and both were
    alike before.
    """
    if there is None or back is None or back.readings.was == 0.0:
        return None
    unseen = there.readings.age(now) > now - back.readings.changed_at
    alike = 1 / _ALIKE <= there.value / back.readings.was <= _ALIKE
    return back if unseen and alike else None


def percentile(values: Iterable[float], part: float) -> float | None:
    """Return the value that this part of all does not exceed; None: there are none."""
    ordered = sorted(values)
    return ordered[int(part * (len(ordered) - 1))] if ordered else None
