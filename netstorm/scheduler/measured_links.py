"""What nodes report of links, checked: a rate and a latency for each link, and caps of shared lines. Pure."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from netstorm.protocol.messages import LinkMeasure, Measured, ThroughputReport
from netstorm.scheduler.link_columns import Flags, Floats, Places
from netstorm.topology.network import LATENCY, Bounds

__all__ = [
    "AccessCaps",
    "AccessLines",
    "CapRule",
    "EndReadings",
    "KnownRate",
    "LinkReports",
    "LinkTable",
    "MeasuredLinks",
    "Rates",
    "Readings",
    "errors_after",
    "percentile",
    "percentile_of",
]


# What nodes report of links: check each report, and keep a rate and a latency for each link.

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
        table: all that is known, as matrices.
        changes: when links were last noticed to have changed, in order.
    """

    def __init__(self, pairs: frozenset[tuple[int, int]], caps: AccessCaps, size: int) -> None:
        """Begin without reports; `pairs`: the (source, target) links there may be among `size` nodes."""
        self.changes: Final[deque[float]] = deque(maxlen=_CHANGES)
        self.table: Final = LinkTable(size)
        self._size: Final = size
        self._pairs: Final = pairs
        self._caps: Final = caps
        self._reports: Final[dict[tuple[int, int], LinkReports]] = {}
        self._stale: Final = np.zeros((size, size), bool)
        """Links that something was reported of since the last refresh."""

    def record(self, pair: tuple[int, int], measure: LinkMeasure, now: float) -> bool:
        """Record one end's report of a (source, target) link; return False if it is implausible."""
        if pair not in self._pairs or not _is_plausible(measure):
            return False
        reports = self._reports.setdefault(pair, LinkReports())
        self._stale[pair] = True
        if measure.rate:
            self._record_rate(pair, reports, measure, now)
        if measure.latency >= 0.0:
            reports.add_latency(measure.latency)
            self.table.latency[pair] = reports.latency
        if measure.trip:
            self.table.trip[pair] = reports.trip = measure.trip
        if measure.signal < math.inf:
            way = (measure.source, pair[0] if measure.source == pair[1] else pair[1])
            self._reports.setdefault(way, LinkReports()).signal = measure.signal
            self.table.signal[way] = measure.signal
            self._stale[way] = True
        return True

    def refresh(self, now: float, rows: slice = slice(None)) -> Flags:
        """Read the rates of links with new reports; return which links these are, by source and target.

        `rows`: of these sources alone.
        """
        stale = self._stale[rows].copy()
        self._stale[rows] = False
        self.table.refresh(stale, now, first=rows.start or 0)
        return stale

    def mark_contended(self, line: Line) -> None:
        """Treat the readings of all links at a line as contended: they turned out to share it."""
        end, rank = line
        for other in range(self._size):
            pair = ((rank, other), (other, rank))[end]
            reports = self._reports.get(pair)
            if reports is not None:
                reports.mark_contended()
                self.table.write(pair, reports)
                self._stale[pair] = True

    def rates(self, known: Flags) -> Rates:
        """Return rates as of the last `refresh`: those that are `known`, an (N, N) matrix."""
        return Rates(known, self.table, self._reports)

    def reset_rates(self, source: int, but: frozenset[tuple[int, int]]) -> None:
        """Discard the rates of all links out of a node but some."""
        pairs = [(source, target) for target in np.flatnonzero(self.table.known[source]).tolist()]
        for pair in set(pairs) - but:
            self._reports[pair].reset_rate()
            self.table.write(pair, self._reports[pair])
            self.table.known[pair] = False

    def rate(self, pair: tuple[int, int], now: float) -> Rate | None:
        """Return the rate of a link; None: never measured."""
        reports = self._reports.get(pair)
        return None if reports is None else reports.rate(now)

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

    def _record_rate(
        self, pair: tuple[int, int], reports: LinkReports, measure: LinkMeasure, now: float
    ) -> None:
        by_source = pair[0] != measure.source
        end = reports.source if by_source else reports.target
        rate = min(measure.rate, self._caps.upper_bound(pair))
        if self._caps.may_have_slowed(pair, now):
            reports.add_lower_bound(end, rate, measure.error, now)
            self.table.write(pair, reports)
            return
        line = (0, pair[0]) if by_source else (1, pair[1])
        alone = measure.shared <= _SHARED or self._caps.contention_known(line, now)
        readings, other = end.uncontended, end.contended
        if not alone:
            readings, other = other, readings
        known = readings.age(now) > other.age(now) and other.agrees_with(rate, measure.error)
        if known and not readings.agrees_with(rate, measure.error):
            readings.clear()  # the other ones have it that the link has changed: that is no news
        counts = readings.add(rate, measure.error, now, jumped=measure.jumped)
        self.table.write_one(pair, 2 * (not by_source) + (not alone), readings)
        if counts and measure.delivered and by_source:
            self.table.delivered_at[pair] = reports.delivered_at = now
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


# Estimate one quantity, and the estimate's error, from noisy readings of it while it may change.
#
# The readings since the last change are averaged. Two readings in a row that are off by more than noise
# explains, both to the same side, are a change, and earlier readings no longer count. A single one may be an
# outlier and waits for the next. Each error is a fraction of its own reading: 5 with an error of a half is
# far from 24 with an error of a tenth, though it would not be by a fraction of 24. If readings scatter more
# than their stated errors, the scatter is the noise.
#
# Measured in docs/measurements/changing-networks.md, "What the scheduler knows, and when" (errors of their
# own readings), and docs/measurements/awareness.md, "Noise changes no policy".

_KEPT: Final = 6
"""Readings that are averaged, one a second at most: more would hide a slow drift."""

_INDEPENDENT: Final = 0.25
"""What another reading adds, as a part of what an independent one would: reports are smoothed."""

_CHANGE: Final = 3.0
"""Standard deviations that noise exceeds once in 370 readings, and twice running once in 270 000."""

_SEEN_CHANGE: Final = 1.0
"""The same if the reporter has seen the quantity change: its reading rests on little, and is not exact."""

_LEAST_ERROR: Final = 0.02
"""No reading of a network is more exact, whatever its reporter states."""

_MOST_ERROR: Final = 1.0

_LATE_S: Final = 10.0
"""After so long without a reading, one is enough for a change: the next may be as late."""

_AGEING: Final = 0.1 / 60
"""Relative error per second without a reading, since the quantity may have changed."""


class Readings(msgspec.Struct, gc=False, eq=False):
    """Readings of one positive quantity. Errors are standard errors, as fractions.

    Of 262,000 links there are a million: the garbage collector, which would hold the scheduler's thread for
    half a second, need not look at them, since floats and their tuples make no cycles.
    """

    value: float = 0.0
    """The estimate; 0 before the first reading."""
    changed_at: float = -math.inf
    """When a change was last noticed."""
    was: float = 0.0
    """The estimate before that; 0: it has not changed."""
    _values: tuple[float, ...] = ()
    _errors: tuple[float, ...] = ()
    _steps: tuple[float, ...] = ()
    """Logarithms of the ratio of each reading to the one before."""
    _suspect: float = 0.0
    """The last reading, if it may be an outlier; else 0."""
    _at: float = -math.inf

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, value: float, error: float, now: float, *, jumped: bool = False) -> bool:
        """Add a reading above 0; return False if it may be an outlier, and waits for the next.

        An error of 0 or less is unknown. `jumped`: the reporter has seen the quantity change.
        """
        error = min(max(error, _LEAST_ERROR), _MOST_ERROR)
        late = self.age(now) > _LATE_S
        if self._values:
            step = math.log(value / (self._suspect or self._values[-1]))
            self._steps = (*self._steps, step)[-_KEPT:]
            noise = math.hypot(value * max(error, self._scatter()), self.value * self._own_error())
            if abs(value - self.value) > (_SEEN_CHANGE if jumped else _CHANGE) * noise:
                agreed = self._suspect and (self._suspect > self.value) == (value > self.value)
                if not (agreed or late or jumped):
                    self._suspect = value
                    return False
                self.changed_at, self.was = now, self.value
                # A reading of while it changed is no part of what it has become.
                kept = agreed and abs(value - self._suspect) <= _CHANGE * error * value
                self._values = (self._suspect,) if kept else ()
                self._errors = (error,) if kept else ()
        self._suspect = 0.0
        self._at = now
        self._values = (*self._values, value)[-_KEPT:]
        self._errors = (*self._errors, error)[-_KEPT:]
        self._average()
        return True

    def agrees_with(self, value: float, error: float) -> bool:
        """Return whether a reading differs from the estimate by no more than noise; False: there is none."""
        if not self._values:
            return False
        error = min(max(error, _LEAST_ERROR), _MOST_ERROR)
        return abs(value - self.value) <= _CHANGE * math.hypot(value * error, self.value * self._own_error())

    def clear(self) -> None:
        """Forget all readings, but not when a change was noticed."""
        self._values, self._errors, self._steps, self._suspect = (), (), (), 0.0

    def at_least(self, value: float, error: float, now: float) -> None:
        """Add a lower bound: it replaces the estimate if it is higher by more than its error, else it is
        ignored. It counts as no change of the quantity.
        """
        error = min(max(error, _LEAST_ERROR), _MOST_ERROR)
        if value * (1.0 - error) <= self.value:
            return
        self._suspect, self._at = 0.0, now
        self._values, self._errors, self._steps = (value,), (error,), ()
        self._average()

    def error(self, now: float) -> float:
        """Return the standard error of `value`, as a fraction of it."""
        return error_after(self._own_error(), self.age(now))

    @property
    def highest(self) -> float:
        """The highest of the readings that `value` is the mean of, also if it was uncertain, and weighs
        little there, or of the one after them that may be an outlier.
        """
        return max((*self._values, self._suspect))

    def row(self) -> tuple[float, float, float, float, float, float]:
        """Return what `LinkTable` has of them."""
        error = self._own_error() if self._errors else 0.0
        return self.value, error, self._at, self.changed_at, self.was, self.highest

    def age(self, now: float) -> float:
        """Return the seconds since the last reading that `value` rests on.

        A possible outlier does not count: it may be the first reading after a change.
        """
        return max(0.0, now - self._at)

    def _own_error(self) -> float:
        count = len(self._errors)
        mean = math.sqrt(count / math.fsum(error**-2 for error in self._errors))
        return max(mean, self._scatter()) / math.sqrt(1.0 + _INDEPENDENT * (count - 1))

    def _scatter(self) -> float:
        """Return the standard deviation of readings, by the median of their steps: changes are rare."""
        if len(self._steps) < 3:
            return 0.0
        return 1.4826 * statistics.median(map(abs, self._steps)) / math.sqrt(2.0)

    def _average(self) -> None:
        weights = [error**-2 for error in self._errors]
        self.value = math.fsum(v * w for v, w in zip(self._values, weights, strict=True)) / math.fsum(weights)


def error_after(error: float, age: float) -> float:
    """Return a standard error after `age` seconds without a reading."""
    return min(math.hypot(error, _AGEING * max(0.0, age)), _MOST_ERROR)


# What both ends of one link have reported, and whose report counts.

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


class EndReadings(msgspec.Struct, gc=False, eq=False):
    """The rate of a link, as one of its ends reports it."""

    uncontended: Readings = msgspec.field(default_factory=Readings)
    """While other links at the same node were mostly idle."""
    contended: Readings = msgspec.field(default_factory=Readings)
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
            readings.highest * factor * max(1.0, readings.age(now) / _SILENT_S)
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
class KnownRate:
    """A link's rate."""

    readings: Readings
    bound: float
    """Bit/s: most that is believed, by what the other end has seen."""

    @property
    def value(self) -> float:
        """Bit/s."""
        return min(self.readings.value, self.bound)


@dataclass(frozen=True, slots=True)
class Rate(KnownRate):
    """What is known of a link's rate, and of how it was measured."""

    contended: tuple[bool, bool]
    """By its source, and by its target: it was measured under contention, or that end has not reported."""


class LinkReports(msgspec.Struct, gc=False, eq=False):
    """All that was reported of one link."""

    source: EndReadings = msgspec.field(default_factory=EndReadings)
    target: EndReadings = msgspec.field(default_factory=EndReadings)
    delivered_at: float = -math.inf
    """When the source's kernel last reported what TCP has delivered."""
    signal: float = math.inf
    """Shortest time of a small message, in s, by the clocks of both ends."""
    trip: float = 0.0
    """Shortest round trip that the source's kernel has seen, in s; 0: unknown."""
    latency: float = -1.0
    """A low percentile of the last reports, in s; -1: unknown. Higher values include queueing, and the
    lowest may rest on an outdated rate."""
    _latencies: tuple[float, ...] = ()

    @property
    def readings(self) -> tuple[Readings, Readings, Readings, Readings]:
        """All readings of the rate, in the order of `LinkTable`."""
        source, target = self.source, self.target
        return source.uncontended, source.contended, target.uncontended, target.contended

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
        self._latencies = (*self._latencies, latency)[-_LATENCIES:]
        known = percentile((latency for latency in self._latencies if latency > 0.0), 0.25)
        self.latency = max(self._latencies) if known is None else known

    def rate(self, now: float) -> Rate | None:
        """Return what is known of the rate.

        The source's kernel comes first, since it sees what TCP delivers; then the target, which sees chunks
        arrive. If the target no longer reports, or has not since the source has seen a change, the source
        counts, which learns of arrivals by acknowledgements.
        """
        source, target = self.source.best(now), self.target.best(now)
        readings = source or target
        if readings is None:
            return None
        other = self.target
        if source and target and target.age(now) <= _SILENT_S:
            exact = self.delivered_at >= now - target.age(now) - _LATER_S
            exact = exact or source.changed_at > now - target.age(now)  # the target has yet to report it
            readings, other = (source, self.target) if exact else (target, self.source)
        return Rate(
            readings,
            bound=other.most_believed(now),
            contended=(
                source is None or source is self.source.contended,
                target is None or target is self.target.contended,
            ),
        )


# The same of all links, as matrices by source and target: of 512 nodes 40,000 links have new readings in five
# seconds, and one by one they would hold the scheduler's thread for half a second.

_VALUE, _ERROR, _AT, _CHANGED_AT, _WAS, _HIGHEST = range(6)
"""Columns of readings; see `Readings.row`. A value of 0: there are none."""

_SOURCE: Final = (0, 1)
_TARGET: Final = (2, 3)
"""Each end's uncontended and contended readings."""


class LinkTable:
    """What was reported of all links, each an (N, N) matrix. `LinkReports` says what the values mean.

    Attributes:
        known: the rate of the link is known. This and all that follows is as of the last `refresh`.
        value: the rate, in bit/s.
        bound: most that is believed of the rate.
        which: the readings that count, of `LinkReports.readings`.
        error: standard error of these readings at the time of the last one.
        at: when either end last read the link, beside others or alone: a link that carries the same beside
            others as before, alone, is known not to have changed.
        changed_at: when the link was last noticed to have changed.
        was: the rate before that; 0: it has not changed.
        latency: by one-way reports.
        trip: the shortest round trip that the source's kernel has seen.
        signal: the shortest time of a small message.
        delivered_at: when the source's kernel last reported what TCP has delivered.
    """

    def __init__(self, size: int) -> None:
        """Begin without reports."""
        square = (size, size)
        self.latency: Final = np.full(square, -1.0)
        self.trip: Final = np.zeros(square)
        self.signal: Final = np.full(square, np.inf)
        self.delivered_at: Final = np.full(square, -np.inf)
        self._readings: Final = np.zeros((*square, 4, 6))
        self._readings[..., (_AT, _CHANGED_AT)] = -np.inf
        self.known: Final = np.zeros(square, bool)
        self.value: Final = np.zeros(square)
        self.bound: Final = np.full(square, np.inf)
        self.which: Final = np.zeros(square, np.int8)
        self.error: Final = np.zeros(square)
        self.at: Final = np.full(square, -np.inf)
        self.changed_at: Final = np.full(square, -np.inf)
        self.was: Final = np.zeros(square)

    def write(self, pair: tuple[int, int], reports: LinkReports) -> None:
        """Take over all readings of a link."""
        for place, readings in enumerate(reports.readings):
            self.write_one(pair, place, readings)

    def write_one(self, pair: tuple[int, int], place: int, readings: Readings) -> None:
        """Take over some readings of a link."""
        self._readings[pair[0], pair[1], place] = readings.row()

    def refresh(self, links: Flags, now: float, *, first: int = 0) -> None:
        """Read the rates of some links, as `LinkReports.rate` does; `first`: source of the first row."""
        source, target = np.nonzero(links)
        at = (source + first, target)
        readings = self._readings[at]
        source, target = _best(readings, _SOURCE, now), _best(readings, _TARGET, now)
        rows = np.arange(len(readings))
        by_source, by_target = readings[rows, source], readings[rows, target]
        target_age = np.maximum(0.0, now - by_target[:, _AT])
        both = (by_source[:, _VALUE] > 0.0) & (by_target[:, _VALUE] > 0.0) & (target_age <= _SILENT_S)
        exact = self.delivered_at[at] >= now - target_age - _LATER_S
        exact |= by_source[:, _CHANGED_AT] > now - target_age
        counts_source = np.where(both, exact, by_source[:, _VALUE] > 0.0)
        bound = np.where(
            both & ~exact, _most_believed(readings, _SOURCE, now), _most_believed(readings, _TARGET, now)
        )
        which = np.where(counts_source, source, target)
        best = readings[rows, which]
        known = best[:, _VALUE] > 0.0
        at = (at[0][known], at[1][known])
        best, bound = best[known], bound[known]
        self.known[at] = True
        self.value[at] = np.minimum(best[:, _VALUE], bound)
        self.bound[at] = bound
        self.which[at] = which[known]
        self.at[at] = readings[known][..., _AT].max(axis=1)
        for column, place in (
            (self.error, _ERROR),
            (self.changed_at, _CHANGED_AT),
            (self.was, _WAS),
        ):
            column[at] = best[:, place]

    def latencies(self, source: Places, target: Places) -> Floats:
        """Return the latencies between pairs of nodes, in s, which are the same both ways; -1: unknown.

        The shortest one counts, as in `MeasuredLinks.shortest_latency`, and without it a report.
        """
        there, back = (source, target), (target, source)
        trips = np.stack([self.trip[there], self.trip[back]])
        least = np.where(trips > 0.0, trips, np.inf).min(axis=0)
        trip = np.maximum(least, trips.max(axis=0) / _MOST_APART) / 2
        signals = self.signal[there] + self.signal[back]
        signal = np.where(signals < np.inf, np.maximum(0.0, signals / 2), 0.0)
        shortest = np.where(least < np.inf, trip, signal)
        reported = np.where(self.latency[there] >= 0.0, self.latency[there], self.latency[back])
        return np.where(shortest > 0.0, shortest, reported)

    def changed_with(self, source: Places, target: Places, began: Floats, now: float) -> Flags:
        """Return which links are expected to have changed with their reverse direction.

        That is so if both were alike, and only the reverse one was measured since: data goes up a tree first,
        and down seconds later. `began`: when the reverse ones began to change.
        """
        there, back = (source, target), (target, source)
        was = self.was[back]
        unseen = np.maximum(0.0, now - self.at[there]) > now - began
        with np.errstate(divide="ignore", invalid="ignore"):  # where nothing has changed
            part = self.value[there] / was
        both = self.known[there] & self.known[back] & (was != 0.0)
        changed: Flags = both & unseen & (part >= 1 / _ALIKE) & (part <= _ALIKE)
        return changed


def _best(readings: Floats, end: tuple[int, int], now: float) -> Places:
    """Return which readings count of an end's, as `EndReadings.best` does; (M, 4, 6) readings."""
    alone, contended = readings[:, end[0]], readings[:, end[1]]
    age = np.maximum(0.0, now - alone[:, _AT])
    later = age > np.maximum(0.0, now - contended[:, _AT]) + _ALONE_FOR_S
    changed = contended[:, _CHANGED_AT] > now - age
    use = (contended[:, _VALUE] > 0.0) & ((alone[:, _VALUE] == 0.0) | later | changed)
    return np.where(use, end[1], end[0])


def _most_believed(readings: Floats, end: tuple[int, int], now: float) -> Floats:
    """Return what the other end may report, as `EndReadings.most_believed` does."""
    believed = np.full(len(readings), -np.inf)
    for place, factor in zip(end, (1.0, _SHARES), strict=True):
        some = readings[:, place]
        known = some[:, _VALUE] > 0.0
        age = np.where(known, np.maximum(0.0, now - some[:, _AT]), 0.0)
        most = some[:, _HIGHEST] * factor * np.maximum(1.0, age / _SILENT_S)
        believed = np.maximum(believed, np.where(known, most, -np.inf))
    return _BELIEVED * np.where(believed > -np.inf, believed, np.inf)


class Rates(Mapping[tuple[int, int], KnownRate]):
    """The known rates, by (source, target)."""

    def __init__(
        self, known: Flags, table: LinkTable, reports: Mapping[tuple[int, int], LinkReports]
    ) -> None:
        """Show those that are `known`, an (N, N) matrix."""
        self._known: Final = known
        self._table: Final = table
        self._reports: Final = reports

    def __getitem__(self, pair: tuple[int, int]) -> KnownRate:
        if not self._known[pair]:
            raise KeyError(pair)
        readings = self._reports[pair].readings[self._table.which[pair]]
        return KnownRate(readings, float(self._table.bound[pair]))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((int(source), int(target)) for source, target in np.argwhere(self._known))

    def __len__(self) -> int:
        return int(self._known.sum())


def errors_after(errors: Floats, ages: Floats) -> Floats:
    """Return standard errors after some seconds without a reading, as `error_after` does."""
    return np.minimum(np.hypot(errors, _AGEING * np.maximum(0.0, ages)), _MOST_ERROR)


def percentile(values: Iterable[float], part: float) -> float | None:
    """Return the value that this part of all does not exceed; None: there are none."""
    ordered = sorted(values)
    return ordered[int(part * (len(ordered) - 1))] if ordered else None


def percentile_of(values: Floats, part: float) -> float | None:
    """Return the same of an array."""
    place = int(part * (len(values) - 1))
    return float(np.partition(values, place)[place]) if len(values) else None


# What all links carried in the same half seconds, gathered from the reports of all nodes.
#
# Each node reports what its kernel's TCP has delivered on its outgoing links, by numbered half seconds.
# Reports come once a second, so a half second stays open for a while, until those of all nodes have arrived.

Line: TypeAlias = tuple[int, int]
"""One direction of an access line: 0 out of a node, 1 into it; and the node's rank."""

RATES: Final = Bounds(100.0, 1e13, "from 100bit/s to 10Tbit/s")
"""Plausible measured rates, in bit/s: others are errors, and would spoil every plan."""

_OPEN_S: Final = 2.5
"""How long a half second waits for the reports of other nodes, which come once a second."""

_MOST_OPEN: Final = 64
"""Half seconds that may be open at a time: bounds the memory that wrong reports take."""

_RECENT_S: Final = 5.0
"""Samples older than that no longer explain a rate: a node's estimate rests on chunks of the last seconds."""


@dataclass(slots=True)
class HalfSecond:
    """What was carried in one half second, as far as it is reported."""

    at: float
    """Time of the first report."""
    rates: dict[tuple[int, int], float] = field(default_factory=dict)
    """Bit/s, by (source, target)."""
    totals: dict[Line, float] = field(default_factory=dict)
    """Bit/s, by access line."""
    saturated: dict[Line, dict[int, float]] = field(default_factory=dict)
    """Bit/s of the links that had more to send all the time, by access line and the rank at the other end."""

    def add(self, source: int, target: int, rate: float, *, saturated: bool) -> None:
        """Add what one link carried."""
        self.rates[source, target] = rate
        for line, other in (((0, source), target), ((1, target), source)):
            self.totals[line] = self.totals.get(line, 0.0) + rate
            if saturated:
                self.saturated.setdefault(line, {})[other] = rate


class ThroughputSamples:
    """The last half seconds of a job with `size` nodes."""

    def __init__(self, size: int) -> None:
        self._size: Final = size
        self._open: Final[dict[int, HalfSecond]] = {}
        self._closed: Final[deque[HalfSecond]] = deque()
        self._from = -math.inf

    def record(self, source: int, carried: Iterable[ThroughputReport], now: float) -> int:
        """Record what the links out of a node have carried; return the number of implausible values."""
        rejected = 0
        if now < self._from:
            return rejected
        for report in carried:
            sample = self._open.get(report.number)
            if sample is None:
                if len(self._open) >= _MOST_OPEN:
                    rejected += 1
                    continue
                sample = self._open[report.number] = HalfSecond(now)
            for link in report.links:
                if not (0 <= link.target < self._size and link.target != source) or not (
                    0.0 <= link.rate <= RATES.most
                ):
                    rejected += 1
                elif (source, link.target) not in sample.rates:
                    sample.add(source, link.target, link.rate, saturated=link.backlogged)
        return rejected

    def close(self, now: float) -> list[HalfSecond]:
        """Return the half seconds whose time to wait for reports is over."""
        numbers = [number for number, sample in self._open.items() if now >= sample.at + _OPEN_S]
        closed = [self._open.pop(number) for number in numbers]
        self._closed.extend(closed)
        while self._closed and self._closed[0].at < now - _RECENT_S:
            self._closed.popleft()
        return closed

    def recent(self, now: float) -> Iterator[HalfSecond]:
        """Yield the half seconds of the last few seconds, open ones included."""
        samples = itertools.chain(self._open.values(), self._closed)
        return (sample for sample in samples if sample.at >= now - _RECENT_S)

    def restart(self, at: float) -> None:
        """Discard everything, and what is reported before `at`."""
        self._from = at
        self._open.clear()
        self._closed.clear()


# Whether the links at an access line share a cap, and which: from what they carried together.
#
# Behind a shared line the total keeps to a ceiling while the links trade throughput: TCP's flows are never
# equally fast for long, and what one loses the others gain. So a line has a cap if its total is often near
# its highest, and what each link carried at these times still differs clearly.
#
# The difference has a median of 1 to 3 % of the total where nothing is shared, also while links change, and
# of 4 to 14 % behind most lines that were the limit. All thresholds: docs/measurements/awareness.md, "Access
# caps by what all links carry".

_PERCENTILE: Final = 0.9
"""Of the totals: the ceiling. Higher totals were delivered earlier and acknowledged late."""

_NEAR: Final = 0.05
"""Totals within that part of the ceiling are at it."""

_LEAST: Final = 6
"""Least number of half seconds at the ceiling, and of pairs of them."""

_MOST: Final = 40
"""Half seconds at the ceiling that are compared, the newest ones: bounds the cost of O(N²) pairs."""

_SOON_S: Final = 8.0
"""Half seconds further apart are not compared, since links change."""


class CapRule(NamedTuple):
    """When a ceiling is a cap."""

    often: float
    """Least part of the half seconds that are at the ceiling."""
    traded: float
    """Least part of the total that links have won or lost between two of them, in the median."""


UNCONTENDED: Final = CapRule(0.25, 0.04)
"""In a network that is not known to be contended: named no cap in four jobs on links that change."""

CONTENDED: Final = CapRule(0.15, 0.03)
"""In a contended network: named seven of twelve lines in one recorded job."""


class LineTotal(NamedTuple):
    """What a line carried in a half second in which some of its links had more to send."""

    at: float
    total: float
    """Bit/s."""
    rates: dict[int, float]
    """Bit/s of those links, by the rank at the other end."""


def ceiling_of(totals: Iterable[LineTotal], rule: CapRule) -> float:
    """Return the cap of a line, in bit/s; 0: it has none, or too little is known."""
    shared = [sample for sample in totals if len(sample.rates) > 1]
    if len(shared) < _LEAST:
        return 0.0
    ceiling = sorted(sample.total for sample in shared)[int(_PERCENTILE * (len(shared) - 1))]
    near = [sample for sample in shared if abs(sample.total - ceiling) <= _NEAR * ceiling]
    if len(near) < max(_LEAST, rule.often * len(shared)):
        return 0.0
    traded = _traded(near[-_MOST:])
    if len(traded) < _LEAST or float(np.median(traded)) < rule.traded * ceiling:
        return 0.0
    return math.fsum(sample.total for sample in near) / len(near)


def _traded(near: list[LineTotal]) -> npt.NDArray[np.float64]:
    """Return how much links have won or lost between two half seconds, in bit/s, for all pairs of them."""
    others = sorted({other for sample in near for other in sample.rates})
    rates = np.array([[sample.rates.get(other, np.nan) for other in others] for sample in near])
    at = np.array([sample.at for sample in near])
    first, second = np.triu_indices(len(near), 1)
    soon = at[second] - at[first] <= _SOON_S
    differences = np.abs(rates[first[soon]] - rates[second[soon]])
    known = np.isfinite(differences)
    traded: npt.NDArray[np.float64] = np.nansum(differences, axis=1)[known.sum(axis=1) > 1] / 2
    return traded


# Which links share access lines, judged by what all links carried in the same half seconds.
#
# Only half seconds count in which links had more to send all the time. Two questions are answered:
#
# *Is the network contended?* Links that share nothing carry the same whatever their neighbours carry. So a
# link's rates in two half seconds are compared if what others carried at one of its ends has changed clearly.
# This is decided for the network as a whole: a shared line at its other end makes a link unsteady, too. In a
# contended network, what a link carries beside others does not show what it could carry alone.
#
# *Which lines have caps?* See `ceiling_of`.
#
# Chunks do not show this: behind a line that drops packets they are handed over late and all at once. Only
# the scheduler knows what enters a node, since it is the sum of what many sources have sent.
#
# All thresholds: docs/measurements/awareness.md, "Links that share lines: is a network contended?" and
# "Access caps by what all links carry", from recorded jobs.

_UNDER_WAY_S: Final = 10.0
"""How long after a new policy the transfers of the old one still finish."""

_MEMORY_S: Final = 60.0

_COMPARED_S: Final = 5.0
"""Half seconds further apart are not compared, since links change."""

_OTHERS: Final = 0.2
"""Part of a line's peak by which what others carried must differ for a comparison."""

_SAME: Final = 0.1
"""A link whose rates differ by less than that part is steady."""

_MOST_COMPARED: Final = 32
"""Comparisons per line and half second: bounds the cost with many nodes."""

_ENOUGH: Final = 200
_ENOUGH_OF_A_LINE: Final = 20
"""Comparisons below which nothing is concluded."""

_CONTENDED: Final = 0.3
_UNCONTENDED: Final = 0.36
"""A network is contended while less than the first part of the comparisons are steady, until more than the
second are. A line of whose own comparisons more than the first part are steady has no cap.
"""

_EVERY_S: Final = 2.0
_FEW: Final = 16
"""How often lines are examined; with more nodes than that less often, since there are more lines."""

_FULL: Final = 0.7
"""Part of its cap from which on a line slows its links."""

_HALF_FULL: Final = 0.4
"""The same in a contended network, of the line's peak, where its cap is unknown."""

_COMPANY: Final = 0.2
"""Least part of a line's total that other links must carry to slow a link."""

_BEYOND: Final = 1.15
_BEYOND_TIMES: Final = 3
"""A line that carried so many times its cap, as often, has another cap, or none."""


class _Comparisons(NamedTuple):
    """Comparisons of link rates at one line between which others carried clearly more or less."""

    at: float
    number: int
    steady: int


class AccessLines:
    """All access lines of a job.

    Attributes:
        contended: what links carry depends on what others carry.
    """

    def __init__(self, size: int) -> None:
        """Begin without any knowledge; `size`: the number of nodes."""
        self.contended = False
        self._every_s: Final = _EVERY_S * max(1.0, size / _FEW)
        self._samples: Final = ThroughputSamples(size)
        self._totals: Final[dict[Line, deque[LineTotal]]] = {}
        self._peaks: Final[dict[Line, float]] = {}
        self._comparisons: Final[dict[Line, deque[_Comparisons]]] = {}
        self._updated: Final[set[Line]] = set()
        self._examined_at = -math.inf

    def record(self, source: int, carried: Iterable[ThroughputReport], now: float) -> int:
        """Record what the links out of a node have carried; return the number of implausible values."""
        return self._samples.record(source, carried, now)

    def reset_line(self, line: Line) -> None:
        """Discard what is known of a line."""
        for known in (self._totals, self._peaks, self._comparisons):
            known.pop(line, None)
        self._updated.discard(line)

    def reset(self, now: float) -> None:
        """Discard everything: it was carried beside pairs that turned out to be no links."""
        self.contended = False
        self._samples.restart(now + _UNDER_WAY_S)
        for line in list(self._totals):
            self.reset_line(line)

    def due(self) -> float:
        """Return the time of the next `find_caps`."""
        return self._examined_at + self._every_s

    def find_caps(self, now: float) -> dict[Line, float]:
        """Return the caps, in bit/s, of lines of which there is something new."""
        self._examined_at = now
        for sample in self._samples.close(now):
            self._add(sample)
        found = {line: self._recent_comparisons(line, now) for line in list(self._comparisons)}
        number = sum(line.number for line in found.values())
        if number >= _ENOUGH:
            steady = sum(line.steady for line in found.values()) / number
            self.contended = steady < (_UNCONTENDED if self.contended else _CONTENDED)
        rule = CONTENDED if self.contended else UNCONTENDED
        unsteady = [
            line
            for line in sorted(self._updated)
            if (comparisons := found.get(line)) is not None
            and comparisons.number >= _ENOUGH_OF_A_LINE
            and comparisons.steady < _CONTENDED * comparisons.number
        ]
        self._updated.clear()
        caps = {line: ceiling_of(self._totals[line], rule) for line in unsteady}
        return {line: cap for line, cap in caps.items() if cap}

    def upper_bound(self, link: tuple[int, int]) -> float:
        """Return the most that a (source, target) link can carry, in bit/s.

        In a contended network that is as much as its lines have carried in half a second: TCP's own figure of
        a moment may be higher.
        """
        if not self.contended:
            return math.inf
        return min(self._peaks.get((end, rank), math.inf) for end, rank in enumerate(link))

    def may_have_slowed(self, line: Line, cap: float, link: tuple[int, int], now: float) -> bool:
        """Return whether what others carried on a line may have slowed a link in the last seconds.

        Args:
            line: at one end of the link.
            cap: of the line, in bit/s; 0: unknown.
            link: source and target.
            now: the time.
        """
        if not (cap or self.contended):
            return False
        full = _FULL * cap if cap else _HALF_FULL * self._peaks.get(line, 0.0)
        for sample in self._samples.recent(now):
            total, own = sample.totals.get(line, 0.0), sample.rates.get(link, 0.0)
            if own and total >= full and total - own >= _COMPANY * total:
                return True
        return False

    def exceeds(self, line: Line, cap: float, now: float) -> bool:
        """Return whether a line has carried more than this cap allows."""
        above = sum(sample.totals.get(line, 0.0) > _BEYOND * cap for sample in self._samples.recent(now))
        return above >= _BEYOND_TIMES

    def _add(self, sample: HalfSecond) -> None:
        for line, rates in sample.saturated.items():
            totals = self._totals.setdefault(line, deque())
            while totals and totals[0].at < sample.at - _MEMORY_S:
                totals.popleft()
            newest = LineTotal(sample.at, sample.totals[line], rates)
            totals.append(newest)
            self._updated.add(line)
            self._peaks[line] = peak = max(total.total for total in totals)
            steady = list(itertools.islice(_compared(totals, newest, peak), _MOST_COMPARED))
            if steady:
                self._comparisons.setdefault(line, deque()).append(
                    _Comparisons(newest.at, len(steady), sum(steady))
                )

    def _recent_comparisons(self, line: Line, now: float) -> _Comparisons:
        """Return the sum of the comparisons of the last minute."""
        kept = self._comparisons[line]
        while kept and kept[0].at < now - _MEMORY_S:
            kept.popleft()
        return _Comparisons(now, sum(one.number for one in kept), sum(one.steady for one in kept))


def _compared(totals: deque[LineTotal], newest: LineTotal, peak: float) -> Iterator[bool]:
    """Yield for each link, and earlier half second with other traffic, if the link carried the same."""
    for earlier in itertools.islice(reversed(totals), 1, None):
        if earlier.at < newest.at - _COMPARED_S:
            return
        for other, rate in newest.rates.items():
            before = earlier.rates.get(other, 0.0)
            if before and abs((newest.total - rate) - (earlier.total - before)) > _OTHERS * peak:
                yield abs(math.log(rate / before)) < _SAME


# Which caps access lines have: by what all links carried at the same time, and by nodes' reports.

_log = logging.getLogger(__name__)

_BEGINS: Final = 0.85
_ENDS: Final = 0.95
"""A cap counts below the first part of what its links could carry together, and until the second: with one
threshold noise would make caps come and go.
"""

_BELIEVED_S: Final = 300.0
"""How long a cap is believed without new readings: a policy may have no links share that line
(docs/measurements/awareness.md, "Access caps by what all links carry").
"""

_REPORT_WINDOW_S: Final = 60.0
"""Nodes' reports of their access lines rest on that much of the past (`pslite.link_meter`)."""


class _Cap:
    """The cap of one direction of a node's access line."""

    __slots__ = ("carried", "counts", "detected", "readings")

    def __init__(self) -> None:
        self.readings = Readings()
        self.carried = Readings()
        """The most that its links carried together while nobody knew whether they limit one another."""
        self.counts = False
        """Policies are planned with it."""
        self.detected = False
        """Links were seen to share it, whatever its node reports."""

    def clear(self) -> None:
        """Forget the cap."""
        self.readings, self.carried, self.detected = Readings(), Readings(), False

    def known(self, now: float) -> float:
        """Return the cap, in bit/s; 0: unknown."""
        return _believed(self.readings, now)

    def assumed(self, now: float) -> float:
        """Return the same; of an unknown cap, what the line was seen to carry."""
        return self.known(now) or _believed(self.carried, now)

    def shared(self, now: float) -> float:
        """Return the cap that links were seen to share, in bit/s; 0: none."""
        return self.known(now) if self.detected else 0.0


def _believed(readings: Readings, now: float) -> float:
    return readings.value if readings and readings.age(now) <= _BELIEVED_S else 0.0


class AccessCaps:
    """The caps of all access lines of a job."""

    def __init__(self, size: int) -> None:
        """Begin without any cap; `size`: the number of nodes."""
        self._size: Final = size
        self._lines: Final = AccessLines(size)
        self._caps: Final[dict[Line, _Cap]] = {(end, rank): _Cap() for end in (0, 1) for rank in range(size)}
        self._reports_from = -math.inf
        """From when on nodes' reports are about links alone."""

    @property
    def contended(self) -> bool:
        """Whether links carry less beside others: they share lines, known or unknown."""
        return self._lines.contended

    @property
    def some_known(self) -> bool:
        """Whether links are known to share some line."""
        return any(cap.readings for cap in self._caps.values())

    def record(self, rank: int, report: Measured, now: float) -> int:
        """Record what a node's links have carried, and its caps; return how many values are implausible."""
        refused = self._lines.record(rank, report.throughput, now)
        for end, value in enumerate((report.egress, report.ingress)):
            cap = self._caps[end, rank]
            if value == 0.0 or now < self._reports_from or self.contended or cap.shared(now):
                continue
            if value == math.inf:
                cap.clear()
            elif RATES.allow(abs(value)):
                (cap.readings if value > 0.0 else cap.carried).add(abs(value), 0.0, now)
            else:
                refused += 1
        return refused

    def find_shared(self, now: float) -> list[Line]:
        """Find out which links share lines; return the lines of which that is new."""
        if now < self._lines.due():
            return []
        for line, cap in self._caps.items():
            shared = cap.shared(now)
            if shared and self._lines.exceeds(line, shared, now):
                cap.clear()
                self._lines.reset_line(line)
        contended = self.contended
        new = []
        for line, value in self._lines.find_caps(now).items():
            cap = self._caps[line]
            if not RATES.allow(value):
                continue
            if not cap.shared(now):
                cap.readings, cap.detected = Readings(), True
                new.append(line)
            cap.readings.add(value, 0.0, now)
        if self.contended == contended:
            return new
        _log.info("the network is %s contended", "now" if self.contended else "no longer")
        if not self.contended:
            return new
        for cap in self._caps.values():
            if not cap.detected:  # nodes judge by their chunks, often wrongly under contention
                cap.clear()
        return list(self._caps)

    def reset(self, now: float) -> None:
        """Discard everything: it was measured beside pairs that turned out to be no links."""
        self._lines.reset(now)
        for cap in self._caps.values():
            cap.clear()
        self._reports_from = now + _REPORT_WINDOW_S

    def upper_bound(self, pair: tuple[int, int]) -> float:
        """Return the most that a (source, target) link can carry, in bit/s, as far as its lines show."""
        return self._lines.upper_bound(pair)

    def may_have_slowed(self, pair: tuple[int, int], now: float) -> bool:
        """Return whether what others carried may have slowed a (source, target) link in the last seconds."""
        return any(
            self._lines.may_have_slowed((end, rank), self._caps[end, rank].shared(now), pair, now)
            for end, rank in enumerate(pair)
        )

    def contention_known(self, line: Line, now: float) -> bool:
        """Return whether it is known when a line slows its links, so that at other times it does not."""
        return self.contended or self._caps[line].shared(now) > 0.0

    def known(self, now: float) -> dict[int, tuple[float, float]]:
        """Return the known caps out of and into each rank, in bit/s; 0: unknown."""
        return {
            rank: (self._caps[0, rank].known(now), self._caps[1, rank].known(now))
            for rank in range(self._size)
        }

    def counting(self, end: int, rates: Mapping[tuple[int, int], KnownRate], now: float) -> dict[int, float]:
        """Return the caps to plan with, in bit/s by rank; `end`: 0 for egress, 1 for ingress.

        Where links are known to share one line, any other line counts as carrying no more than it was seen
        to: otherwise a policy is formed for what links that share it carry while others are idle
        (docs/measurements/awareness.md, "Networks that no tuning saw").
        """
        caps = {}
        some_known = self.some_known
        for rank in range(self._size):
            cap = self._caps[end, rank]
            most = cap.assumed(now) if some_known else 0.0
            if not most:  # as of most nodes
                cap.counts = False
                continue
            pairs = (((rank, other), (other, rank))[end] for other in range(self._size))
            links = [rate for pair in pairs if (rate := rates.get(pair)) is not None]
            together = sum(link.value for link in links)
            limit = _ENDS if cap.counts else _BEGINS
            cap.counts = len(links) > 1 and most < limit * together
            if cap.counts:
                caps[rank] = most
        return caps

    def counts(self, line: Line) -> bool:
        """Return whether policies are planned with a cap of this line."""
        return self._caps[line].counts

    def any_counts(self, source: Places, target: Places) -> Flags:
        """Return at which links policies are planned with a cap of a line at one of the ends."""
        counts = np.array(
            [self._caps[0, rank].counts or self._caps[1, rank].counts for rank in range(self._size)]
        )
        either: Flags = counts[source] | counts[target]
        return either

    def error(self, now: float) -> float:
        """Return the largest standard error of the caps that count, as a fraction."""
        counting = ((cap.readings or cap.carried) for cap in self._caps.values() if cap.counts)
        return max((readings.error(now) for readings in counting), default=0.0)
