"""Passive measurement of a node's links: what is recorded of its traffic, and when it is reported. Pure.

A node measures the links into it by the chunks that arrive. It measures the links out of it by what its
kernel has delivered (`progress`) or, where the kernel says nothing, by acknowledgements: their time stamp is
that of the arrival, so the way back does not matter. Only the node itself knows when its other links were
busy, too. So a link is measured at both ends, and both measurements are lower bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import LinkMeasure, Measured
from netstorm.pslite.measurement.estimate import Estimate
from netstorm.pslite.measurement.latency import LatencyEstimator
from netstorm.pslite.measurement.link_direction import LinkDirection
from netstorm.pslite.measurement.paper_estimator import PaperEstimator
from netstorm.pslite.measurement.round_trips import RoundTrips
from netstorm.pslite.measurement.tcp_progress import Progress
from netstorm.pslite.measurement.throughput import ThroughputSampler

__all__ = ["LinkMeter", "MeterOptions"]

_REPORT_SHARE: Final = 1 / 1000
"""Reports may take this part of the bytes that they are about. Two nodes report the same bytes, and a second
report may follow when the last of them have been judged, so all reports together take at most 0.4 %."""

_JUDGE_S: Final = 0.25
"""How often traffic is judged: a link that has changed is reported at once."""

_LINK_BYTES: Final = 48
_REPORT_BYTES: Final = 80
_THROUGHPUT_BYTES: Final = 13
"""Encoded size of a `LinkMeasure`, of an empty `Measured` and of a `LinkThroughput`, with the headers of
ZeroMQ and TCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterOptions:
    """What counts as a measurement.

    docs/measurements/estimators.md, "Errors of the estimators", compares the estimators.
    """

    estimator: Literal["tcp", "busy", "paper"] = "tcp"
    """`tcp`: what the sender's kernel has delivered, else busy periods; `busy`: busy periods alone; `paper`:
    the paper's mean."""
    chunk_bytes: int = 65_536
    """Smaller chunks measure nothing (the paper's PROBE_CHUNK_SIZE)."""
    chunks: int = 4
    """Least number of chunks of an estimate (the paper's PROBE_CHUNK_NUM)."""
    interval_s: float = 1.0
    """Least time between two reports."""


class LinkMeter:
    """Measures a node's links. Implements `pslite.endpoint.traffic_observer.TrafficObserver`.

    Attributes:
        progress: returns how much the connections that chunks leave by have delivered; by default nothing is
            known.
        clock_ns: returns the cluster clock.
        restart_bbr: restarts BBR on the connection to a peer.
    """

    def __init__(self, options: MeterOptions, *, now: float) -> None:
        """Begin without measurements; `now` on the local clock."""
        self._options: Final = options
        self._in: Final = LinkDirection(options.chunks)
        self._out: Final = LinkDirection(options.chunks)
        self._latencies: Final[dict[Peer, LatencyEstimator]] = {}
        self._paper: Final[dict[Peer, PaperEstimator]] = {}
        self._paper_new: Final[set[Peer]] = set()
        self._round_trips: Final = RoundTrips()
        self._throughput: Final = ThroughputSampler()
        self._bytes = 0
        """Measured and not reported yet."""
        self._judged_at = self._reported_at = now
        self._unjudged = False
        """Some traffic has not been judged yet."""
        self.progress: Callable[[], Iterable[tuple[Peer, Progress]]] = tuple
        self.clock_ns: Callable[[], int] = lambda: 0
        self.restart_bbr: Callable[[Peer], object] = lambda _: None
        self._missed_s = 0.0
        """How far the caller's clock is behind one that counts all time: rates are those of the latter."""

    # ------------------------------------------------------------------------------------ TrafficObserver

    @property
    def may_contend(self) -> bool:
        """See `TrafficObserver`."""
        return not self._out.independent

    def resumed(self, missed_s: float) -> None:
        """See `TrafficObserver`."""
        self._missed_s += missed_s

    def arrived(
        self, peer: Peer, size: int, sent_at: int, arrived_at: int, *, resent: bool, contended: bool
    ) -> None:
        """See `TrafficObserver`."""
        if peer < 0:
            return
        self._bytes += size
        busy = self._in.link(peer).busy
        if resent or size < self._options.chunk_bytes:
            busy.add_unmeasured(arrived_at * 1e-9)
            return
        busy.add_chunk(size * 8.0, sent_at * 1e-9, arrived_at * 1e-9, contended=contended)
        if self._options.estimator == "paper":
            paper = self._paper.get(peer)
            if paper is None:
                paper = self._paper[peer] = PaperEstimator(self._options.chunks)
            paper.add_chunk(size * 8.0, sent_at * 1e-9, arrived_at * 1e-9)
            self._paper_new.add(peer)

    def control_arrived(self, peer: Peer, sent_at: int, arrived_at: int) -> None:
        """See `TrafficObserver`."""
        if peer >= 0:
            self._in.link(peer).busy.add_small_message(sent_at * 1e-9, arrived_at * 1e-9)

    def acknowledged(
        self, peer: Peer, size: int, sent: float, heard: float, stamped_at: int, *, resent: bool
    ) -> None:
        """See `TrafficObserver`."""
        if peer < 0:
            return
        self._bytes += size
        sent, heard = sent + self._missed_s, heard + self._missed_s
        link = self._out.link(peer)
        stamped = stamped_at * 1e-9
        if resent or size < self._options.chunk_bytes:
            link.busy.add_unmeasured(stamped)
            return
        link.busy.add_chunk(size * 8.0, sent, stamped)
        latency = self._latencies.get(peer)
        if latency is None:
            latency = self._latencies[peer] = LatencyEstimator()
        latency.acknowledged(size * 8.0, sent, stamped, heard)

    # ------------------------------------------------------------------------------------------- reporting

    def due(self) -> float:
        """Return when `report` should be called, on the local clock; it may be past."""
        if not (self._bytes or self._unjudged or self._out.has_backlog()):
            return math.inf
        return min(self._judged_at + _JUDGE_S, self._reported_at + self._options.interval_s) - self._missed_s

    def report(self, now: float) -> Measured | None:
        """Judge the traffic, and return a report if one is due and worth its bytes; `now` on the local
        clock.
        """
        now += self._missed_s
        self._judge(now)
        if not self._report_is_worth_it(now):
            return None
        self._reported_at = now
        self._unjudged = self._bytes > 0  # the next report judges what came last
        self._bytes = 0
        if self._options.estimator == "paper":
            into = self._paper_measures(self._paper_new)
            self._paper_new.clear()
            return Measured(links=into) if into else None
        out = self._outgoing_measures(self._out.take_news(), self._round_trips.take_changes(now))
        into = self._measures(self._in, self._in.take_news())
        for link in (*self._out.links.values(), *self._in.links.values()):
            link.jumped = False
        throughput = self._throughput.take_reports()
        if not (into or out or throughput):
            return None
        return Measured(
            links=into, egress=self._out.cap, ingress=self._in.cap, outgoing=out, throughput=throughput
        )

    def known(self) -> Measured:
        """Return all current estimates, reported or not."""
        if self._options.estimator == "paper":
            into = self._paper_measures(self._paper)
            return Measured(links=into)
        return Measured(
            links=self._measures(self._in, self._in.links),
            egress=self._out.cap,
            ingress=self._in.cap,
            outgoing=self._outgoing_measures(self._out.links, self._round_trips.peers()),
        )

    def _judge(self, now: float) -> None:
        self._judged_at = now
        for peer, link in self._out.links.items():
            if peer in self._latencies:
                link.shift = self._latencies[peer].there_s(link.busy.rate)
        if self._options.estimator == "tcp":
            found = [(peer, progress) for peer, progress in self.progress() if peer >= 0]
            for peer, progress in found:
                self._round_trips.record(peer, progress.min_rtt_s)
            in_use = {peer: progress for peer, progress in found if peer in self._latencies}
            self._throughput.sample(in_use, self.clock_ns() * 1e-9)
            for peer in self._out.add_progress(in_use, now):
                self.restart_bbr(peer)
        for direction in (self._out, self._in):
            direction.judge(now)

    def _report_is_worth_it(self, now: float) -> bool:
        if self._out.jumped() or self._in.jumped() or self._round_trips.changed:
            return True
        if now < self._reported_at + self._options.interval_s:
            return False
        links = len(self._in.links) + len(self._out.links)
        size = _REPORT_BYTES + links * _LINK_BYTES + len(self._throughput) * _THROUGHPUT_BYTES
        if self._bytes * _REPORT_SHARE < size and not self._unjudged:
            self._reported_at = now
            return False
        return True

    def _measures(self, direction: LinkDirection, peers: Iterable[Peer]) -> tuple[LinkMeasure, ...]:
        return tuple(
            self._measure(peer, estimate, jumped=direction.links[peer].jumped)
            for peer in peers
            if (estimate := direction.links[peer].estimate) is not None
        )

    def _outgoing_measures(
        self, peers: Iterable[Peer], round_trips: Iterable[Peer]
    ) -> tuple[LinkMeasure, ...]:
        """Return the estimates of links out of this node, and the round trips of other peers."""
        measured = self._measures(self._out, peers)
        without_rate = {int(peer) for peer in round_trips} - {measure.source for measure in measured}
        return (
            *(
                msgspec.structs.replace(measure, trip=self._round_trips.of(Peer(measure.source)))
                for measure in measured
            ),
            *(
                LinkMeasure(source=peer, rate=0.0, error=0.0, trip=self._round_trips.of(Peer(peer)))
                for peer in sorted(without_rate)
            ),
        )

    def _paper_measures(self, peers: Iterable[Peer]) -> tuple[LinkMeasure, ...]:
        return tuple(
            self._measure(peer, estimate)
            for peer in sorted(peers)
            if (estimate := self._paper[peer].estimate()) is not None
        )

    def _measure(self, peer: Peer, estimate: Estimate, *, jumped: bool = False) -> LinkMeasure:
        latency, out, back = self._latencies.get(peer), self._out.links.get(peer), self._in.links.get(peer)
        return LinkMeasure(
            source=int(peer),
            rate=estimate.rate,
            error=estimate.error,
            latency=-1.0 if latency is None or out is None else latency.latency_s(out.busy.rate),
            chunks=estimate.chunks,
            shared=estimate.shared,
            signal=math.inf if back is None else back.busy.transit_s,
            jumped=jumped,
            delivered=estimate.delivered,
        )
