"""Passive measurement of a node's links: what is recorded of its traffic, and when it is reported. Pure.

A node measures the links into it by the chunks that arrive. It measures the links out of it by what its
kernel has delivered (`progress`) or, where the kernel says nothing, by acknowledgements: their time stamp is
that of the arrival, so the way back does not matter. Only the node itself knows when its other links were
busy, too. So a link is measured at both ends, and both measurements are lower bounds.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import msgspec

from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import (
    THROUGHPUT_PERIOD_S,
    LinkMeasure,
    LinkThroughput,
    Measured,
    ThroughputReport,
)
from netstorm.pslite.rates import (
    BbrRestart,
    BusyLink,
    BusyPeriod,
    DeliveryMonitor,
    Estimate,
    LatencyEstimator,
    PaperEstimator,
    RateEstimator,
    TcpProgress,
)

__all__ = [
    "AccessLineDetector",
    "Contention",
    "LinkMeter",
    "MeasuredLink",
    "MeterOptions",
    "RoundTrips",
    "Slice",
    "ThroughputSampler",
    "slices",
]


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
    """Measures a node's links. An endpoint tells it what arrives and what is acknowledged; times in ns are
    on the cluster clock.

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
        self.progress: Callable[[], Iterable[tuple[Peer, TcpProgress]]] = tuple
        self.clock_ns: Callable[[], int] = lambda: 0
        self.restart_bbr: Callable[[Peer], object] = lambda _: None
        self._missed_s = 0.0
        """How far the caller's clock is behind one that counts all time: rates are those of the latter."""

    # ----------------------------------------------------------------------------------- told by an endpoint

    @property
    def may_contend(self) -> bool:
        """Whether links out of this node may slow one another."""
        return not self._out.independent

    def resumed(self, missed_s: float) -> None:
        """Learn that this process did not run for a while, which its local clock does not count."""
        self._missed_s += missed_s

    def arrived(
        self, peer: Peer, size: int, sent_at: int, arrived_at: int, *, resent: bool, contended: bool
    ) -> None:
        """Record a data message.

        Args:
            peer: its sender.
            size: bytes.
            sent_at: when the sender handed it over, in ns.
            arrived_at: when it arrived, in ns.
            resent: it was sent before, and measures nothing.
            contended: other links out of its sender were busy.
        """
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
        """Record an acknowledgement or another small message of a session; times in ns."""
        if peer >= 0:
            self._in.link(peer).busy.add_small_message(sent_at * 1e-9, arrived_at * 1e-9)

    def acknowledged(
        self, peer: Peer, size: int, sent: float, heard: float, stamped_at: int, *, resent: bool
    ) -> None:
        """Record the acknowledgement of a data message.

        Args:
            peer: its receiver.
            size: bytes.
            sent: when it was handed over, in s on the local clock.
            heard: when the acknowledgement arrived, in s on the local clock.
            stamped_at: when the receiver sent the acknowledgement, in ns on the cluster clock.
            resent: it was transmitted more than once; which transmission was acknowledged is unknown.
        """
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
            delivered = [(peer, progress) for peer, progress in self.progress() if peer >= 0]
            for peer, progress in delivered:
                self._round_trips.record(peer, progress.min_rtt_s)
            in_use = {peer: progress for peer, progress in delivered if peer in self._latencies}
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


_LONGEST_WAIT_S: Final = 2.0
"""How long a busy period waits at most for those of other links that began before its end."""

_IDLE_S: Final = 1.0
"""If nothing arrives for so long, nothing is in flight."""


class MeasuredLink:
    """One link, measured at one of its ends."""

    __slots__ = (
        "bbr_restart",
        "busy",
        "delivery",
        "estimate",
        "estimator",
        "jumped",
        "longest_s",
        "news",
        "shift",
    )

    def __init__(self) -> None:
        self.busy: Final = BusyLink()
        self.delivery: Final = DeliveryMonitor()
        self.bbr_restart: Final = BbrRestart()
        self.estimator: Final = RateEstimator()
        self.estimate: Estimate | None = None
        self.news = False
        """The estimate has not been reported."""
        self.jumped = False
        """The link has changed since the last report."""
        self.longest_s = 0.0
        """Its longest recent busy period."""
        self.shift = 0.0
        """Subtracted from its times, so that several links can be compared."""

    @property
    def kernel_rate(self) -> float:
        """The link's rate according to its sender's kernel, in bit/s; 0: unknown."""
        return self.estimate.rate if self.estimate is not None and self.estimate.delivered else 0.0


class LinkDirection:
    """All links into a node, or out of it: who shared the access line when, and each link's rate."""

    def __init__(self, at_least: int) -> None:
        """Estimate rates from at least so many chunks."""
        self._at_least: Final = at_least
        self.links: Final[dict[Peer, MeasuredLink]] = {}
        self._access: Final = AccessLineDetector()
        self._judged = self._newest = -math.inf
        self._newest_at = self._checked_at = 0.0
        """When `_newest` was first seen, and when it was last looked for, on the local clock."""
        self.cap = 0.0
        """The access line's capacity in bit/s; infinite: it limits no link; below 0: nobody knows whether it
        does, and it is less the most that the links carried together; 0: unknown."""
        self.independent = False

    def link(self, peer: Peer) -> MeasuredLink:
        """Return what is measured of the link with a peer; it is made if there is none."""
        link = self.links.get(peer)
        if link is None:
            link = self.links[peer] = MeasuredLink()
        return link

    def judge(self, now: float) -> None:
        """Work out in which times links were busy together, and estimate; `now` on the local clock."""
        horizon = self._horizon(now)
        for part in slices(
            {
                peer: [
                    (
                        max(period.start - link.shift, self._judged),
                        min(period.end - link.shift, horizon),
                        period,
                    )
                    for period in link.busy.periods
                ]
                for peer, link in self.links.items()
            }
        ):
            self._access.add(part)
            if len(part.busy) > 1:
                for period in part.busy.values():
                    period.shared_s += part.end - part.start
        self._judged = max(self._judged, min(horizon, self._newest))
        contention, cap = self._access.classify()
        self.independent = contention is Contention.INDEPENDENT
        self.cap = math.inf if self.independent else cap
        for link in self.links.values():
            self._estimate(link, horizon + link.shift)

    def add_progress(self, progress: Mapping[Peer, TcpProgress], now: float) -> list[Peer]:
        """Record how much the links' connections have delivered; `now` on the local clock.

        Returns:
            The peers on whose connections BBR should be restarted.
        """
        samples = {}
        for peer, link in self.links.items():
            if peer not in progress:
                link.delivery.reset()
                continue
            sample = link.delivery.sample(progress[peer], now)
            if sample is not None:
                samples[peer] = sample
        for peer, sample in samples.items():
            others = (link.delivery.busy for other, link in self.links.items() if other != peer)
            link, took = self.links[peer], sample.end - sample.start
            if link.estimator.add_delivery(sample, link.shift, max(others, default=0.0) * took):
                self._update_estimate(link)
        return [
            peer
            for peer, link in self.links.items()
            if peer in progress and link.bbr_restart.due(progress[peer].bandwidth, link.kernel_rate, now)
        ]

    def has_backlog(self) -> bool:
        """Return whether some connection has unsent data."""
        return any(link.delivery.has_backlog for link in self.links.values())

    def jumped(self) -> bool:
        """Return whether some link has changed since the last report."""
        return any(link.jumped for link in self.links.values())

    def take_news(self) -> list[Peer]:
        """Return the peers whose estimates have not been reported, and count them as reported."""
        peers = [peer for peer, link in self.links.items() if link.news]
        for peer in peers:
            self.links[peer].news = False
        return peers

    def _horizon(self, now: float) -> float:
        """Return until when it is known which links were busy: a chunk is known only after its arrival."""
        newest = max((link.busy.arrived - link.shift for link in self.links.values()), default=-math.inf)
        if newest != self._newest:
            self._newest, self._newest_at = newest, now
        elif now >= self._newest_at + _IDLE_S:
            return math.inf
        longest, faded = 0.0, 0.5 ** min(now - self._checked_at, 10.0)
        self._checked_at = now
        for link in self.links.values():
            link.longest_s = max([faded * link.longest_s, *(period.duration for period in link.busy.periods)])
            longest = max(longest, link.longest_s)
        return newest - min(longest, _LONGEST_WAIT_S)

    def _estimate(self, link: MeasuredLink, horizon: float) -> None:
        done = link.busy.take_until(horizon)
        if done and link.estimator.add_periods(done):
            self._update_estimate(link)

    def _update_estimate(self, link: MeasuredLink) -> None:
        estimate = link.estimator.estimate(self._at_least, independent=self.independent)
        if estimate is None:
            return
        link.jumped = link.jumped or link.estimator.jumped
        link.estimate = estimate
        link.news = True
        link.busy.rate = estimate.rate


# Whether the links of a node share an access line: does their total keep to a ceiling that each of them
# alone is not bound by?
#
# The detector compares windows of time in which several links were busy. Behind a common line the total often
# reaches the same highest value, and the links carry clearly more while fewer of them are busy. That must be
# so both before and after the window: rates change, and a link that has just become slow looks like one under
# contention. Independent links carry the same under any contention.
#
# docs/measurements/awareness.md, "Access caps by chunks", says how many access lines this finds in simulated
# networks, and how exactly.

_WINDOW_S: Final = 0.2
"""Least duration of a window. It also lasts as long as its longest busy period, which has only one rate."""

_MEMORY_S: Final = 20.0
_LEAST_WINDOWS: Final = 6
_KEPT_WINDOWS: Final = 30
"""So many windows are kept for longer, where chunks take seconds."""

_LONG_MEMORY_S: Final = 60.0

_CEILING: Final = 0.9
"""The ceiling is this quantile of the windows' totals: higher ones may look fast only because a batch came
late."""

_NEAR: Final = 0.05
"""Relative distance up to which a total counts as being at the ceiling."""

_OFTEN: Final = 0.25
"""Least part of the time at the ceiling, if it is a cap."""

_CAPPED_RATIO: Final = 1.18
"""Least ratio of what the links carry under less contention to their total, if that is at a cap."""

_INDEPENDENT_RATIO: Final = 1.12
"""Largest such ratio of independent links."""

_ALONE_S: Final = 0.05
"""Least time for which a link must have been busy for its rate to count."""

_KEPT_RATES: Final = 256

_FEWER_LINKS: Final = 0.5
"""Contention is less if so many fewer links were busy on average."""

_SAMPLES: Final = 5
"""Most rates under less contention, before and after each. Of these the last but one counts, since some were
slow for other reasons."""

_COMPARED: Final = 0.3
"""Least part of a window's bits from links that were also seen under less contention."""

_ALWAYS: Final = 0.75
"""A total that was at its ceiling for a larger part of the time does not show that the links are
independent."""


class Contention(enum.Enum):
    """How the links of a node affect each other."""

    UNKNOWN = "unknown"
    CAPPED = "capped"
    INDEPENDENT = "independent"


@dataclass(frozen=True, slots=True)
class Slice:
    """A time during which the same links were busy, in s on one clock."""

    start: float
    end: float
    busy: Mapping[int, BusyPeriod]
    """By link."""


def slices(links: Mapping[int, Iterable[tuple[float, float, BusyPeriod]]]) -> Iterable[Slice]:
    """Cut the time in which any link was busy wherever a busy period begins or ends.

    Args:
        links: start, end and the busy period itself, by link; all on one clock.
    """
    events: list[tuple[float, bool, int, BusyPeriod]] = []
    for link, periods in links.items():
        for start, end, period in periods:
            if end > start:
                events.append((start, True, link, period))
                events.append((end, False, link, period))
    events.sort(key=lambda event: event[:3])  # at one moment, ends come before begins
    busy: dict[int, BusyPeriod] = {}
    last = -math.inf
    for time, begins, link, period in events:
        if busy and time > last:
            yield Slice(last, time, dict(busy))
        last = time
        if begins:
            busy[link] = period
        elif busy.get(link) is period:
            del busy[link]


class _Window:
    """Some time, and how much each link carried in it."""

    __slots__ = ("at", "bits", "busy", "duration", "longest")

    def __init__(self) -> None:
        self.at = 0.0
        self.duration = 0.0
        self.longest = 0.0
        self.busy: dict[int, float] = {}
        self.bits: dict[int, float] = {}

    def add(self, part: Slice) -> None:
        duration = part.end - part.start
        self.at = part.end
        self.duration += duration
        for link, period in part.busy.items():
            self.busy[link] = self.busy.get(link, 0.0) + duration
            self.bits[link] = self.bits.get(link, 0.0) + period.bits * duration / period.duration
            self.longest = max(self.longest, period.duration)


@dataclass(frozen=True, slots=True)
class _Rate:
    """What a link carried in a window, in bit/s."""

    at: float
    rate: float
    busy_links: float


class _Compared:
    """A window that is over, and its links' rates under less contention before and after."""

    __slots__ = ("_after", "_before", "at", "bits", "busy", "busy_links", "duration", "total", "volume")

    def __init__(self, window: _Window, rates: Mapping[int, Iterable[_Rate]]) -> None:
        """`rates`: of each link, all rates before the window's end, newest first."""
        self.at: Final = window.at
        self.duration: Final = window.duration
        self.bits: Final = window.bits
        self.busy: Final = window.busy
        self.volume: Final = sum(window.bits.values())
        self.total: Final = self.volume / self.duration
        self.busy_links: Final = sum(window.busy.values()) / window.duration
        """How many links were busy on average."""
        self._before: Final[dict[int, float]] = {}
        self._after: Final[dict[int, list[float]]] = {}
        for link in self.bits:
            near = itertools.takewhile(lambda rate: rate.at >= self.at - _MEMORY_S, rates.get(link, ()))
            less = (rate.rate for rate in near if rate.busy_links <= self.busy_links - _FEWER_LINKS)
            if rates_before := list(itertools.islice(less, _SAMPLES)):
                self._before[link] = _last_but_one(rates_before)
                self._after[link] = []

    def add_later(self, link: int, rate: _Rate) -> None:
        """Record a link's rate after this window."""
        after = self._after.get(link)
        if after is not None and len(after) < _SAMPLES and rate.busy_links <= self.busy_links - _FEWER_LINKS:
            after.append(rate.rate)

    def unshared_ratio(self) -> float | None:
        """Return what the busy links carry under less contention, relative to this window; None: unknown."""
        able, compared = 0.0, 0.0
        for link, bits in self.bits.items():
            after = self._after.get(link)
            if not after:
                able += bits
                continue
            compared += bits
            rate = min(self._before[link], _last_but_one(after))  # before and after, since rates change
            able += max(rate * self.busy[link], bits)
        return able / self.volume if compared >= _COMPARED * self.volume else None


class AccessLineDetector:
    """One direction of a node's access line."""

    def __init__(self) -> None:
        self._windows: Final[deque[_Compared]] = deque()
        self._window = _Window()
        self._rates: Final[dict[int, deque[_Rate]]] = {}
        """Of each link, newest first."""
        self._alone: Final[dict[int, _Window]] = {}

    def add(self, part: Slice) -> None:
        """Add the next slice."""
        if len(part.busy) == 1:
            (link,) = part.busy
            alone = self._alone.setdefault(link, _Window())
            alone.add(part)
            if alone.duration >= _ALONE_S:
                self._note(self._alone.pop(link), 1.0)
            return
        self._window.add(part)
        if self._window.duration >= max(_WINDOW_S, self._window.longest):
            over = _Compared(self._window, self._rates)
            self._note(self._window, over.busy_links)
            self._windows.append(over)
            self._window = _Window()
            self._forget(part.end)

    def _note(self, window: _Window, busy_links: float) -> None:
        for link, busy in window.busy.items():
            if busy < _ALONE_S:
                continue
            rate = _Rate(window.at, window.bits[link] / busy, busy_links)
            self._rates.setdefault(link, deque(maxlen=_KEPT_RATES)).appendleft(rate)
            for earlier in reversed(self._windows):
                if earlier.at < window.at - _MEMORY_S:
                    break
                earlier.add_later(link, rate)

    def _forget(self, now: float) -> None:
        windows = self._windows
        while windows:
            memory_s = _MEMORY_S if len(windows) > _KEPT_WINDOWS else _LONG_MEMORY_S
            if windows[0].at >= now - memory_s:
                break
            windows.popleft()

    def classify(self) -> tuple[Contention, float]:
        """Return how the links affect each other, and the line's cap in bit/s.

        0: it has none, or nothing is known. Below 0: it may have one, and that is less the most that the
        links carried together.
        """
        windows = self._windows
        if len(windows) < _LEAST_WINDOWS:
            return Contention.UNKNOWN, 0.0
        ceiling = _quantile([(window.total, window.duration) for window in windows], _CEILING)
        near = [window for window in windows if abs(window.total - ceiling) <= _NEAR * ceiling]
        time = sum(window.duration for window in near)
        often = time / sum(window.duration for window in windows)
        carried = sum(window.volume for window in near) / time
        more = [ratio for window in near if (ratio := window.unshared_ratio()) is not None]
        if 2 * len(more) < len(near):
            return Contention.UNKNOWN, -carried
        unshared_ratio = statistics.median(more)
        if often >= _OFTEN and unshared_ratio >= _CAPPED_RATIO:
            return Contention.CAPPED, carried
        if often <= _ALWAYS and unshared_ratio <= min(_INDEPENDENT_RATIO, 1 + _deviation(windows)):
            return Contention.INDEPENDENT, 0.0
        return Contention.UNKNOWN, -carried


def _last_but_one(rates: list[float]) -> float:
    """Return the rate that counts of some that a link had under less contention."""
    return sorted(rates)[(3 * len(rates)) // 4]


def _deviation(windows: Iterable[_Compared]) -> float:
    """Return the relative standard deviation of the windows' totals."""
    totals = [window.total for window in windows]
    mean = statistics.fmean(totals)
    # statistics.pstdev adds up fractions: 60 to 110 us here, where this takes 1 to 4, several times a second.
    return math.dist(totals, [mean] * len(totals)) / math.sqrt(len(totals)) / mean


def _quantile(rows: list[tuple[float, float]], part: float) -> float:
    """Return the value that is not exceeded for this part of the time; rows are (value, duration)."""
    rows.sort()
    left = part * sum(duration for _, duration in rows)
    for value, duration in rows:
        left -= duration
        if left <= 0:
            return value
    return rows[-1][0]


# The shortest round trips of a node's connections, by its kernel, and which of them to report.
#
# TCP takes the first one from the connection's handshake, before anything waits in a queue. All of them are
# reported again from time to time, since a report may be lost and a restarted scheduler knows nothing.

_SAME: Final = 0.02
"""Relative change up to which a round trip counts as unchanged."""

_REPEAT_S: Final = 30.0
"""How often all round trips are reported."""


class RoundTrips:
    """The round trips of one node, by peer."""

    def __init__(self) -> None:
        self._shortest: Final[dict[Peer, float]] = {}
        self._changed: Final[set[Peer]] = set()
        self._repeated_at = -math.inf

    @property
    def changed(self) -> bool:
        """Whether some round trip has changed since the last report."""
        return bool(self._changed)

    def of(self, peer: Peer) -> float:
        """Return the shortest round trip in s; 0: unknown."""
        return self._shortest.get(peer, 0.0)

    def peers(self) -> list[Peer]:
        """Return the peers whose round trip is known."""
        return list(self._shortest)

    def record(self, peer: Peer, seconds: float) -> None:
        """Record the kernel's value; 0: the kernel does not know it."""
        before = self.of(peer)
        if seconds > 0.0 and abs(seconds - before) > _SAME * before:
            self._shortest[peer] = seconds
            self._changed.add(peer)

    def take_changes(self, now: float) -> list[Peer]:
        """Return the peers to report now (s on the local clock), and count them as reported."""
        if now >= self._repeated_at + _REPEAT_S:
            self._repeated_at = now
            self._changed.update(self._shortest)
        peers = sorted(self._changed)
        self._changed.clear()
        return peers


# What each link out of a node delivered in each half second of the cluster clock, by its kernel.
#
# All nodes cut time alike, so the scheduler can add up what was delivered on all links at one time
# (`netstorm.scheduler.measured_links`). What the kernel counts as delivered arrived half a round trip
# earlier.

_BUSY: Final = 0.9
"""Part of a half second for which a backlogged connection must have had data in flight."""

_LONGEST_GAP_S: Final = 1.0
"""Longest time between two samples; what happened within a longer one is not known well enough."""

_MOST_REPORTS: Final = 8
"""Half seconds that wait to be reported; older ones are of no use."""


class _Sample(NamedTuple):
    """How much a connection had delivered at some time."""

    at: float
    """When it arrived, in s on the cluster clock."""
    bits: float
    busy_s: float
    backlogged: bool

    def until(self, later: _Sample, at: float) -> _Sample:
        """Return the sample at a time between this one and a later one, interpolated."""
        part = (at - self.at) / (later.at - self.at)
        return _Sample(
            at,
            self.bits + part * (later.bits - self.bits),
            self.busy_s + part * (later.busy_s - self.busy_s),
            self.backlogged and later.backlogged,
        )


class _MeteredConnection:
    """The samples of one connection."""

    __slots__ = ("_backlogged", "_began", "_last")

    def __init__(self) -> None:
        self._last: _Sample | None = None
        self._began: _Sample | None = None
        """The begin of the current half second; None: it was not sampled."""
        self._backlogged = False
        """There was unsent data in all samples since then."""

    def add(self, sample: _Sample) -> Iterator[tuple[int, float, bool]]:
        """Add a sample; yield the half seconds that are over: number, bit/s, whether it was backlogged."""
        last, self._last = self._last, sample
        if (
            last is None
            or not 0.0 < sample.at - last.at <= _LONGEST_GAP_S  # no samples, or a clock was set
            or sample.bits < last.bits  # another connection
            or sample.busy_s < last.busy_s
        ):
            self._began = None
            return
        number = math.floor(last.at / THROUGHPUT_PERIOD_S) + 1
        self._backlogged = self._backlogged and last.backlogged
        while number * THROUGHPUT_PERIOD_S <= sample.at:
            edge = last.until(sample, number * THROUGHPUT_PERIOD_S)
            if self._began is not None:
                busy = edge.busy_s - self._began.busy_s >= _BUSY * THROUGHPUT_PERIOD_S
                rate = (edge.bits - self._began.bits) / THROUGHPUT_PERIOD_S
                yield number - 1, rate, self._backlogged and edge.backlogged and busy
            self._began, self._backlogged = edge, edge.backlogged
            number += 1
        self._backlogged = self._backlogged and sample.backlogged


class ThroughputSampler:
    """Samples all links out of a node."""

    def __init__(self) -> None:
        self._connections: dict[Peer, _MeteredConnection] = {}
        self._open: Final[dict[int, list[LinkThroughput]]] = {}
        self._reports: Final[deque[ThroughputReport]] = deque(maxlen=_MOST_REPORTS)

    def sample(self, progress: Mapping[Peer, TcpProgress], now: float) -> None:
        """Record how much all connections have delivered; `now` in s on the cluster clock."""
        self._connections = {peer: self._connections.get(peer) or _MeteredConnection() for peer in progress}
        for peer, tcp in progress.items():
            arrived = now - tcp.min_rtt_s / 2
            sample = _Sample(arrived, 8.0 * tcp.delivered * tcp.segment, tcp.busy_s, tcp.unsent > 0)
            for number, rate, backlogged in self._connections[peer].add(sample):
                if rate > 0.0:
                    self._open.setdefault(number, []).append(LinkThroughput(int(peer), rate, backlogged))
        complete = now - max((tcp.min_rtt_s for tcp in progress.values()), default=0.0) / 2
        for number in sorted(self._open):
            if (number + 1) * THROUGHPUT_PERIOD_S <= complete:
                self._reports.append(ThroughputReport(number, tuple(self._open.pop(number))))

    def __len__(self) -> int:
        """Return how many links and half seconds wait to be reported."""
        return sum(1 + len(report.links) for report in self._reports)

    def take_reports(self) -> tuple[ThroughputReport, ...]:
        """Return the half seconds that are over and were not reported, and count them as reported."""
        reports = tuple(self._reports)
        self._reports.clear()
        return reports
