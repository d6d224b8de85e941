"""Estimate the network: all nodes' reports in, an ordinary `Network` out. Pure.

Nodes measure their links, in and out, and their own access lines (`Measured`). Between that and a network to
plan for there are:

* *Access lines* (`access_caps`). Links that share one are not independent. While such a line is full, and in
  a contended network while others carry data, what a link carries is only a lower bound of its rate.
* *Conflicting reports* (`link_reports`). The source's kernel is believed, or else the target, which sees
  chunks arrive and whether their source had others under way.
* *Links never measured.* With a network file they are as it says. Without one they get the 25th percentile of
  the measured rates and the 75th of the latencies, so that they are no bargain.
* *Pairs whose paths lead past other nodes* (`inferred_routes`). They are planned as routes over other links.

A node may report anything: implausible values are refused and counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from netstorm.protocol.messages import Measured
from netstorm.scheduler.awareness.access_caps import AccessCaps
from netstorm.scheduler.awareness.inferred_routes import InferredRoutes
from netstorm.scheduler.awareness.link_reports import Rates, changed_with, percentile
from netstorm.scheduler.awareness.measured_links import MeasuredLinks
from netstorm.scheduler.awareness.network_estimate import LinkEstimate, NetworkEstimate
from netstorm.scheduler.awareness.outdated_links import RecentChanges, recent_changes
from netstorm.scheduler.awareness.planned_links import LinkUpdate, PlannedLinks
from netstorm.topology.network import Network, Rank, Routing

__all__ = ["Collector"]

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
        found = []
        for link, error in zip(estimate.network.links, estimate.errors, strict=True):
            pair = (link.source, link.target)
            rate = self._links.rate(pair, now)
            found.append(
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
        return found

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
        """Return what a link is planned with."""
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
