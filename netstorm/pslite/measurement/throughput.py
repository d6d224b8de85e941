"""What each link out of a node delivered in each half second of the cluster clock, by its kernel. Pure.

All nodes cut time alike, so the scheduler can add up what was delivered on all links at one time
(`netstorm.scheduler.awareness.access_lines`). What the kernel counts as delivered arrived half a round trip
earlier.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import THROUGHPUT_PERIOD_S, LinkThroughput, ThroughputReport
from netstorm.pslite.measurement.tcp_progress import Progress

__all__ = ["ThroughputSampler"]

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


class _Connection:
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
        self._connections: dict[Peer, _Connection] = {}
        self._open: Final[dict[int, list[LinkThroughput]]] = {}
        self._reports: Final[deque[ThroughputReport]] = deque(maxlen=_MOST_REPORTS)

    def sample(self, progress: Mapping[Peer, Progress], now: float) -> None:
        """Record how much all connections have delivered; `now` in s on the cluster clock."""
        self._connections = {peer: self._connections.get(peer) or _Connection() for peer in progress}
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
