"""What is known of the network now: all nodes' reports in, an ordinary `Network` out.

Nodes measure their links, in and out, and their own access lines (`Measured`). Six things stand
between that and a network to plan for:

* *Access lines.* Links that share one are no independent links, and to plan as if they were throws away most
  of what planning gains. Which do is told by what all links carried at the same time (`access_lines`) or,
  where no kernel says that, by each node. A node's egress or ingress counts as a cap if its links could
  clearly carry more together, by what each has shown. While such a line is full, and in a crowded network
  while there is company, what a link carries is no more than a lower bound: what is less than what is known
  of it says nothing.
* *Censored links.* What a link carried while it shared a cap that was binding is no more than a lower bound.
  A link's target is believed, unless its source's kernel says what was delivered (`link_reports`): it sees
  chunks arrive, and these say whether their source had others under way.
  Planned with is what the caps at its two ends allow, and twice that bound at most. Under fair sharing those
  that share the cap get about the same, so a link that gets clearly less than its siblings is slow by itself,
  and is not censored.
* *Links never seen.* With a network file, what that says. Without one, the 25th percentile of the rates
  that were measured, and the 75th of the latencies: to try them must not look like a bargain.
* *Links not seen since others have changed.* If half of the links that are measured now have changed since a
  link was, it probably has, too: half of what it is above or below that percentile is not believed any more.
  What was fast and is used no more looks fast for ever otherwise, and is tried again and again; and what was
  slow is never tried.
* *Pairs whose ways lead past other nodes* share lines with others, and are no links (`routes`). Planned is
  without them, for a network in which they are routes over the links that are left.
* *Links whose way back has changed.* A direction that was like the other one is expected to have changed with
  it, until it is measured itself: data goes up a tree first, and down seconds later.

A peer may report anything: what cannot be is refused, and counted.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from netstorm.protocol.messages import LinkMeasure, Measured
from netstorm.scheduler.awareness.access_caps import RATES, AccessCaps
from netstorm.scheduler.awareness.inferred_routes import Routes
from netstorm.scheduler.awareness.link_context import LinkContext, Rates, changes_of, steady
from netstorm.scheduler.awareness.link_reports import LinkReports, as_the_way_back, percentile
from netstorm.scheduler.awareness.network_estimate import LinkEstimate, NetworkEstimate
from netstorm.scheduler.awareness.planned_links import PlannedLinks
from netstorm.scheduler.awareness.readings import Readings
from netstorm.topology.networks.elements import LATENCY, Rank
from netstorm.topology.networks.network import Network, Routing

__all__ = ["Collector"]

_log = logging.getLogger(__name__)

_SHARED: Final = 0.3
"""A link that shared the access line at one of its ends for a smaller part of the time was seen as it is."""

_ALIKE_ERROR: Final = 0.15

_MOST_SIGNAL_S: Final = 86_400.0
"""Clocks that differ by more are a mistake."""

_PRIOR_ERROR: Final = 0.3
"""Of links that nobody has measured."""

_CHANGES: Final = 256
"""More need not be told apart: they come between two looks."""

_RENEW_S: Final = 30.0
"""How often links are worked out anew of which nothing was reported: whose word counts changes with time."""


class Collector:
    """Reports of all nodes.

    Attributes:
        refused: values that cannot be.
        reports: reports so far.
        changes: when links were noticed to have changed, the last ones, in order.
    """

    def __init__(self, prior: Network, *, known: bool, find_routes: bool = False) -> None:
        """Begin with what is assumed.

        Args:
            prior: its links are the ones that may be used.
            known: its rates and latencies come from somebody who should know, and hold until measured.
            find_routes: some of the links may be no links, but routes over others.
        """
        self.refused = 0
        self.reports = 0
        self.changes: Final[deque[float]] = deque(maxlen=_CHANGES)
        self._prior = prior
        self._known: Final = known
        self._pairs: Final = frozenset(prior.pairs())
        self._states: dict[tuple[int, int], LinkReports] = {}
        self._caps: Final = AccessCaps(prior.size)
        self._avoided: frozenset[tuple[int, int]] = frozenset()
        self._routes: Final = Routes(prior.size) if find_routes else None
        self._routed: frozenset[tuple[int, int]] = frozenset()
        self._rates: Rates = {}
        self._stale: set[tuple[int, int]] = set()
        """Links that something was reported of since the last picture."""
        self._planned = PlannedLinks(prior)
        self._view: LinkContext | None = None
        """What the last picture rested on, beside each link's own reports."""
        self._renewed_at = -math.inf
        self._measured: frozenset[tuple[int, int]] = frozenset()

    def take(self, rank: int, report: Measured, now: float) -> None:
        """Take what a node reports."""
        self.reports += 1
        before = self.refused
        size = len(self._prior.nodes)
        self.refused += self._caps.take(rank, report, now)
        for end, rank_there in self._caps.look(now):
            self._were_in_company(end, rank_there)
        for one in report.links[:size]:
            self._take_link((one.source, rank), one, now)
        for one in report.outgoing[:size]:
            self._take_link((rank, one.source), one, now)
        if self.refused > before:
            _log.debug("rank %d reports what cannot be: %r", rank, report)

    def avoid(self, links: Iterable[tuple[int, int]]) -> None:
        """Plan without these links, (source, target), and with all others, from now on."""
        self._avoided = frozenset(links)

    def assume(self, prior: Network) -> None:
        """Take other rates for those that hold until measured; the links are the same."""
        self._prior = prior
        self._planned = PlannedLinks(prior)
        self._view = None

    @property
    def measured(self) -> frozenset[tuple[int, int]]:
        """The links that have been measured."""
        for pair in self._stale:
            state = self._states.get(pair)
            if pair not in self._rates and state is not None and (found := state.rate(0.0)) is not None:
                self._rates[pair] = found
        if len(self._measured) != len(self._rates):
            self._measured = frozenset(self._rates)
        return self._measured - self._routed if self._routed else self._measured

    @property
    def routed(self) -> frozenset[tuple[int, int]]:
        """(source, target) that are no links, as far as was found out for the last picture."""
        return self._routed

    def caps(self, now: float) -> dict[int, tuple[float, float]]:
        """Return, by rank, what its links share out and in, in bit/s, as far as is known; 0: nobody knows."""
        return self._caps.known(now)

    @property
    def crowded(self) -> bool:
        """Whether links carry less in company: they share lines, be these known or not."""
        return self._caps.crowded

    @property
    def routes_at(self) -> float:
        """When something was last heard that may tell which pairs are routes; -inf: never, or nobody asks."""
        return -math.inf if self._routes is None else self._routes.news_at

    def assumed(self) -> NetworkEstimate:
        """Return the network as it is without what was measured."""
        pairs = self._pairs - self._avoided
        links = tuple(link for link in self._prior.links if (link.source, link.target) in pairs)
        network = replace(self._prior, links=links, changes=())
        return NetworkEstimate(
            network=network, errors=(0.0,) * len(links), cap_error=0.0, measured=frozenset[tuple[int, int]]()
        )

    def picture(self, now: float) -> NetworkEstimate:
        """Return the network as it is known now.

        Worked out anew are the links that something was reported of since the last time, those at nodes whose
        access lines have changed, and, if what is assumed of links never seen has moved, those.
        """
        if now - self._renewed_at > _RENEW_S:
            self._renewed_at = now
            self._stale.update(self._states)
        stale, self._stale = self._stale, set()
        for pair in stale:
            state = self._states.get(pair)
            found = None if state is None else state.rate(now)
            if found is not None:
                self._rates[pair] = found
        self._find_routes(now)
        links = self._links()
        sides = self._caps.side(0, links, now), self._caps.side(1, links, now)
        seldom, far = self._unseen() if stale or self._view is None else (self._view.seldom, self._view.far)
        changes = changes_of(links, now)
        view = LinkContext(sides, seldom, far, changes)
        if self._view is None or (view.seldom, view.far) != (self._view.seldom, self._view.far):
            stale = set(self._pairs)
        else:
            stale |= {pair[::-1] for pair in stale}  # one may be expected to have changed with the other
            if changes != self._view.changes:
                stale |= self._rates.keys()
            for rank in view.other_lines(self._view):
                stale |= {pair for other in self._prior.ranks for pair in ((rank, other), (other, rank))}
        self._view = view
        self._planned.renew((pair, *self._link(pair, view, now)) for pair in stale if pair in self._planned)
        return NetworkEstimate(
            network=self._planned.network(
                self._prior,
                self._avoided | self._routed,
                *(side.caps for side in sides),
                routing=Routing.UNDERLAY if self._routed else self._prior.routing,
            ),
            errors=self._planned.errors(now),
            cap_error=self._caps.error(now),
            measured=self.measured,
            routed=self._routed,
        )

    def seen(self, now: float) -> list[LinkEstimate]:
        """Return what is known of each link."""
        picture = self.picture(now)
        found = []
        for link, error in zip(picture.network.links, picture.errors, strict=True):
            state = self._states.get((link.source, link.target))
            rate = None if state is None else state.rate(now)
            found.append(
                LinkEstimate(
                    source=link.source,
                    target=link.target,
                    rate=link.rate,
                    error=error,
                    latency=link.latency,
                    age=math.inf if rate is None else rate.readings.age(now),
                    censored=rate is not None and link.rate > 1.001 * rate.value,
                )
            )
        return found

    # ------------------------------------------------------------------------------------------------ inside

    def _take_link(self, pair: tuple[int, int], one: LinkMeasure, now: float) -> None:
        if pair not in self._pairs or not _possible(one):
            self.refused += 1
            return
        state = self._states.get(pair)
        if state is None:
            state = self._states[pair] = LinkReports()
        self._stale.add(pair)
        if one.rate:
            self._take_rate(pair, state, one, now)
        if one.latency >= 0.0:
            state.took(one.latency)
        if one.trip:
            state.trip = one.trip
        if one.signal < math.inf:
            way = (one.source, pair[0] if one.source == pair[1] else pair[1])
            self._states.setdefault(way, LinkReports()).signal = one.signal
            self._stale.add(way)
        if self._routes is not None:
            latency = self._shortest(pair)
            for way in (pair, pair[::-1]) if latency > 0.0 else ():
                self._routes.take(way, latency, now)

    def _take_rate(self, pair: tuple[int, int], state: LinkReports, one: LinkMeasure, now: float) -> None:
        by_source = pair[0] != one.source
        end = state.source if by_source else state.target
        rate = min(one.rate, self._caps.most(pair))
        if self._caps.limit(pair, now):
            state.carried(end, rate, one.error, now)
            return
        line = (0, pair[0]) if by_source else (1, pair[1])
        alone = one.shared <= _SHARED or self._caps.tells(line, now)
        readings = end.free if alone else end.held
        taken = readings.add(rate, one.error, now, jumped=one.jumped)
        if taken and one.delivered and by_source:
            state.delivered_at = now
        if readings.changed_at == now:
            self.changes.append(now)

    def _were_in_company(self, end: int, rank: int) -> None:
        """What the links at a line have carried was not all that they can: others shared it."""
        for pair, state in self._states.items():
            if pair[end] == rank:
                state.was_in_company()
                self._stale.add(pair)

    def _shortest(self, pair: tuple[int, int]) -> float:
        """Return the seconds one way that something took at least; 0: not known.

        By the kernel, or else by what is small, and by what both ends say: one of them does not know how far
        its clock is off. Clocks that are put right in between still make that wrong.
        """
        states = [self._states.get(way) for way in (pair, pair[::-1])]
        trips = [state.trip for state in states if state is not None and state.trip]
        if trips:
            return min(trips) / 2
        signals = sum(math.inf if state is None else state.signal for state in states)
        return max(0.0, signals / 2) if signals < math.inf else 0.0

    def _find_routes(self, now: float) -> None:
        """Find out which pairs are no links. What links carried in their company is not what they carry, so
        that is forgotten.
        """
        if self._routes is None:
            return
        anew = self._routes.look(((pair, found.value) for pair, found in self._rates.items()), now)
        if anew:
            for pair in self._rates.keys() - self._routes.found:
                self._states[pair].forget()
                del self._rates[pair]
            self._caps.forget(now)
        if self._routes.found != self._routed:
            self._routed = self._routes.found
            self._view = None  # all links are worked out anew

    def _links(self) -> Rates:
        """Return what is known of the pairs that are links."""
        if not self._routed:
            return self._rates
        return {pair: found for pair, found in self._rates.items() if pair not in self._routed}

    def _link(
        self, pair: tuple[int, int], view: LinkContext, now: float
    ) -> tuple[float, float, float, Readings | None]:
        """Return the rate and latency to plan a link with, and the error: the least, and that of readings."""
        link = self._prior.link(Rank(pair[0]), Rank(pair[1]))
        found, latency = self._rates.get(pair), self._latency(pair, view.far)
        if found is None:
            rate = link.rate if view.seldom is None or self._known else view.seldom
            least, readings = _PRIOR_ERROR, None
        else:
            rate, least, readings = view.uncapped(pair, found), 0.0, found.readings
            part = view.outdated(now - readings.age(now))
            if part and view.seldom is not None:
                rate, least = rate + part * (view.seldom - rate), part * _PRIOR_ERROR
        back = as_the_way_back(found, self._rates.get(pair[::-1]), now)
        if back is not None and not any(rank in side.caps for rank in pair for side in view.sides):
            rate, least, readings = back.value, _ALIKE_ERROR, back.readings
        return rate, latency, least, readings

    def _unseen(self) -> tuple[float | None, float | None]:
        """Return the rate and the latency of links that nobody has seen; None: not known either.

        What has moved by little stays: or every report would change all of these links.
        """
        values = [found.value for found in self._links().values()]
        latencies = [
            state.latency
            for pair, state in self._states.items()
            if state.latency >= 0.0 and pair not in self._routed
        ]
        now, before = (percentile(values, 0.25), percentile(latencies, 0.75)), self._view
        if before is None:
            return now
        return steady(now[0], before.seldom), steady(now[1], before.far)

    def _latency(self, pair: tuple[int, int], far: float | None) -> float:
        shortest = self._shortest(pair)
        if shortest > 0.0:
            return shortest
        for way in (pair, pair[::-1]):  # there and back are alike
            state = self._states.get(way)
            if state is not None and state.latency >= 0.0:
                return state.latency
        return self._prior.link(*map(Rank, pair)).latency if self._known or far is None else far


def _possible(one: LinkMeasure) -> bool:
    """Return whether a link can be like that (NaN is nowhere within bounds)."""
    return (
        (one.rate == 0.0 or RATES.allow(one.rate))
        and 0.0 <= one.error < math.inf
        and (one.latency == -1.0 or LATENCY.allow(one.latency))
        and one.chunks >= 0
        and 0.0 <= one.shared <= 1.0
        and (one.signal == math.inf or abs(one.signal) <= _MOST_SIGNAL_S)
        and (one.trip == 0.0 or LATENCY.allow(one.trip))
    )
