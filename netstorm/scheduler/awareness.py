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

import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.errors import Unreachable
from netstorm.protocol.messages import Measured
from netstorm.scheduler.measured_links import (
    AccessCaps,
    MeasuredLinks,
    Rates,
    Readings,
    changed_with,
    error_after,
    percentile,
)
from netstorm.topology.network import Link, Network, Rank, Routing
from netstorm.units import format_duration, format_rate

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
        self._links: Final = MeasuredLinks(frozenset(prior.pairs()), self._caps)
        self.changes: Final = self._links.changes
        self._excluded: frozenset[tuple[int, int]] = frozenset()
        self._routes: Final = InferredRoutes(prior.size) if find_routes else None
        self._routed: frozenset[tuple[int, int]] = frozenset()
        self._planned = PlannedLinks(prior)
        self._assumed: tuple[float | None, float | None] | None = None
        """Rate and latency of unmeasured links in the last estimate; None: plan all links anew."""
        self._recent_changes = RecentChanges()

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

    def replace_prior(self, prior: Network) -> None:
        """Assume other rates for links that were not measured; the links are the same."""
        self._prior = prior
        self._planned = PlannedLinks(prior)
        self._assumed = None

    @property
    def measured(self) -> frozenset[tuple[int, int]]:
        """The links that have been measured, as of the last estimate."""
        return frozenset(self._links.rates) - self._routed

    @property
    def routed(self) -> frozenset[tuple[int, int]]:
        """(source, target) pairs that are no links, as of the last estimate."""
        return self._routed

    @property
    def contended(self) -> bool:
        """Whether links carry less beside others: they share lines, known or unknown."""
        return self._caps.contended

    @property
    def latency_changed_at(self) -> float:
        """When a latency last changed, which may show routes; -inf: never, or routes are not looked for."""
        return -math.inf if self._routes is None else self._routes.changed_at

    def access_caps(self, now: float) -> dict[int, tuple[float, float]]:
        """Return the known caps out of and into each rank, in bit/s; 0: unknown."""
        return self._caps.known(now)

    def prior_estimate(self) -> NetworkEstimate:
        """Return the network as it is without measurements."""
        links = tuple(link for link in self._prior.links if (link.source, link.target) not in self._excluded)
        return NetworkEstimate(
            network=replace(self._prior, links=links, changes=()),
            errors=(0.0,) * len(links),
            cap_error=0.0,
            measured=frozenset[tuple[int, int]](),
        )

    def estimate(self, now: float) -> NetworkEstimate:
        """Return the network as it is known now.

        Planned anew are links with new reports. All are, if what is assumed of unmeasured links has changed,
        or if links have changed lately.
        """
        stale = self._links.refresh(now)
        self._find_routes(now)
        rates, before = self._link_rates(), self._assumed
        if stale or before is None:
            self._assumed = self._unmeasured(rates)
        egress, ingress = self._caps.counting(0, rates, now), self._caps.counting(1, rates, now)
        changes, self._recent_changes = self._recent_changes, recent_changes(rates, now)
        if self._assumed != before or self._recent_changes != changes:
            stale = set(self._prior.pairs())
        else:
            stale |= {pair[::-1] for pair in stale}  # directions are alike
        self._planned.update(self._planned_link(pair, now) for pair in stale if pair in self._planned)
        return NetworkEstimate(
            network=self._planned.network(
                self._prior,
                self._excluded | self._routed,
                egress,
                ingress,
                routing=Routing.UNDERLAY if self._routed else self._prior.routing,
            ),
            errors=self._planned.errors(now),
            cap_error=self._caps.error(now),
            measured=self.measured,
            routed=self._routed,
        )

    def link_estimates(self, now: float) -> list[LinkEstimate]:
        """Return what is known of each link."""
        estimate = self.estimate(now)
        estimates = []
        for link, error in zip(estimate.network.links, estimate.errors, strict=True):
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

    def _find_routes(self, now: float) -> None:
        """Infer routes. Discard the rates that links had beside routes that were not known yet."""
        if self._routes is None:
            return
        if self._routes.update():
            for pair in self._links.rates.keys() - self._routes.found:
                self._links.reset_rate(pair)
            self._caps.reset(now)
        if self._routes.found != self._routed:
            self._routed = self._routes.found
            self._assumed = None

    def _link_rates(self) -> Rates:
        """Return the measured rates of pairs that are links."""
        if not self._routed:
            return self._links.rates
        return {pair: rate for pair, rate in self._links.rates.items() if pair not in self._routed}

    def _unmeasured(self, rates: Rates) -> tuple[float | None, float | None]:
        """Return the rate and the latency of links that were never measured; None: unknown."""
        rate = percentile((rate.value for rate in rates.values()), 0.25)
        latency = percentile(self._links.latencies(self._routed), 0.75)
        before = self._assumed or (None, None)
        return _in_steps(rate, before[0]), _in_steps(latency, before[1])

    def _planned_link(self, pair: tuple[int, int], now: float) -> LinkUpdate:
        """Return a link's rate and latency for planning: measured, else assumed, else as the job began."""
        prior = self._prior.link(Rank(pair[0]), Rank(pair[1]))
        measured, latency = self._links.rates.get(pair), self._links.latency(pair)
        assumed_rate, assumed_latency = (None, None) if self._known else self._assumed or (None, None)
        if latency is None:
            latency = prior.latency if assumed_latency is None else assumed_latency
        if measured is None:
            return pair, prior.rate if assumed_rate is None else assumed_rate, latency, _PRIOR_ERROR, None
        reverse = self._links.rates.get(pair[::-1])
        lines = (*enumerate(pair), *enumerate(pair[::-1]))
        capped = any(self._caps.counts(line) for line in lines)
        if reverse is not None and not capped and changed_with(measured, reverse, now):
            return pair, reverse.value, latency, _ALIKE_ERROR, reverse.readings
        outdated = self._recent_changes.part_since(now - measured.readings.age(now))
        if outdated and self._assumed is not None and self._assumed[0] is not None:
            rate = measured.value + outdated * (self._assumed[0] - measured.value)
            return pair, rate, latency, outdated * _PRIOR_ERROR, measured.readings
        return pair, measured.value, latency, 0.0, measured.readings


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEstimate:
    """The network as it was known at some moment."""

    network: Network
    errors: tuple[float, ...]
    """Standard errors of the rates, as fractions, by link in the order of `network.links`."""
    cap_error: float
    """The largest of those of access caps."""
    measured: frozenset[tuple[int, int]]
    """(source, target) links that have been measured."""
    routed: frozenset[tuple[int, int]] = frozenset()
    """(source, target) pairs that are no links: their paths lead past other nodes."""


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
# Of thousands of links few change between two estimates. Only these are built anew: at 128 nodes that takes
# 49 instead of 480 ms (docs/measurements/awareness.md, "What the scheduler costs").

LinkUpdate: TypeAlias = tuple[tuple[int, int], float, float, float, Readings | None]
"""(source, target), rate in bit/s, latency in s, the least error, and the readings whose error is larger."""


class PlannedLinks:
    """The links of one network, in their order."""

    def __init__(self, prior: Network) -> None:
        """Begin with what is assumed, and errors of 0."""
        self._links: Final = list(prior.links)
        self._places: Final[dict[tuple[int, int], int]] = {
            (link.source, link.target): place for place, link in enumerate(prior.links)
        }
        self._errors: Final = [(0.0, 0.0, math.inf)] * len(prior.links)
        """By link: the least error, that of the readings, and the time of the latter."""
        self._network: Network | None = None
        self._caps: tuple[Mapping[int, float], Mapping[int, float]] = ({}, {})
        self._excluded: frozenset[tuple[int, int]] = frozenset()

    def __contains__(self, pair: tuple[int, int]) -> bool:
        return pair in self._places

    def update(self, links: Iterable[LinkUpdate]) -> None:
        """Replace what is planned for some links."""
        for pair, rate, latency, least, readings in links:
            place = self._places[pair]
            known = (0.0, math.inf) if readings is None else readings.error_and_time()
            self._errors[place] = (least, *known)
            before = self._links[place]
            loss = before.loss if readings is None else 0.0  # what was measured is goodput
            if (rate, latency, loss) != (before.rate, before.latency, before.loss):
                self._links[place] = replace(before, rate=rate, latency=latency, loss=loss)
                self._network = None

    def network(
        self,
        prior: Network,
        excluded: frozenset[tuple[int, int]],
        egress: Mapping[int, float],
        ingress: Mapping[int, float],
        *,
        routing: Routing,
    ) -> Network:
        """Return the network with these access caps, by rank, but without some links."""
        if (
            self._network is None
            or (egress, ingress) != self._caps
            or excluded != self._excluded
            or routing is not self._network.routing
        ):
            self._caps, self._excluded = (dict(egress), dict(ingress)), excluded
            nodes = tuple(
                replace(
                    node,
                    egress=egress.get(node.rank, node.egress),
                    ingress=ingress.get(node.rank, node.ingress),
                )
                for node in prior.nodes
            )
            links = tuple(link for link in self._links if (link.source, link.target) not in excluded)
            self._network = replace(prior, nodes=nodes, links=links, changes=(), routing=routing)
        return self._network

    def errors(self, now: float) -> tuple[float, ...]:
        """Return the standard errors of the rates, by link of the last `network`; they grow with age."""
        errors = (max(least, error_after(own, now - at)) for least, own, at in self._errors)
        if not self._excluded:
            return tuple(errors)
        return tuple(
            error for pair, error in zip(self._places, errors, strict=True) if pair not in self._excluded
        )


# How far the rate of a link is still believed that was not measured since others have changed.
#
# Links of a WAN change together. A rate that was read before others changed is planned nearer to that of
# links that were never measured: so a fast link is not believed to be fast for ever, and a slow one is tried
# again.

_PRESENT_S: Final = 10.0
"""A link that was measured within that is in use: whether it has changed is known."""


@dataclass(frozen=True, slots=True)
class RecentChanges:
    """When links in use have last changed."""

    times: tuple[float, ...] = ()
    """In order, of those that have ever changed."""
    in_use: int = 0
    """Number of links in use, changed or not."""

    def part_since(self, read_at: float) -> float:
        """Return which part of the links in use has changed since a link was read, from 0 to 1.

        Without this rule the 15th round of jobs that find out by themselves which pairs are links took 1.21
        times as long as with a network file on the worst of eight backbones, and 1.13 with it; in the mean it
        is 1.04 either way (docs/measurements/awareness-rules.md, "Outdated links").
        """
        return (len(self.times) - bisect_right(self.times, read_at)) / self.in_use if self.times else 0.0


def recent_changes(rates: Rates, now: float) -> RecentChanges:
    """Return what has changed among the links in use."""
    in_use = [rate.readings.changed_at for rate in rates.values() if rate.readings.age(now) <= _PRESENT_S]
    times = tuple(sorted(time for time in in_use if time > -math.inf))
    return RecentChanges(times, len(in_use)) if times else RecentChanges()


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


class InferredRoutes:
    """The inferred routes of one network.

    Attributes:
        found: (source, target) pairs whose paths lead past other nodes.
        changed_at: when a latency last changed.
    """

    def __init__(self, size: int) -> None:
        """Begin with all pairs as links; `size`: the number of nodes."""
        self.found: frozenset[tuple[int, int]] = frozenset()
        self.changed_at = -np.inf
        self._size: Final = size
        self._latencies: Final[dict[tuple[int, int], float]] = {}
        self._is_new = False

    def record(self, pair: tuple[int, int], latency: float, now: float) -> None:
        """Record the one-way latency of a pair, in s."""
        before = self._latencies.get(pair, 0.0)
        if abs(latency - before) > _SAME_LATENCY * before:
            self._latencies[pair] = latency
            self._is_new, self.changed_at = True, now

    def update(self) -> bool:
        """Infer again if latencies are new; return whether the first routes were found."""
        if not self._is_new:
            return False
        self._is_new, before = False, self.found
        self.found = routed_pairs(self._latencies, self._size, before)
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
    known = {pair: seconds for pair, seconds in latencies.items() if seconds > 0.0}
    if len(known) < max(_LEAST_PAIRS, _KNOWN * size * (size - 1)):
        return before
    latency = _matrix(known, size, np.inf)
    allowed = _PART * latency + _LEAST_S
    wider = np.where(_matrix(dict.fromkeys(before, 1.0), size, 0.0) > 0.0, _STAYS * allowed, allowed)
    found = np.zeros((size, size), bool)
    decoys = np.zeros((len(_DECOYS), size, size), bool)
    with np.errstate(invalid="ignore"):  # of pairs that are not known
        for middle in range(size):
            there, on = latency[:, middle, None], latency[None, middle, :]
            hops = np.minimum(there, on) >= _HOP * allowed
            longer = there + on - latency
            found |= hops & (abs(longer) <= wider)
            for place, times in enumerate(_DECOYS):
                decoys[place] |= hops & (abs(longer - times * allowed) <= allowed)
    chance = float(decoys.sum()) / len(_DECOYS)
    far = int((latency >= 2 * _HOP * allowed)[np.isfinite(latency)].sum())
    least = max(_LEAST_PAIRS, _LEAST_SHARE * far, _OVER_CHANCE * chance)
    if found.sum() < (least / _STAYS if before else least):
        return frozenset()
    found |= _longer_than_three(np.where(found, np.inf, latency))
    return frozenset((int(source), int(target)) for source, target in np.argwhere(found))


def _longer_than_three(lines: _Matrix) -> npt.NDArray[np.bool_]:
    """Return (N, N) which of the remaining pairs take longer than three or four others of them in a row.

    Where the ways there and back lead past different nodes, half a round trip is no sum of two others, but
    longer than the shorter way. Each of the others is shorter, so these keep all nodes joined.
    """
    far = np.where(lines >= _HOP * _LEAST_S, lines, np.inf)
    three = _concatenated(_concatenated(far, far), far)
    return np.isfinite(lines) & (np.minimum(three, _concatenated(three, far)) < lines)


def _concatenated(one: _Matrix, other: _Matrix) -> _Matrix:
    """Return (N, N) the least latency of a pair of `one` followed by a pair of `other`."""
    least = np.full(one.shape, np.inf)
    for middle in range(len(one)):
        np.minimum(least, one[:, middle, None] + other[None, middle, :], out=least)
    return least


def _matrix(values: Mapping[tuple[int, int], float], size: int, other: float) -> _Matrix:
    """Return `values` as an (N, N) matrix by source and target; `other` where there is none."""
    matrix = np.full((size, size), other)
    for pair, value in values.items():
        matrix[pair] = value
    return matrix


# By how much a network has changed between two estimates of it.

_SIGNIFICANT: Final = 3.0
"""Standard errors by which a link must change: there are dozens of links, and noise alone must change no
policy (docs/measurements/awareness.md, "Noise changes no policy").
"""


def throughputs(network: Network, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Return what each (source, target) pair has for itself, in bit/s; 0: it has no connection any more."""
    by_pair = {}
    for source, target in pairs:
        try:
            by_pair[source, target] = network.throughput(Rank(source), Rank(target))
        except Unreachable:
            by_pair[source, target] = 0.0
    return by_pair


def largest_change(
    before: NetworkEstimate, after: NetworkEstimate, rate: float, chunk_bytes: int
) -> tuple[float, str]:
    """Return the largest change of a link or access line, as a logarithm, and its description.

    Changes count that exceed the fraction `rate` and the errors of both estimates; (0, ""): there is none.
    """
    old = {(link.source, link.target): place for place, link in enumerate(before.network.links)}
    new = {(link.source, link.target): place for place, link in enumerate(after.network.links)}
    gone = sorted(old.keys() - new.keys())
    if gone:
        return math.inf, f"link {gone[0][0]}→{gone[0][1]} is gone"
    most, text = 0.0, ""
    for link in after.network.links:
        pair = (link.source, link.target)
        if pair not in old:
            return math.inf, f"link {link} is back"
        was = before.network.links[old[pair]]
        # An assumption has no error of measurement.
        errors = [
            estimate.errors[place] if pair in estimate.measured else 0.0
            for estimate, place in ((before, old[pair]), (after, new[pair]))
        ]
        delays = [8 * chunk_bytes / state.rate + state.latency for state in (was, link)]
        change = abs(math.log(delays[1] / delays[0]))
        if change <= _SIGNIFICANT * math.hypot(*errors):
            change = 0.0
        if abs(link.rate - was.rate) > _SIGNIFICANT * math.hypot(errors[0] * was.rate, errors[1] * link.rate):
            change = max(change, abs(math.log(link.rate / was.rate)))
        if change > max(math.log1p(rate), most):
            most, text = change, f"link {link} from {_described(was)} to {_described(link)}"
    for change, line in _line_changes(before, after):
        if change > max(math.log1p(rate), _SIGNIFICANT * after.cap_error, most):
            most, text = change, line
    return most, text


def _line_changes(before: NetworkEstimate, after: NetworkEstimate) -> Iterator[tuple[float, str]]:
    """Yield the change of each access line, as a logarithm, and its description.

    Without a cap, all links together are the limit: a cap that is no less than these appears and vanishes
    while nothing changes.
    """
    networks = before.network, after.network
    for word, end in (("egress", "source"), ("ingress", "target")):
        totals = [dict.fromkeys(network.ranks, 0.0) for network in networks]
        for total, network in zip(totals, networks, strict=True):
            for link in network.links:
                total[getattr(link, end)] += link.rate
        for node in after.network.nodes:
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


def _described(link: Link) -> str:
    return f"{format_rate(link.rate)} and {format_duration(link.latency)}"
