"""What is known of the network now: all nodes' reports in, an ordinary `Network` out.

Nodes measure their links, in and out, and their own access lines (`Measured`). Five things stand
between that and a network to plan for:

* *Access lines.* Links that share one are no independent links, and to plan as if they were throws away most
  of what planning gains. A node's egress or ingress counts as a cap if its links could clearly carry more
  together, by what each has shown.
* *Censored links.* What a link carried while it shared a cap that was binding is no more than a lower bound.
  A link's target is believed: it sees chunks arrive, and these say whether their source had others under way.
  Planned with is what the caps at its two ends allow, and twice that bound at most. Under fair sharing those
  that share the cap get about the same, so a link that gets clearly less than its siblings is slow by itself,
  and is not censored.
* *Links never seen.* With a network file, what that says. Without one, the 25th percentile of the rates
  that were measured, and the 75th of the latencies: to try them must not look like a bargain.
* *Links not seen since others have changed.* If half of the links that are measured now have changed since a
  link was, it probably has, too: half of what it is above that percentile is not believed any more. What was
  fast and is used no more looks fast for ever otherwise, and is tried again and again.

* *Links whose way back has changed.* A direction that was like the other one is expected to have changed with
  it, until it is measured itself: data goes up a tree first, and down seconds later.

A peer may report anything: what cannot be is refused, and counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from netstorm.protocol.messages import LinkMeasure, Measured
from netstorm.scheduler.link_reports import LinkReports, Rate, as_the_way_back, percentile
from netstorm.scheduler.readings import Readings
from netstorm.topology.elements import LATENCY, Bounds, Link
from netstorm.topology.network import Network

__all__ = ["Collector", "Picture", "Seen"]

_log = logging.getLogger(__name__)

_RATES: Final = Bounds(100.0, 1e13, "from 100bit/s to 10Tbit/s")
"""Narrower than what a file may say: a report beyond it is a mistake, and would spoil every plan."""

_SHARED: Final = 0.3
"""A link that shared the access line at one of its ends for a smaller part of the time was seen as it is."""

_CAP_BEGINS: Final = 0.85
_CAP_ENDS: Final = 0.95
"""Part of what its links could carry together up to which a node's access line counts as a cap. The two
differ, or noise would make caps come and go."""

_ABLE_MORE: Final = 2.0
"""How much more a link may be able to carry than it did in company, if nobody has seen it alone. It may be
more still: then the next policy shows it. But processors that are busy look like access lines, and a slow
link must not be planned as a fast one for that.
"""

_CAP_FOR_S: Final = 300.0
"""How long a cap that nobody sees any more is believed in: a policy may have no links share that line."""

_PRESENT_S: Final = 10.0
"""A link that was measured within that is measured at present."""

_SLOW_SIBLING: Final = 0.6
"""Links that share a cap get about the same; TCP is not fairer than that among unequal round trips."""

_ALIKE_ERROR: Final = 0.15

_MOST_SIGNAL_S: Final = 86_400.0
"""Clocks that differ by more are a mistake."""

_PRIOR_ERROR: Final = 0.3
"""Of links that nobody has measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
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
    """Seen only while an access line was the limit: the rate is what the lines allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The network as it was known at some moment."""

    network: Network
    errors: tuple[float, ...]
    """Standard errors of the rates, as fractions, by link in the order of `network.links`."""
    cap_error: float
    """The largest of those of access caps."""
    measured: frozenset[tuple[int, int]]
    """Links that somebody has measured."""


class _Line:
    """One direction of a node's access line."""

    __slots__ = ("counts", "readings")

    def __init__(self) -> None:
        self.readings: Final = Readings()
        self.counts = False


@dataclass(frozen=True, slots=True)
class _Side:
    """Access lines, all in the same direction."""

    caps: dict[int, float]
    """Those that count, by rank."""
    most: dict[int, float]
    """The fastest link at each, by rank."""

    def binds(self, rank: int, rate: float) -> bool:
        """Return whether a link of this rate may be as slow as that only because of the line of `rank`."""
        return rank in self.caps and rate >= _SLOW_SIBLING * self.most[rank]


Rates: TypeAlias = dict[tuple[int, int], Rate]


class Collector:
    """Reports of all nodes.

    Attributes:
        refused: values that cannot be.
        reports: reports so far.
    """

    def __init__(self, prior: Network, *, known: bool) -> None:
        """Begin with what is assumed.

        Args:
            prior: its links are the ones that may be used.
            known: its rates and latencies come from somebody who should know, and hold until measured.
        """
        self.refused = 0
        self.reports = 0
        self._prior = prior
        self._known: Final = known
        self._pairs: Final = frozenset(prior.pairs())
        self._states: dict[tuple[int, int], LinkReports] = {}
        self._lines: Final = {word: tuple(_Line() for _ in prior.nodes) for word in ("egress", "ingress")}
        self._avoided: frozenset[tuple[int, int]] = frozenset()

    def take(self, rank: int, report: Measured, now: float) -> None:
        """Take what a node reports."""
        self.reports += 1
        before = self.refused
        size = len(self._prior.nodes)
        for one in report.links[:size]:
            self._take_link((one.source, rank), one, now)
        for one in report.outgoing[:size]:
            self._take_link((rank, one.source), one, now)
        for word, value in (("egress", report.egress), ("ingress", report.ingress)):
            if value == 0.0:
                continue
            if _RATES.allow(value):
                self._lines[word][rank].readings.add(value, 0.0, now)
            else:
                self.refused += 1
        if self.refused > before:
            _log.debug("rank %d reports what cannot be: %r", rank, report)

    def avoid(self, links: Iterable[tuple[int, int]]) -> None:
        """Plan without these links, (source, target), and with all others, from now on."""
        self._avoided = frozenset(links)

    def assume(self, prior: Network) -> None:
        """Take other rates for those that hold until measured; the links are the same."""
        self._prior = prior

    @property
    def measured(self) -> frozenset[tuple[int, int]]:
        """The links that have been measured."""
        return frozenset(pair for pair, state in self._states.items() if state.rate(0.0) is not None)

    def assumed(self) -> Picture:
        """Return the network as it is without what was measured."""
        pairs = self._pairs - self._avoided
        links = tuple(link for link in self._prior.links if (link.source, link.target) in pairs)
        network = replace(self._prior, links=links, changes=())
        return Picture(
            network=network, errors=(0.0,) * len(links), cap_error=0.0, measured=frozenset[tuple[int, int]]()
        )

    def picture(self, now: float) -> Picture:
        """Return the network as it is known now. O(number of links)."""
        rates = {pair: found for pair, state in self._states.items() if (found := state.rate(now))}
        egress, ingress = self._side("egress", 0, rates, now), self._side("ingress", 1, rates, now)
        links, errors = [], []
        seldom, far = self._unseen(rates)
        changes = _changes(rates, now)
        for link in self._prior.links:
            pair = (link.source, link.target)
            if pair in self._avoided:
                continue
            changed, error = self._link(link, rates.get(pair), (egress, ingress), seldom, now)
            rate, error = self._outdated(
                changed.rate, error, rates.get(pair), seldom=seldom, changes=changes, now=now
            )
            back = as_the_way_back(rates.get(pair), rates.get(pair[::-1]), now)
            if back is not None and not any(rank in side.caps for rank in pair for side in (egress, ingress)):
                rate, error = back.value, max(_ALIKE_ERROR, back.readings.error(now))
            links.append(replace(changed, rate=rate, latency=self._latency(link, far)))
            errors.append(error)
        nodes = tuple(
            replace(
                node,
                egress=egress.caps.get(node.rank, node.egress),
                ingress=ingress.caps.get(node.rank, node.ingress),
            )
            for node in self._prior.nodes
        )
        caps = [line.readings.error(now) for lines in self._lines.values() for line in lines if line.counts]
        return Picture(
            network=replace(self._prior, nodes=nodes, links=tuple(links), changes=()),
            errors=tuple(errors),
            cap_error=max(caps, default=0.0),
            measured=frozenset(rates),
        )

    def seen(self, now: float) -> list[Seen]:
        """Return what is known of each link."""
        picture = self.picture(now)
        found = []
        for link, error in zip(picture.network.links, picture.errors, strict=True):
            state = self._states.get((link.source, link.target))
            rate = None if state is None else state.rate(now)
            found.append(
                Seen(
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
        if one.rate:
            end = state.target if pair[0] == one.source else state.source
            (end.free if one.shared <= _SHARED else end.held).add(one.rate, one.error, now)
        if one.latency >= 0.0:
            state.took(one.latency)
        if one.signal < math.inf:
            way = (one.source, pair[0] if one.source == pair[1] else pair[1])
            self._states.setdefault(way, LinkReports()).signal = one.signal

    def _side(self, word: str, end: int, rates: Rates, now: float) -> _Side:
        """Return the caps that count; `end`: which end of a link is at that line."""
        most: dict[int, float] = {}
        for pair, found in rates.items():
            most[pair[end]] = max(found.value, most.get(pair[end], 0.0))
        able: dict[int, list[float]] = {}
        for pair, found in rates.items():
            held = found.held[end] and found.value >= _SLOW_SIBLING * most[pair[end]]
            able.setdefault(pair[end], []).append((_ABLE_MORE if held else 1.0) * found.value)
        caps = {}
        for rank, line in enumerate(self._lines[word]):
            limit = _CAP_ENDS if line.counts else _CAP_BEGINS
            line.counts = (
                bool(line.readings)
                and line.readings.age(now) <= _CAP_FOR_S
                and len(able.get(rank, ())) > 1
                and line.readings.value < limit * sum(able[rank])
            )
            if line.counts:
                caps[rank] = line.readings.value
        return _Side(caps, most)

    def _link(
        self, link: Link, found: Rate | None, sides: tuple[_Side, _Side], seldom: float | None, now: float
    ) -> tuple[Link, float]:
        """Return a link with the rate to plan with, and that rate's error."""
        if found is None:
            if seldom is None or self._known:
                return link, _PRIOR_ERROR
            return replace(link, rate=seldom), _PRIOR_ERROR
        rate = found.value
        if any(
            side.binds(rank, rate) and shares
            for side, rank, shares in zip(sides, (link.source, link.target), found.shares, strict=True)
        ):
            caps = (sides[0].caps.get(link.source, math.inf), sides[1].caps.get(link.target, math.inf))
            rate = max(rate, min(*caps, _ABLE_MORE * rate))
        return replace(link, rate=rate, loss=0.0), found.readings.error(now)

    def _outdated(
        self,
        rate: float,
        error: float,
        found: Rate | None,
        *,
        seldom: float | None,
        changes: list[float],
        now: float,
    ) -> tuple[float, float]:
        """Return the rate and error of a link that has probably changed since it was last measured, too."""
        if found is None or seldom is None or not changes:
            return rate, error
        read_at = now - found.readings.age(now)
        part = sum(changed_at > read_at for changed_at in changes) / len(changes)
        return rate + part * min(seldom - rate, 0.0), max(error, part * _PRIOR_ERROR)

    def _unseen(self, rates: Rates) -> tuple[float | None, float | None]:
        """Return the rate and the latency of links that nobody has seen; None: not known either."""
        values = [found.value for found in rates.values()]
        latencies = [state.latency for state in self._states.values() if state.latency >= 0.0]
        return percentile(values, 0.25), percentile(latencies, 0.75)

    def _latency(self, link: Link, far: float | None) -> float:
        states = [self._states.get(pair) for pair in ((link.source, link.target), (link.target, link.source))]
        signals = sum(math.inf if state is None else state.signal for state in states)
        if signals < math.inf:
            return max(0.0, signals / 2)
        for state in states:  # there and back are alike
            if state is not None and state.latency >= 0.0:
                return state.latency
        return link.latency if self._known or far is None else far


def _possible(one: LinkMeasure) -> bool:
    """Return whether a link can be like that (NaN is nowhere within bounds)."""
    return (
        (one.rate == 0.0 or _RATES.allow(one.rate))
        and 0.0 <= one.error < math.inf
        and (one.latency == -1.0 or LATENCY.allow(one.latency))
        and one.chunks >= 0
        and 0.0 <= one.shared <= 1.0
        and (one.signal == math.inf or abs(one.signal) <= _MOST_SIGNAL_S)
    )


def _changes(rates: Rates, now: float) -> list[float]:
    """Return when each link that is measured at present has last changed."""
    return [one.readings.changed_at for one in rates.values() if one.readings.age(now) <= _PRESENT_S]
