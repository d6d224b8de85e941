"""Awareness: from what is measured of links to an estimate of the network. Pure.

Nodes measure their links, in and out, and their own access lines (`Measured`). Between that and a network to
plan for there are:

* *Access lines* (`AccessCaps`). Links that share one are not independent. While such a line is full, and in
  a contended network while others carry data, what a link carries is only a lower bound of its rate.
* *Conflicting reports* (`LinkReports`). The source's kernel is believed, or else the target, which sees
  chunks arrive and whether their source had others under way.
* *Links never measured.* With a network file they are as it says. Without one they get the 25th percentile of
  the measured rates and the 75th of the latencies, so that they are no bargain.
* *Pairs whose paths lead past other nodes* (`InferredRoutes`). They are planned as routes over other links.

A node may report anything: implausible values are refused and counted.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.errors import Unreachable
from netstorm.protocol.messages import Measured
from netstorm.scheduler.link_columns import (
    SLICE,
    Flags,
    Floats,
    LinkColumns,
    NetworkColumns,
    Places,
    finish,
    row_slices,
    slices,
)
from netstorm.scheduler.measured_links import (
    AccessCaps,
    LinkTable,
    MeasuredLinks,
    errors_after,
    percentile_of,
)
from netstorm.topology.network import Network, Rank, Routing
from netstorm.units import format_duration, format_rate

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's own is newer than Python 3.10

__all__ = [
    "Collector",
    "FailedLinkRecord",
    "InferredRoutes",
    "LinkEstimate",
    "NetworkEstimate",
    "PlannedLinks",
    "largest_change",
    "routed_pairs",
    "throughputs",
]


_log = logging.getLogger(__name__)

_PRIOR_ERROR: Final = 0.3
"""Standard error of the rate of links that were never measured."""

_ALIKE_ERROR: Final = 0.15
"""Least standard error of a rate that is taken from the reverse direction."""

_STEP: Final = 0.02
"""What is assumed of unmeasured links changes in steps of this part: each change has all links planned anew,
which takes ten times as long (docs/measurements/awareness.md, "What the scheduler costs").
"""

_ROUTES_EVERY_S: Final = 60.0
"""How often routes are looked for in networks of more than 128 nodes: of 512 it takes seconds."""


class Collector:
    """Estimates the network of one job.

    Attributes:
        refused: implausible values so far.
        reports: reports so far.
        changes: when links were last noticed to have changed, in order.
    """

    def __init__(self, prior: Network, *, known: bool, find_routes: bool = False) -> None:
        """Begin with what is assumed.

        Args:
            prior: its links are the ones that may be used.
            known: its rates and latencies come from a network file, and hold until measured.
            find_routes: some of the links may be routes over others.
        """
        self.refused = 0
        self.reports = 0
        self._prior = prior
        self._known: Final = known
        self._caps: Final = AccessCaps(prior.size)
        self._links: Final = MeasuredLinks(frozenset(prior.pairs()), self._caps, prior.size)
        self.changes: Final = self._links.changes
        self._excluded: frozenset[tuple[int, int]] = frozenset()
        self._routes: Final = InferredRoutes(prior.size) if find_routes else None
        self._routed: frozenset[tuple[int, int]] = frozenset()
        self._left_out: frozenset[tuple[int, int]] = frozenset()
        """Excluded or routed."""
        self._known_links: Flags = self._links.table.known
        """(N, N) links that were measured, as of the last estimate."""
        self._planned = PlannedLinks(prior)
        self._assumed: tuple[float | None, float | None] | None = None
        """Rate and latency of unmeasured links in the last estimate; None: plan all links anew."""
        self._recent_changes = RecentChanges()
        self._under_way: Generator[None, None, NetworkEstimate] | None = None
        """An estimate that `advance` works on."""

    def record(self, rank: int, report: Measured, now: float) -> None:
        """Record a node's report."""
        self.reports += 1
        before = self.refused
        size = self._prior.size
        self.refused += self._caps.record(rank, report, now)
        for line in self._caps.find_shared(now):
            self._links.mark_contended(line)
        reported = [((measure.source, rank), measure) for measure in report.links[:size]]
        reported += [((rank, measure.source), measure) for measure in report.outgoing[:size]]
        for pair, measure in reported:
            if not self._links.record(pair, measure, now):
                self.refused += 1
            elif self._routes is not None and (latency := self._links.shortest_latency(pair)) > 0.0:
                for way in (pair, pair[::-1]):
                    self._routes.record(way, latency, now)
        if self.refused > before:
            _log.debug("rank %d reports implausible values: %r", rank, report)

    def exclude(self, links: Iterable[tuple[int, int]]) -> None:
        """Plan without these (source, target) links, and with all others, from now on."""
        self._excluded = frozenset(links)
        self._left_out = self._excluded | self._routed

    def replace_prior(self, prior: Network) -> None:
        """Assume other rates for links that were not measured; the links are the same."""
        self._end_pass()
        self._prior = prior
        self._planned = PlannedLinks(prior)
        self._assumed = None

    @property
    def measured(self) -> frozenset[tuple[int, int]]:
        """The links that have been measured, as of the last estimate."""
        return pairs_of(self._known_links)

    @property
    def routed(self) -> frozenset[tuple[int, int]]:
        """(source, target) pairs that are no links, as of the last estimate."""
        return self._routed

    @property
    def contended(self) -> bool:
        """Whether links carry less beside others: they share lines, known or unknown."""
        return self._caps.contended

    @property
    def some_shared(self) -> bool:
        """Whether links are known to share some access line."""
        return self._caps.some_known

    @property
    def latency_changed_at(self) -> float:
        """When a latency last changed, which may show routes; -inf: never, or routes are not looked for at
        once: of so many latencies some always change.
        """
        return -math.inf if self._routes is None or self._is_large else self._routes.changed_at

    def access_caps(self, now: float) -> dict[int, tuple[float, float]]:
        """Return the known caps out of and into each rank, in bit/s; 0: unknown."""
        return self._caps.known(now)

    def prior_estimate(self) -> NetworkEstimate:
        """Return the network as it is without measurements."""
        links = tuple(link for link in self._prior.links if (link.source, link.target) not in self._excluded)
        return NetworkEstimate.of(
            replace(self._prior, links=links, changes=()), errors=(0.0,) * len(links), cap_error=0.0
        )

    def advance(self, now: float) -> NetworkEstimate | None:
        """Work on an estimate of the network for about 5 ms; return it once it is ready.

        It is as of the first call for it. Of 128 nodes it is ready at once, of 512 after about 40 calls.
        """
        if self._under_way is None:
            self._under_way = self._estimating(now)
        if not self._is_large:
            return self._end_pass()
        try:
            next(self._under_way)
        except StopIteration as finished:
            self._under_way = None
            estimate: NetworkEstimate = finished.value
            return estimate
        return None

    def estimate(self, now: float) -> NetworkEstimate:
        """Return the network as it is known now, at once; of 512 nodes it takes .1 s."""
        self._end_pass()
        return finish(self._estimating(now))

    def _end_pass(self) -> NetworkEstimate | None:
        """Return the estimate that is under way; None: there is none."""
        under_way, self._under_way = self._under_way, None
        return None if under_way is None else finish(under_way)

    def _estimating(self, now: float) -> Generator[None, None, NetworkEstimate]:
        """Return the network as it is known now, in slices.

        Planned anew are links with new reports. All are, if what is assumed of unmeasured links has changed,
        or if links have changed lately.
        """
        stale = np.zeros_like(self._known_links)
        for rows in row_slices(self._prior.size):
            stale[rows] = self._links.refresh(now, rows)
            yield
        yield from self._find_routes(now)
        known, before = self._measured_links(), self._assumed
        self._known_links = known
        if before is None or stale.any():
            self._assumed = self._unmeasured(known)
            yield
        rates = self._links.rates(known)
        egress, ingress = self._caps.counting(0, rates, now), self._caps.counting(1, rates, now)
        changes, self._recent_changes = self._recent_changes, recent_changes(self._links.table, known, now)
        if self._assumed != before or self._recent_changes != changes:
            stale[:] = True
        else:
            stale |= stale.T  # directions are alike
        yield
        for places in slices(self._planned.places(stale)):
            self._plan(places, now)
            yield
        columns, errors, reading_errors = self._planned.network(
            self._prior,
            self._left_out,
            egress,
            ingress,
            now,
            routing=Routing.UNDERLAY if self._routed else self._prior.routing,
        )
        return NetworkEstimate(
            columns=columns,
            errors=errors,
            reading_errors=reading_errors,
            cap_error=self._caps.error(now),
            known=known,
            routed=self._routed,
        )

    def link_estimates(self, now: float) -> list[LinkEstimate]:
        """Return what is known of each link."""
        estimate = self.estimate(now)
        estimates = []
        for link, error in zip(estimate.network.links, estimate.errors.tolist(), strict=True):
            pair = (link.source, link.target)
            rate = self._links.rate(pair, now)
            estimates.append(
                LinkEstimate(
                    source=link.source,
                    target=link.target,
                    rate=link.rate,
                    error=error,
                    latency=link.latency,
                    age=math.inf if rate is None else rate.readings.age(now),
                    censored=rate is not None
                    and any(self._caps.counts(line) and rate.contended[line[0]] for line in enumerate(pair)),
                )
            )
        return estimates

    # ------------------------------------------------------------------------------------------------ inside

    @property
    def _is_large(self) -> bool:
        return self._prior.size**2 > SLICE

    def _find_routes(self, now: float) -> Generator[None, None, None]:
        """Infer routes. Discard the rates that links had beside routes that were not known yet."""
        if self._routes is None or (self._is_large and now < self._routes.inferred_at + _ROUTES_EVERY_S):
            return
        if (yield from self._routes.update(now)):
            for source in range(self._prior.size):
                self._links.reset_rates(source, self._routes.found)
                yield
            self._caps.reset(now)
        if self._routes.found != self._routed:
            self._routed = self._routes.found
            self._left_out = self._excluded | self._routed
            self._assumed = None

    def _measured_links(self) -> Flags:
        """Return (N, N) which pairs are links that were measured."""
        known = self._links.table.known.copy()
        if self._routes is not None:
            known &= ~self._routes.matrix
        return known

    def _unmeasured(self, known: Flags) -> tuple[float | None, float | None]:
        """Return the rate and the latency of links that were never measured; None: unknown."""
        table = self._links.table
        reported = table.latency >= 0.0
        if self._routes is not None:
            reported &= ~self._routes.matrix
        rate = percentile_of(table.value[known], 0.25)
        latency = percentile_of(table.latency[reported], 0.75)
        before = self._assumed or (None, None)
        return _in_steps(rate, before[0]), _in_steps(latency, before[1])

    def _plan(self, places: Places, now: float) -> None:
        """Plan some links anew, by place: as measured, else as assumed, else as the job began."""
        table, prior, (source, target) = self._links.table, self._planned.prior, self._planned.ends(places)
        pair = source, target
        assumed_rate, assumed_latency = (None, None) if self._known else self._assumed or (None, None)
        latency = table.latencies(source, target)
        default = prior.latency[places] if assumed_latency is None else assumed_latency
        latency = np.where(latency >= 0.0, latency, default)

        measured = table.known[pair]
        rate = np.where(
            measured, table.value[pair], prior.rate[places] if assumed_rate is None else assumed_rate
        )
        least = np.where(measured, 0.0, _PRIOR_ERROR)
        error = np.where(measured, table.error[pair], 0.0)
        at = np.where(measured, table.at[pair], np.inf)

        if self._assumed is not None and self._assumed[0] is not None:
            outdated = self._recent_changes.part_since(now - np.maximum(0.0, now - table.at[pair]))
            outdated = np.where(measured, outdated, 0.0)
            rate = rate + outdated * (self._assumed[0] - rate)
            least = np.where(measured, outdated * _PRIOR_ERROR, least)

        back = target, source
        began = self._recent_changes.began(table.changed_at[back])
        alike = table.changed_with(source, target, began, now) & ~self._caps.any_counts(source, target)
        rate = np.where(alike, table.value[back], rate)
        least = np.where(alike, _ALIKE_ERROR, least)
        error = np.where(alike, table.error[back], error)
        at = np.where(alike, table.at[back], at)
        self._planned.update(places, PlannedValues(rate, latency, least, error, at, measured))


def _in_steps(new: float | None, before: float | None) -> float | None:
    """Return the value before if it is close enough, or else the new one."""
    close = new is not None and before is not None and math.isclose(new, before, rel_tol=_STEP)
    return before if close else new


# The estimate of a network at some moment: what policies are formed for, and what people are shown.


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """What is known of one link, for a person."""

    source: int
    target: int
    rate: float
    """Bit/s that is planned with."""
    error: float
    """Standard error, as a fraction of the rate."""
    latency: float
    """Seconds."""
    age: float
    """Seconds since the last reading; infinite: never measured."""
    censored: bool
    """Measured only while an access line was the limit: it may carry more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NetworkEstimate:
    """The network as it was known at some moment."""

    columns: NetworkColumns
    errors: Floats
    """Standard errors of the rates, as fractions, by link in the order of `columns`."""
    reading_errors: Floats
    """The same of what was read alone, 0 if nothing was: less, where a reading may be outdated."""
    cap_error: float
    """The largest error of access caps."""
    known: Flags
    """(N, N), by source and target: the links that have been measured."""
    routed: frozenset[tuple[int, int]] = frozenset()
    """(source, target) pairs that are no links: their paths lead past other nodes."""

    @classmethod
    def of(
        cls,
        network: Network,
        *,
        errors: Iterable[float],
        cap_error: float,
        measured: Iterable[tuple[int, int]] = (),
    ) -> Self:
        """Return an estimate that is a network; for the arguments see the attributes."""
        known = np.zeros((network.size, network.size), bool)
        for pair in measured:
            known[pair] = True
        columns, all_errors = NetworkColumns.of(network), np.array(list(errors), float)
        return cls(
            columns=columns,
            errors=all_errors,
            reading_errors=np.where(known[columns.links.source, columns.links.target], all_errors, 0.0),
            cap_error=cap_error,
            known=known,
        )

    @property
    def network(self) -> Network:
        """The network."""
        return self.columns.network

    @cached_property
    def measured(self) -> frozenset[tuple[int, int]]:
        """(source, target) links that have been measured."""
        return pairs_of(self.known)

    def least_known(self) -> list[tuple[int, int]]:
        """Return the (source, target) links, those first that have not been measured."""
        links = self.columns.links
        order = np.argsort(self.known[links.source, links.target], kind="stable")
        return list(zip(links.source[order].tolist(), links.target[order].tolist(), strict=True))


def pairs_of(matrix: Flags) -> frozenset[tuple[int, int]]:
    """Return the places at which a matrix is true."""
    source, target = np.nonzero(matrix)
    return frozenset(zip(source.tolist(), target.tolist(), strict=True))


# What is known of a link that has failed.


@dataclass(frozen=True, slots=True)
class FailedLinkRecord:
    """One link that has failed."""

    source: int
    target: int
    reason: str
    """As its source reported it."""
    since: float


# The links that policies are planned for, kept between two estimates of the network.
#
# Of thousands of links few change between two estimates: only these are worked out anew
# (docs/measurements/awareness.md, "What the scheduler costs").


class PlannedValues(NamedTuple):
    """What is planned for some links."""

    rate: Floats
    """Bit/s."""
    latency: Floats
    """Seconds."""
    least: Floats
    """The least error of the rate, as a fraction."""
    error: Floats
    """That of the readings when the last one came, which grows from then on."""
    at: Floats
    """When that was."""
    measured: Flags


class PlannedLinks:
    """The links of one network, in their order.

    Attributes:
        prior: as they were assumed to be.
    """

    def __init__(self, prior: Network) -> None:
        """Begin with what is assumed, and errors of 0."""
        self.prior: Final = LinkColumns.of(prior.links)
        self._links = self.prior
        self._least: Final = np.zeros(len(self.prior))
        self._error: Final = np.zeros(len(self.prior))
        self._at: Final = np.full(len(self.prior), np.inf)
        """By link: the least error, that of the readings, and the time of the latter."""
        self._new: dict[str, Floats] = {}
        """Columns that replace those of the links in the next `network`."""
        self._network: NetworkColumns | None = None
        self._caps: tuple[Mapping[int, float], Mapping[int, float]] = ({}, {})
        self._excluded: frozenset[tuple[int, int]] = frozenset()
        self._included: Flags = np.ones(len(self.prior), bool)

    def places(self, matrix: Flags) -> Places:
        """Return the places of links at which an (N, N) matrix is true."""
        return np.nonzero(matrix[self.prior.source, self.prior.target])[0]

    def ends(self, places: Places) -> tuple[Places, Places]:
        """Return sources and targets of links."""
        return self.prior.source[places], self.prior.target[places]

    def update(self, places: Places, planned: PlannedValues) -> None:
        """Replace what is planned for some links, by place; once for each before the next `network`."""
        self._least[places], self._error[places], self._at[places] = planned.least, planned.error, planned.at
        links = self._links
        loss = np.where(planned.measured, 0.0, links.loss[places])  # what was measured is goodput
        news = {"rate": planned.rate, "latency": planned.latency, "loss": loss}
        if all(np.array_equal(getattr(links, name)[places], values) for name, values in news.items()):
            return
        self._new = self._new or {name: getattr(links, name).copy() for name in news}
        for name, values in news.items():
            self._new[name][places] = values

    def network(
        self,
        prior: Network,
        excluded: frozenset[tuple[int, int]],
        egress: Mapping[int, float],
        ingress: Mapping[int, float],
        now: float,
        *,
        routing: Routing,
    ) -> tuple[NetworkColumns, Floats, Floats]:
        """Return the network with these access caps, by rank, but without some links; and the standard errors
        of its rates, which grow with age, and those of what was read alone.
        """
        if self._new:
            self._links, self._new, self._network = self._links.replaced(**self._new), {}, None
        if (
            self._network is None
            or (egress, ingress) != self._caps
            or excluded is not self._excluded
            or routing is not self._network.routing
        ):
            self._caps, self._excluded = (dict(egress), dict(ingress)), excluded
            nodes = tuple(
                replace(
                    node,
                    egress=egress.get(node.rank, node.egress),
                    ingress=ingress.get(node.rank, node.ingress),
                )
                if node.rank in egress or node.rank in ingress
                else node
                for node in prior.nodes
            )
            without = np.zeros((prior.size, prior.size), bool)
            for pair in excluded:
                without[pair] = True
            self._included = ~without[self._links.source, self._links.target]
            links = self._links.chosen(self._included) if excluded else self._links
            self._network = NetworkColumns(nodes=nodes, links=links, routing=routing)
        read = errors_after(self._error, now - self._at)
        errors = np.maximum(self._least, read)
        if excluded:
            errors, read = errors[self._included], read[self._included]
        return self._network, errors, read


# How far the rate of a link is still believed that was not measured since others have changed.
#
# Links of a WAN change together. A rate that was read before others changed is planned nearer to that of
# links that were never measured: so a fast link is not believed to be fast for ever, and a slow one is tried
# again.

_NEVER: Final = np.zeros(0)

_PRESENT_S: Final = 10.0
"""A link that was measured within that is in use: whether it has changed is known."""


_TOGETHER_S: Final = 2.0
"""Links that change together are noticed within that. All count as changed when the first one was noticed: a
link that was read since is no more outdated by what is noticed so soon afterwards
(docs/measurements/changing-networks.md, "Readings that were there and did not count").
"""


class RecentChanges:
    """When links in use have last changed."""

    def __init__(self, times: Floats = _NEVER, in_use: int = 0) -> None:
        """Keep the times, in order, of those that have ever changed; `in_use`: how many links are in use."""
        self._noticed: Final = times
        self._times: Final = times.copy()
        """For each, when the first one was noticed that changed together with it."""
        begin = -math.inf
        for place, at in enumerate(times.tolist()):
            begin = at if at > begin + _TOGETHER_S else begin
            self._times[place] = begin
        self._in_use: Final = in_use

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RecentChanges)
            and self._in_use == other._in_use
            and np.array_equal(self._noticed, other._noticed)
        )

    __hash__ = None  # type: ignore[assignment]

    def began(self, noticed: Floats) -> Floats:
        """Return when links began to change together with those that were noticed at some times."""
        if not len(self._times):
            return noticed
        place = np.searchsorted(self._noticed, noticed, side="right") - 1
        began: Floats = np.where(place >= 0, np.minimum(self._times[place], noticed), noticed)
        return np.where(noticed <= began + _TOGETHER_S, began, noticed)

    def part_since(self, read_at: Floats) -> Floats:
        """Return which part of the links in use has changed since links were read, from 0 to 1.

        Without this rule the 15th round of jobs that find out by themselves which pairs are links took 1.21
        times as long as with a network file on the worst of eight backbones, and 1.13 with it; in the mean it
        is 1.04 either way (docs/measurements/awareness-rules.md, "Outdated links").
        """
        if not len(self._times):
            return np.zeros(len(read_at))
        later = len(self._times) - np.searchsorted(self._times, read_at, side="right")
        part: Floats = later / self._in_use
        return part


def recent_changes(table: LinkTable, known: Flags, now: float) -> RecentChanges:
    """Return what has changed among the links in use."""
    in_use = known & (np.maximum(0.0, now - table.at) <= _PRESENT_S)
    times = table.changed_at[in_use]
    times = np.sort(times[times > -np.inf])
    return RecentChanges(times, int(in_use.sum())) if len(times) else RecentChanges()


# Which pairs of nodes have no link of their own: infer it from latencies, where no network file says.
#
# Where the path from i to j leads past k, its latency is the sum of those from i to k and from k to j, within
# what the routers there take. Such pairs share lines with others and are no independent links: trees over
# them get other rates than planned, and the next policy is formed for those. Nothing is lost by planning
# without such a pair, since its traffic uses the same lines by way of k.
#
# Latencies may also fit by chance. So routes are a hypothesis about the whole network, and decoys measure
# chance: how many pairs would fit if the sum were somewhat more or less. Without clearly more pairs than
# that, no pair is left out.
#
# The ways there and back may lead past different nodes, and only their sum is measured. So once there are
# routes, pairs that take longer than three other pairs in a row count as routes, too.
#
# Source of all thresholds: docs/measurements/awareness.md, "Pairs whose ways lead past other nodes" (160
# networks), and of what finding routes gains: "Without a network file: a backbone".

_Matrix: TypeAlias = npt.NDArray[np.float64]

_PART: Final = 0.02
_LEAST_S: Final = 0.001
"""Tolerance of a sum of two latencies: the routers and lines of the middle node's own site take that."""

_HOP: Final = 3.0
"""Tolerances that each of the two latencies must have at least: nodes of one site are equally far from all
others, and none of them is on the path of another. This also keeps all nodes joined.
"""

_NARROW: Final = 8.0
_NARROWEST: Final = 0.1
"""Once routes are believed, the tolerance is so many times what half of them keep, and at least this part of
what it was: a line that is as long as two others by chance is seldom as exactly so as routes are
(docs/measurements/awareness.md, "Pairs whose ways lead past other nodes").
"""

_DECOYS: Final = (-8.0, -5.0, 5.0, 8.0)
"""Tolerances that are added to a sum to count pairs that fit by chance."""

_LEAST_PAIRS: Final = 6
_LEAST_SHARE: Final = 0.3
_OVER_CHANCE: Final = 2.0
"""Routes are believed if so many pairs fit, such a share of those that are far enough apart, and so many
times as many as by chance. Of 80 random meshes of nine nodes one had as many, and all of 40 backbones did.
"""

_KNOWN: Final = 0.75
"""Share of the pairs whose latencies must be known."""

_STAYS: Final = 2.0
"""Hysteresis: known routes stay within twice the tolerance, and while half as many pairs fit."""

_SAME_LATENCY: Final = 0.02
"""Latencies that differ by less are the same."""

_MIDDLES: Final = 32
"""Middle nodes that are tried at once, of 128 nodes: that takes 4 ms."""


class InferredRoutes:
    """The inferred routes of one network.

    Attributes:
        found: (source, target) pairs whose paths lead past other nodes.
        matrix: the same, as an (N, N) matrix.
        changed_at: when a latency last changed.
        inferred_at: when routes were last looked for; -inf: never.
    """

    def __init__(self, size: int) -> None:
        """Begin with all pairs as links; `size`: the number of nodes."""
        self.found: frozenset[tuple[int, int]] = frozenset()
        self.matrix: Flags = np.zeros((size, size), bool)
        self.changed_at = -math.inf
        self.inferred_at = -math.inf
        self._latencies: Final = np.zeros((size, size))
        """In s; 0: unknown."""
        self._is_new = False

    def record(self, pair: tuple[int, int], latency: float, now: float) -> None:
        """Record the one-way latency of a pair, in s."""
        before = float(self._latencies[pair])
        if abs(latency - before) > _SAME_LATENCY * before:
            self._latencies[pair] = latency
            self._is_new, self.changed_at = True, now

    def update(self, now: float) -> Generator[None, None, bool]:
        """Infer again if latencies are new, in slices; return whether the first routes were found."""
        if not self._is_new:
            return False
        self._is_new, self.inferred_at, before = False, now, self.found
        self.matrix = yield from _routed(self._latencies.copy(), self.matrix)
        self.found = pairs_of(self.matrix)
        return bool(self.found) and not before


def routed_pairs(
    latencies: Mapping[tuple[int, int], float], size: int, before: frozenset[tuple[int, int]] = frozenset()
) -> frozenset[tuple[int, int]]:
    """Return the (source, target) pairs whose paths lead past other nodes; O(N³).

    The other pairs join all nodes that `latencies` join.

    Args:
        latencies: known one-way latencies, in s.
        size: number of nodes, N.
        before: the routes that were found before.
    """
    known = _matrix(latencies, size)
    return pairs_of(finish(_routed(known, _matrix(dict.fromkeys(before, 1.0), size) > 0.0)))


def _routed(latencies: _Matrix, before: Flags) -> Generator[None, None, Flags]:
    """Return which pairs have paths that lead past other nodes, in slices; see `routed_pairs`.

    Args:
        latencies: (N, N), in s; 0: unknown.
        before: (N, N) which routes were found before.
    """
    size, number = len(latencies), int((latencies > 0.0).sum())
    if number < max(_LEAST_PAIRS, _KNOWN * size * (size - 1)):
        return before
    latency = np.where(latencies > 0.0, latencies, np.inf)
    allowed = _PART * latency + _LEAST_S
    times = np.where(before, _STAYS, 1.0)
    off = np.full((size, size), np.inf)
    decoys = np.zeros((len(_DECOYS), size, size), bool)
    with np.errstate(invalid="ignore"):  # of pairs that are not known
        least, per_slice = _HOP * allowed, max(1, _MIDDLES * SLICE // size**2)
        for middle in range(size):
            there, on = latency[:, middle, None], latency[None, middle, :]
            hops = np.minimum(there, on) >= least
            longer = (there + on - latency) / allowed
            np.fmin(off, np.where(hops, abs(longer), np.inf), out=off)
            for place, decoy in enumerate(_DECOYS):
                decoys[place] |= hops & (abs(longer - decoy) <= 1.0)
            if middle % per_slice == 0:
                yield
    found = off <= times
    chance = float(decoys.sum()) / len(_DECOYS)
    far = int((latency >= 2 * least)[np.isfinite(latency)].sum())
    enough = max(_LEAST_PAIRS, _LEAST_SHARE * far, _OVER_CHANCE * chance)
    if found.sum() < (enough / _STAYS if before.any() else enough):
        return np.zeros((size, size), bool)
    found = off <= times * min(1.0, max(_NARROWEST, _NARROW * float(np.median(off[found]))))
    longer_ways = yield from _longer_than_three(np.where(found, np.inf, latency))
    return found | longer_ways


def _longer_than_three(lines: _Matrix) -> Generator[None, None, Flags]:
    """Return (N, N) which of the remaining pairs take longer than three or four others of them in a row.

    Where the ways there and back lead past different nodes, half a round trip is no sum of two others, but
    longer than the shorter way. Each of the others is shorter, so these keep all nodes joined.
    """
    far = np.where(lines >= _HOP * _LEAST_S, lines, np.inf)
    two = yield from _concatenated(far, far)
    three = yield from _concatenated(two, far)
    four = yield from _concatenated(three, far)
    longer: Flags = np.isfinite(lines) & (np.minimum(three, four) < lines)
    return longer


def _concatenated(one: _Matrix, other: _Matrix) -> Generator[None, None, _Matrix]:
    """Return (N, N) the least latency of a pair of `one` followed by a pair of `other`."""
    least, per_slice = np.full(one.shape, np.inf), max(1, 4 * _MIDDLES * SLICE // one.size)
    for middle in range(len(one)):
        np.minimum(least, one[:, middle, None] + other[None, middle, :], out=least)
        if middle % per_slice == 0:
            yield
    return least


def _matrix(values: Mapping[tuple[int, int], float], size: int) -> _Matrix:
    """Return `values` as an (N, N) matrix by source and target; 0 where there is none."""
    matrix = np.zeros((size, size))
    for pair, value in values.items():
        matrix[pair] = value
    return matrix


# By how much a network has changed between two estimates of it.

_SIGNIFICANT: Final = 3.0
"""Standard errors by which a link must change: there are dozens of links, and noise alone must change no
policy (docs/measurements/awareness.md, "Noise changes no policy").
"""

_ROUNDED: Final = 1e-6
"""Of a change. Most links change by less, so that their logarithms are not needed."""


def throughputs(network: NetworkColumns, pairs: Flags) -> Floats:
    """Return (N, N) what each pair has for itself, in bit/s, by source and target.

    0: it is none of `pairs`, an (N, N) matrix, or has no connection any more.
    """
    if network.routing is Routing.OVERLAY:
        return np.where(pairs, network.throughputs(), 0.0)
    rates = np.zeros(pairs.shape)
    for source, target in pairs_of(pairs):
        with contextlib.suppress(Unreachable):
            rates[source, target] = network.network.throughput(Rank(source), Rank(target))
    return rates


def largest_change(
    before: NetworkEstimate, after: NetworkEstimate, rate: float, chunk_bytes: int
) -> tuple[float, str]:
    """Return the largest change of a link or access line, as a logarithm, and its description.

    Changes count that exceed the fraction `rate` and the errors of both estimates, those of the one before as
    far as they are no larger than now; (0, ""): there is none.
    """
    was, now = before.columns.links, after.columns.links
    old, new = before.columns.ids, after.columns.ids
    if not np.array_equal(old, new):
        gone, back = np.isin(old, new, invert=True), np.isin(new, old, invert=True)
        if gone.any():
            place = int(np.argmax(gone))
            return math.inf, f"link {was.source[place]}→{was.target[place]} is gone"
        if back.any():
            place = int(np.argmax(back))
            return math.inf, f"link {now.source[place]}→{now.target[place]} is back"
    delays = [8 * chunk_bytes / links.rate + links.latency for links in (was, now)]
    some = _changed_more(delays, rate) | _changed_more([was.rate, now.rate], rate)
    was, now = was.chosen(some), now.chosen(some)
    # An assumption has no error of measurement. That a reading was outdated says nothing for keeping to it,
    # nor that it was uncertain, if what is known now is certain.
    new_errors = np.where(after.known[now.source, now.target], after.errors[some], 0.0)
    errors = [np.minimum(before.reading_errors[some], new_errors), new_errors]
    changes = abs(np.log(delays[1][some] / delays[0][some]))
    changes[changes <= _SIGNIFICANT * np.hypot(*errors)] = 0.0
    clear = abs(now.rate - was.rate) > _SIGNIFICANT * np.hypot(errors[0] * was.rate, errors[1] * now.rate)
    changes = np.where(clear, np.maximum(changes, abs(np.log(now.rate / was.rate))), changes)
    most, text = 0.0, ""
    place = int(np.argmax(changes)) if len(changes) else -1
    if place >= 0 and changes[place] > math.log1p(rate):
        most = float(changes[place])
        text = (
            f"link {now.source[place]}→{now.target[place]} from {_described(was, place)} to "
            f"{_described(now, place)}"
        )
    for change, line in _line_changes(before, after):
        if change > max(math.log1p(rate), _SIGNIFICANT * after.cap_error, most):
            most, text = change, line
    return most, text


def _changed_more(values: list[Floats], rate: float) -> Flags:
    """Return where two values differ by about the fraction `rate`, or more."""
    ratio = values[1] / values[0]
    least = 1 + rate * (1 - _ROUNDED)
    changed: Flags = (ratio >= least) | (ratio <= 1 / least)
    return changed


def _line_changes(before: NetworkEstimate, after: NetworkEstimate) -> Iterator[tuple[float, str]]:
    """Yield the change of each access line, as a logarithm, and its description.

    Without a cap, all links together are the limit: a cap that is no less than these appears and vanishes
    while nothing changes.
    """
    networks = before.columns, after.columns
    for word, end in (("egress", "source"), ("ingress", "target")):
        totals = [
            np.bincount(getattr(network.links, end), network.links.rate, len(network.nodes)).tolist()
            for network in networks
        ]
        for node in after.columns.nodes:
            caps = [getattr(network.nodes[node.rank], word) for network in networks]
            if caps == [None, None]:
                continue
            limits = [
                total[node.rank] if cap is None else min(cap, total[node.rank])
                for cap, total in zip(caps, totals, strict=True)
            ]
            shown = ["no limit" if cap is None else format_rate(cap) for cap in caps]
            change = abs(math.log(limits[1] / limits[0])) if all(limits) else 0.0
            yield change, f"{word} of rank {node.rank} from {shown[0]} to {shown[1]}"


def _described(links: LinkColumns, place: int) -> str:
    return f"{format_rate(float(links.rate[place]))} and {format_duration(float(links.latency[place]))}"
