"""What both ends of one link have reported, and whose report counts. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from netstorm.scheduler.awareness.readings import Readings

__all__ = ["EndReadings", "LinkReports", "Rate", "Rates", "changed_with", "percentile"]

_ALONE_FOR_S: Final = 30.0
"""How long the rate of an uncontended link is believed over newer, contended readings that do not change."""

_ALIKE: Final = 1.25
"""Directions whose rates differ by no more belong to one line and change together
(docs/measurements/awareness-rules.md, "One rule at a time": way back).
"""

_LATENCIES: Final = 20
"""Reports of both ends of which a low percentile is the latency."""

_LATER_S: Final = 2.0
"""How much newer the target's report must be to count more than the source's kernel: the kernel reports four
times a second, and is right at once after a change (docs/measurements/changing-networks.md, "What the
scheduler knows, and when").
"""

_SILENT_S: Final = 60.0
"""After so long without a report of the target the source's counts."""

_BELIEVED: Final = 5.0
"""So many times what the other end has seen one end may report: after a change of the link they agree within
seconds, and a member that says it has fast links, to attract trees, gets no further."""

_SHARES: Final = 8.0
"""So many times more if the other end has seen the link beside others alone."""


class EndReadings:
    """The rate of a link, as one of its ends reports it."""

    __slots__ = ("contended", "uncontended")

    def __init__(self) -> None:
        self.uncontended = Readings()
        """While other links at the same node were mostly idle."""
        self.contended = Readings()
        """While others may have shared an access line."""

    def mark_contended(self) -> None:
        """Treat all readings so far as contended: others shared a line that was not known yet."""
        best = self.uncontended if self.uncontended.value >= self.contended.value else self.contended
        self.uncontended, self.contended = Readings(), best

    def most_believed(self, now: float) -> float:
        """Return what the other end may report of the link, in bit/s: the more, the older this end's readings
        are.
        """
        believed = (
            readings.value * factor * max(1.0, readings.age(now) / _SILENT_S)
            for readings, factor in ((self.uncontended, 1.0), (self.contended, _SHARES))
            if readings
        )
        return _BELIEVED * max(believed, default=math.inf)

    def best(self, now: float) -> Readings | None:
        """Return the readings that count; None: there are none."""
        alone, contended = self.uncontended, self.contended
        if not alone or not contended:
            return alone or contended or None
        if alone.age(now) > contended.age(now) + _ALONE_FOR_S or contended.changed_at > now - alone.age(now):
            return contended
        return alone


@dataclass(frozen=True, slots=True)
class Rate:
    """What is known of a link's rate."""

    readings: Readings
    contended: tuple[bool, bool]
    """By its source, and by its target: it was measured under contention, or that end has not reported."""
    bound: float = math.inf
    """Bit/s: most that is believed, by what the other end has seen."""

    @property
    def value(self) -> float:
        """Bit/s."""
        return min(self.readings.value, self.bound)


Rates: TypeAlias = dict[tuple[int, int], Rate]
"""Measured rates by (source, target)."""


class LinkReports:
    """All that was reported of one link."""

    __slots__ = ("_latencies", "delivered_at", "latency", "signal", "source", "target", "trip")

    def __init__(self) -> None:
        self.source = EndReadings()
        self.target = EndReadings()
        self.delivered_at = -math.inf
        """When the source's kernel last reported what TCP has delivered."""
        self.signal = math.inf
        """Shortest time of a small message, in s, by the clocks of both ends."""
        self.trip = 0.0
        """Shortest round trip that the source's kernel has seen, in s; 0: unknown."""
        self.latency = -1.0
        """A low percentile of the last reports, in s; -1: unknown. Higher values include queueing, and the
        lowest may rest on an outdated rate."""
        self._latencies: Final[deque[float]] = deque(maxlen=_LATENCIES)

    def reset_rate(self) -> None:
        """Discard all readings of the rate."""
        self.source, self.target = EndReadings(), EndReadings()

    def mark_contended(self) -> None:
        """Treat all readings so far as contended."""
        for end in (self.source, self.target):
            end.mark_contended()

    def add_lower_bound(self, end: EndReadings, rate: float, error: float, now: float) -> None:
        """Add what the link carried, by one end's report, while an access line was the limit."""
        known = self.rate(now)
        (end.contended if known is None else known.readings).at_least(rate, error, now)

    def add_latency(self, latency: float) -> None:
        """Add a reading of the latency, in s."""
        self._latencies.append(latency)
        known = percentile((latency for latency in self._latencies if latency > 0.0), 0.25)
        self.latency = max(self._latencies) if known is None else known

    def rate(self, now: float) -> Rate | None:
        """Return what is known of the rate.

        The source's kernel comes first, since it sees what TCP delivers; then the target, which sees chunks
        arrive. If the target no longer reports, the source counts, which learns of arrivals by
        acknowledgements.
        """
        source, target = self.source.best(now), self.target.best(now)
        readings = source or target
        if readings is None:
            return None
        other = self.target
        if source and target and target.age(now) <= _SILENT_S:
            exact = self.delivered_at >= now - target.age(now) - _LATER_S
            readings, other = (source, self.target) if exact else (target, self.source)
        return Rate(
            readings,
            bound=other.most_believed(now),
            contended=(
                source is None or source is self.source.contended,
                target is None or target is self.target.contended,
            ),
        )


def changed_with(link: Rate, reverse: Rate, now: float) -> bool:
    """Return whether a link is expected to have changed with its reverse direction.

    That is so if both were alike, and only the reverse one was measured since: data goes up a tree first, and
    down seconds later.
    """
    if reverse.readings.was == 0.0:
        return False
    unseen = link.readings.age(now) > now - reverse.readings.changed_at
    return unseen and 1 / _ALIKE <= link.value / reverse.readings.was <= _ALIKE


def percentile(values: Iterable[float], part: float) -> float | None:
    """Return the value that this part of all does not exceed; None: there are none."""
    ordered = sorted(values)
    return ordered[int(part * (len(ordered) - 1))] if ordered else None
