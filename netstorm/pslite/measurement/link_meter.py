"""What a node's own traffic says of its links: collected here, and reported to the scheduler. Pure.

A node measures the links into it by what arrives, and the links out of it by what its kernel has delivered
(`progress`), or where that says nothing by what is acknowledged: the acknowledgement's own time stamp is that
of the arrival, so that its way back does not matter. Only it can tell in which of these times its other links
were busy, too, so for links out of it a measurement at its end and one at the other end are both needed: both
are lower bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import LinkMeasure, Measured
from netstorm.pslite.measurement.access_line import AccessLineDetector, Verdict, slices
from netstorm.pslite.measurement.bbr_restart import BbrRestart
from netstorm.pslite.measurement.busy_periods import BusyLink, RunningMinimum
from netstorm.pslite.measurement.estimators import Estimate, History, PaperEstimator
from netstorm.pslite.measurement.round_trips import RoundTrips
from netstorm.pslite.measurement.tcp_progress import Progress, Watch
from netstorm.pslite.measurement.throughput import ThroughputSampler

__all__ = ["LinkMeter", "MeterOptions"]

_LONGEST_WAIT_S: Final = 2.0
"""How long a stretch waits at most for those of other links that began before its end, to be known."""

_SHARE: Final = 1 / 1000
"""Reports may take this much of the bytes that they are about. Two nodes report the same bytes, and a second
report may follow when they have judged the last of them: .4 %."""

_PAUSE_S: Final = 1.0
"""If nothing arrives for so long, nothing is under way."""

_JUDGE_S: Final = 0.25
"""How often traffic is judged: a link that has changed is reported at once."""

_LINK_BYTES: Final = 48
_REPORT_BYTES: Final = 80
_CARRIED_BYTES: Final = 13
"""Of a `LinkMeasure`, of a `Measured` without any, and of a `LinkThroughput`, encoded, with the headers of
ZeroMQ and TCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterOptions:
    """What counts as a measurement."""

    estimator: Literal["tcp", "busy", "paper"] = "tcp"
    chunk_bytes: int = 65_536
    """Smaller chunks measure nothing."""
    chunks: int = 4
    """How many make an estimate."""
    interval_s: float = 1.0
    """Between two reports, at least."""


class _Link:
    """One link at one of its ends."""

    __slots__ = (
        "busy",
        "estimate",
        "fresh_start",
        "history",
        "jumped",
        "longest_s",
        "news",
        "shift",
        "watch",
    )

    def __init__(self) -> None:
        self.busy: Final = BusyLink()
        self.watch: Final = Watch()
        self.fresh_start: Final = BbrRestart()
        self.history: Final = History()
        self.estimate: Estimate | None = None
        self.news = False
        """The estimate has not been reported."""
        self.jumped = False
        """And is another one than before."""
        self.longest_s = 0.0
        """Of late, its longest stretch."""
        self.shift = 0.0
        """What is subtracted from its times, so that those of several links can be compared."""

    @property
    def known(self) -> float:
        """What its sender's kernel says that it carries, in bit/s; 0: nothing."""
        return self.estimate.rate if self.estimate is not None and self.estimate.delivered else 0.0


class _Side:
    """All links into a node, or all out of it."""

    def __init__(self, at_least: int) -> None:
        """Estimate from at least so many chunks."""
        self._at_least: Final = at_least
        self.links: Final[dict[Peer, _Link]] = {}
        self._access: Final = AccessLineDetector()
        self._judged = self._newest = -math.inf
        self._newest_at = self._looked_at = 0.0
        """When that was first seen, and when last looked for, on the local clock."""
        self.cap = 0.0
        """Bit/s; 0: not known; infinite: the links are independent."""
        self.independent = False

    def link(self, peer: Peer) -> _Link:
        """Return what is known of the link of a peer."""
        found = self.links.get(peer)
        if found is None:
            found = self.links[peer] = _Link()
        return found

    def judge(self, now: float) -> None:
        """Work out what was shared, and estimate."""
        horizon = self._horizon(now)
        for part in slices(
            {
                peer: [
                    (max(one.start - link.shift, self._judged), min(one.end - link.shift, horizon), one)
                    for one in link.busy.stretches
                ]
                for peer, link in self.links.items()
            }
        ):
            self._access.take(part)
            if len(part.busy) > 1:
                for stretch in part.busy.values():
                    stretch.shared_s += part.end - part.start
        self._judged = max(self._judged, min(horizon, self._newest))
        verdict, cap = self._access.verdict()
        self.independent = verdict is Verdict.INDEPENDENT
        self.cap = math.inf if self.independent else cap
        for link in self.links.values():
            self._estimate(link, horizon + link.shift)

    def deliver(self, told: Mapping[Peer, Progress], now: float) -> list[Peer]:
        """Take how far the connections of the links have come; `now` on the local clock.

        Returns:
            Whose connections should find out anew what their links carry.
        """
        delivered = {}
        for peer, link in self.links.items():
            if peer not in told:
                link.watch.forget()
                continue
            done = link.watch.look(told[peer], now)
            if done is not None:
                delivered[peer] = done
        for peer, done in delivered.items():
            others = (one.watch.busy for other, one in self.links.items() if other != peer)
            link, took = self.links[peer], done.end - done.start
            if link.history.deliver(done, link.shift, max(others, default=0.0) * took):
                self._estimated(link)
        return [
            peer
            for peer, link in self.links.items()
            if peer in told and link.fresh_start.due(told[peer].bandwidth, link.known, now)
        ]

    def waits(self) -> bool:
        """Return whether some connection has something to send."""
        return any(link.watch.waits for link in self.links.values())

    def jumped(self) -> bool:
        """Return whether some link has changed, and nobody was told yet."""
        return any(link.jumped for link in self.links.values())

    def take_news(self) -> list[Peer]:
        """Return whose estimates have not been reported; they will have been."""
        found = [peer for peer, link in self.links.items() if link.news]
        for peer in found:
            self.links[peer].news = False
        return found

    def _horizon(self, now: float) -> float:
        """Return the time until which it is known what was busy: a chunk is known of when it has arrived."""
        newest = max((one.busy.arrived - one.shift for one in self.links.values()), default=-math.inf)
        if newest != self._newest:
            self._newest, self._newest_at = newest, now
        elif now >= self._newest_at + _PAUSE_S:
            return math.inf
        longest, faded = 0.0, 0.5 ** min(now - self._looked_at, 10.0)
        self._looked_at = now
        for link in self.links.values():
            link.longest_s = max([faded * link.longest_s, *(one.duration for one in link.busy.stretches)])
            longest = max(longest, link.longest_s)
        return newest - min(longest, _LONGEST_WAIT_S)

    def _estimate(self, link: _Link, horizon: float) -> None:
        done = link.busy.take_until(horizon)
        if done and link.history.extend(done):
            self._estimated(link)

    def _estimated(self, link: _Link) -> None:
        estimate = link.history.estimate(self._at_least, independent=self.independent)
        if estimate is None:
            return
        link.jumped = link.jumped or link.history.jumped
        link.estimate = estimate
        link.news = True
        link.busy.rate = estimate.rate


class _RoundTrip:
    """The way between this node and a peer, there and back: the sum does not depend on their clocks."""

    __slots__ = ("_back", "_bits", "_there")

    def __init__(self) -> None:
        self._there: Final = RunningMinimum()
        """Of a chunk, with its transfer."""
        self._bits = 0.0
        """Of the chunk that was the fastest."""
        self._back: Final = RunningMinimum()

    def acknowledged(self, bits: float, sent: float, stamped: float, heard: float) -> None:
        """Take note of an acknowledgement; times in s, `stamped` on a clock of its own."""
        self._back.offer(heard - stamped, heard)
        self._there.offer(stamped - sent, heard)
        if self._there.value == stamped - sent:
            self._bits = bits

    def there_s(self, rate: float) -> float:
        """Return the latency, plus the receiver's clock less this one's; `rate` of the link, 0: not known."""
        return self._there.value - (self._bits / rate if rate > 0 else 0.0)

    def latency_s(self, rate: float) -> float:
        """Return the latency one way, half of there and back; -1: not known."""
        total = self.there_s(rate) + self._back.value
        return max(0.0, total / 2) if rate > 0 and total < math.inf else -1.0


class LinkMeter:
    """Implements `pslite.endpoint.traffic_observer.TrafficObserver`."""

    def __init__(self, options: MeterOptions, *, now: float) -> None:
        """Know nothing yet; `now` on the local clock."""
        self._options: Final = options
        self._in: Final = _Side(options.chunks)
        self._out: Final = _Side(options.chunks)
        self._trips: Final[dict[Peer, _RoundTrip]] = {}
        self._paper: Final[dict[Peer, PaperEstimator]] = {}
        self._paper_new: Final[set[Peer]] = set()
        self._round_trips: Final = RoundTrips()
        self._carried: Final = ThroughputSampler()
        self._bytes = 0
        """Measured and not reported yet."""
        self._judged_at = self._reported_at = now
        self._rest = False
        """Some traffic has not been judged yet."""
        self.progress: Callable[[], Iterable[tuple[Peer, Progress]]] = tuple
        """Says how far connections have come by which chunks leave; by default nobody can tell."""
        self.clock_ns: Callable[[], int] = lambda: 0
        """The cluster clock."""
        self.start_anew: Callable[[Peer], object] = lambda _: None
        """Has such a connection find out anew what its link carries."""

    # ------------------------------------------------------------------------------------ TrafficObserver

    @property
    def may_crowd(self) -> bool:
        """See `TrafficObserver`."""
        return not self._out.independent

    def arrived(
        self, peer: Peer, size: int, sent_at: int, arrived_at: int, *, resent: bool, crowded: bool
    ) -> None:
        """See `TrafficObserver`."""
        if peer < 0:
            return
        self._bytes += size
        busy = self._in.link(peer).busy
        if resent or size < self._options.chunk_bytes:
            busy.other(arrived_at * 1e-9)
            return
        busy.chunk(size * 8.0, sent_at * 1e-9, arrived_at * 1e-9, crowded=crowded)
        if self._options.estimator == "paper":
            paper = self._paper.get(peer)
            if paper is None:
                paper = self._paper[peer] = PaperEstimator(self._options.chunks)
            paper.chunk(size * 8.0, sent_at * 1e-9, arrived_at * 1e-9)
            self._paper_new.add(peer)

    def signalled(self, peer: Peer, sent_at: int, arrived_at: int) -> None:
        """See `TrafficObserver`."""
        if peer >= 0:
            self._in.link(peer).busy.signal(sent_at * 1e-9, arrived_at * 1e-9)

    def acknowledged(
        self, peer: Peer, size: int, sent: float, heard: float, stamped_at: int, *, resent: bool
    ) -> None:
        """See `TrafficObserver`."""
        if peer < 0:
            return
        self._bytes += size
        link = self._out.link(peer)
        stamped = stamped_at * 1e-9
        if resent or size < self._options.chunk_bytes:
            link.busy.other(stamped)
            return
        link.busy.chunk(size * 8.0, sent, stamped)
        trip = self._trips.get(peer)
        if trip is None:
            trip = self._trips[peer] = _RoundTrip()
        trip.acknowledged(size * 8.0, sent, stamped, heard)

    # ------------------------------------------------------------------------------------------- reporting

    def due(self) -> float:
        """Return when `report` has something to say; it may be past."""
        if not (self._bytes or self._rest or self._out.waits()):
            return math.inf
        return min(self._judged_at + _JUDGE_S, self._reported_at + self._options.interval_s)

    def report(self, now: float) -> Measured | None:
        """Return what is new since the last report, or None; `now` on the local clock."""
        self._judged_at = now
        for peer, link in self._out.links.items():
            if peer in self._trips:
                link.shift = self._trips[peer].there_s(link.busy.rate)
        if self._options.estimator == "tcp":
            known = [(peer, one) for peer, one in self.progress() if peer >= 0]
            for peer, one in known:
                self._round_trips.take(peer, one.shortest_s)
            told = {peer: one for peer, one in known if peer in self._trips}
            self._carried.look(told, self.clock_ns() * 1e-9)
            for peer in self._out.deliver(told, now):
                self.start_anew(peer)
        for side in (self._out, self._in):
            side.judge(now)
        links = len(self._in.links) + len(self._out.links)
        if not (self._out.jumped() or self._in.jumped() or self._round_trips.news):
            if now < self._reported_at + self._options.interval_s:
                return None
            size = _REPORT_BYTES + links * _LINK_BYTES + len(self._carried) * _CARRIED_BYTES
            if self._bytes * _SHARE < size and not self._rest:
                self._reported_at = now
                return None
        self._reported_at = now
        self._rest = self._bytes > 0  # what came last will be judged next time
        self._bytes = 0
        if self._options.estimator == "paper":
            into = self._paper_measures(self._paper_new)
            self._paper_new.clear()
            return Measured(links=into) if into else None
        out = self._measures_out(self._out.take_news(), self._round_trips.tell(now))
        into = self._measures(self._in, self._in.take_news())
        for link in (*self._out.links.values(), *self._in.links.values()):
            link.jumped = False
        carried = self._carried.take()
        if not (into or out or carried):
            return None
        return Measured(links=into, egress=self._out.cap, ingress=self._in.cap, outgoing=out, carried=carried)

    def known(self) -> Measured:
        """Return all that is known, new or not."""
        if self._options.estimator == "paper":
            into = self._paper_measures(self._paper)
            return Measured(links=into)
        return Measured(
            links=self._measures(self._in, self._in.links),
            egress=self._out.cap,
            ingress=self._in.cap,
            outgoing=self._measures_out(self._out.links, self._round_trips.peers()),
        )

    def _measures(self, side: _Side, peers: Iterable[Peer]) -> tuple[LinkMeasure, ...]:
        return tuple(
            self._measure(peer, estimate, jumped=side.links[peer].jumped)
            for peer in peers
            if (estimate := side.links[peer].estimate) is not None
        )

    def _measures_out(self, peers: Iterable[Peer], trips: Iterable[Peer]) -> tuple[LinkMeasure, ...]:
        """Return what is known of links out of this node, and the round trips of others."""
        measured = self._measures(self._out, peers)
        alone = {int(peer) for peer in trips} - {one.source for one in measured}
        return (
            *(msgspec.structs.replace(one, trip=self._round_trips.of(Peer(one.source))) for one in measured),
            *(
                LinkMeasure(source=peer, rate=0.0, error=0.0, trip=self._round_trips.of(Peer(peer)))
                for peer in sorted(alone)
            ),
        )

    def _paper_measures(self, peers: Iterable[Peer]) -> tuple[LinkMeasure, ...]:
        return tuple(
            self._measure(peer, estimate)
            for peer in sorted(peers)
            if (estimate := self._paper[peer].estimate()) is not None
        )

    def _measure(self, peer: Peer, estimate: Estimate, *, jumped: bool = False) -> LinkMeasure:
        trip, out, back = self._trips.get(peer), self._out.links.get(peer), self._in.links.get(peer)
        return LinkMeasure(
            source=int(peer),
            rate=estimate.rate,
            error=estimate.error,
            latency=-1.0 if trip is None or out is None else trip.latency_s(out.busy.rate),
            chunks=estimate.chunks,
            shared=estimate.shared,
            signal=math.inf if back is None else back.busy.transit_s,
            jumped=jumped,
            delivered=estimate.delivered,
        )
