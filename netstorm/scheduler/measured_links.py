"""What nodes report of links: check each report, and keep a rate and a latency for each link. Pure."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from netstorm.protocol.messages import LinkMeasure
from netstorm.scheduler.awareness.access_caps import AccessCaps
from netstorm.scheduler.awareness.link_reports import LinkReports, Rate, Rates
from netstorm.scheduler.awareness.throughput_samples import RATES, Line
from netstorm.topology.network import LATENCY

__all__ = ["MeasuredLinks"]

_SHARED: Final = 0.3
"""A link that shared an access line for a smaller part of the time was measured uncontended."""

_MOST_SIGNAL_S: Final = 86_400.0
"""Clocks that differ by more are an error."""

_MOST_APART: Final = 4.0
"""Round trips of one pair that its two kernels have seen: the shortest ones differ by queues alone. A member
that reports less, to attract trees, gets no further."""

_CHANGES: Final = 256
"""Changes that are kept: those between two polls of the scheduler."""


class MeasuredLinks:
    """The links of a network, as far as they were measured.

    Attributes:
        rates: by (source, target), as of the last `refresh`.
        changes: when links were last noticed to have changed, in order.
    """

    def __init__(self, pairs: frozenset[tuple[int, int]], caps: AccessCaps) -> None:
        """Begin without reports; `pairs`: the (source, target) links there may be."""
        self.rates: Rates = {}
        self.changes: Final[deque[float]] = deque(maxlen=_CHANGES)
        self._pairs: Final = pairs
        self._caps: Final = caps
        self._reports: Final[dict[tuple[int, int], LinkReports]] = {}
        self._stale: set[tuple[int, int]] = set()
        """Links that something was reported of since the last refresh."""

    def record(self, pair: tuple[int, int], measure: LinkMeasure, now: float) -> bool:
        """Record one end's report of a (source, target) link; return False if it is implausible."""
        if pair not in self._pairs or not _is_plausible(measure):
            return False
        reports = self._reports.setdefault(pair, LinkReports())
        self._stale.add(pair)
        if measure.rate:
            self._record_rate(pair, reports, measure, now)
        if measure.latency >= 0.0:
            reports.add_latency(measure.latency)
        if measure.trip:
            reports.trip = measure.trip
        if measure.signal < math.inf:
            way = (measure.source, pair[0] if measure.source == pair[1] else pair[1])
            self._reports.setdefault(way, LinkReports()).signal = measure.signal
            self._stale.add(way)
        return True

    def refresh(self, now: float) -> set[tuple[int, int]]:
        """Read the rates of links with new reports; return these links."""
        stale, self._stale = self._stale, set()
        for pair in stale:
            rate = self.rate(pair, now)
            if rate is not None:
                self.rates[pair] = rate
        return stale

    def mark_contended(self, line: Line) -> None:
        """Treat the readings of all links at a line as contended: they turned out to share it."""
        end, rank = line
        for pair, reports in self._reports.items():
            if pair[end] == rank:
                reports.mark_contended()
                self._stale.add(pair)

    def reset_rate(self, pair: tuple[int, int]) -> None:
        """Discard the rate of a link."""
        self._reports[pair].reset_rate()
        del self.rates[pair]

    def rate(self, pair: tuple[int, int], now: float) -> Rate | None:
        """Return the rate of a link; None: never measured."""
        reports = self._reports.get(pair)
        return None if reports is None else reports.rate(now)

    def latency(self, pair: tuple[int, int]) -> float | None:
        """Return the latency between two nodes, in s, which is the same both ways; None: never measured."""
        shortest = self.shortest_latency(pair)
        if shortest > 0.0:
            return shortest
        for way in (pair, pair[::-1]):
            reports = self._reports.get(way)
            if reports is not None and reports.latency >= 0.0:
                return reports.latency
        return None

    def shortest_latency(self, pair: tuple[int, int]) -> float:
        """Return the shortest latency between two nodes, in s; 0: unknown.

        It is half the shortest round trip that a kernel has seen, or else that of small messages there and
        back: the sum of both ways does not depend on how far the two clocks differ. Of two ends the one that
        has seen less is right, but not if it says that it has seen hardly any.
        """
        both = [self._reports.get(way) for way in (pair, pair[::-1])]
        trips = [reports.trip for reports in both if reports is not None and reports.trip]
        if trips:
            return max(min(trips), max(trips) / _MOST_APART) / 2
        signals = sum(math.inf if reports is None else reports.signal for reports in both)
        return max(0.0, signals / 2) if signals < math.inf else 0.0

    def latencies(self, without: frozenset[tuple[int, int]]) -> list[float]:
        """Return the measured latencies of all pairs but some, in s."""
        return [
            reports.latency
            for pair, reports in self._reports.items()
            if reports.latency >= 0.0 and pair not in without
        ]

    def _record_rate(
        self, pair: tuple[int, int], reports: LinkReports, measure: LinkMeasure, now: float
    ) -> None:
        by_source = pair[0] != measure.source
        end = reports.source if by_source else reports.target
        rate = min(measure.rate, self._caps.upper_bound(pair))
        if self._caps.may_have_slowed(pair, now):
            reports.add_lower_bound(end, rate, measure.error, now)
            return
        line = (0, pair[0]) if by_source else (1, pair[1])
        alone = measure.shared <= _SHARED or self._caps.contention_known(line, now)
        readings = end.uncontended if alone else end.contended
        counts = readings.add(rate, measure.error, now, jumped=measure.jumped)
        if counts and measure.delivered and by_source:
            reports.delivered_at = now
        if readings.changed_at == now:
            self.changes.append(now)


def _is_plausible(measure: LinkMeasure) -> bool:
    """Return whether a link can be like that (NaN is in no range)."""
    return (
        (measure.rate == 0.0 or RATES.allow(measure.rate))
        and 0.0 <= measure.error < math.inf
        and (measure.latency == -1.0 or LATENCY.allow(measure.latency))
        and measure.chunks >= 0
        and 0.0 <= measure.shared <= 1.0
        and (measure.signal == math.inf or abs(measure.signal) <= _MOST_SIGNAL_S)
        and (measure.trip == 0.0 or LATENCY.allow(measure.trip))
    )
