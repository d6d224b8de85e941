"""What the links out of a node have carried in each half second of the cluster clock, by its kernel. Pure.

All nodes cut time alike, so that the scheduler can put together what was carried on all links at one
time (`netstorm.scheduler.awareness.access_lines`). What a kernel says to be delivered arrived half a round
trip before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import CARRIED_S, LinkThroughput, ThroughputReport
from netstorm.pslite.measurement.tcp_progress import Progress

__all__ = ["ThroughputSampler"]

_BUSY: Final = 0.9
"""Part of a half second in which a connection must have had something under way to have been eager."""

_LONGEST_S: Final = 1.0
"""Between two looks; what was between others is not known well enough."""

_KEPT: Final = 8
"""Half seconds that wait to be told; what is older is of no use any more."""


class _Look(NamedTuple):
    """How far a connection had come at some time."""

    at: float
    """When it arrived, in s of the cluster clock."""
    bits: float
    busy_s: float
    waits: bool

    def until(self, later: _Look, at: float) -> _Look:
        """Return how far it had come at a time between this look and a later one."""
        part = (at - self.at) / (later.at - self.at)
        return _Look(
            at,
            self.bits + part * (later.bits - self.bits),
            self.busy_s + part * (later.busy_s - self.busy_s),
            self.waits and later.waits,
        )


class _Link:
    """One connection."""

    __slots__ = ("_began", "_eager", "_last")

    def __init__(self) -> None:
        self._last: _Look | None = None
        self._began: _Look | None = None
        """Where the present half second began; None: before it was looked at."""
        self._eager = False
        """There has been more to send since, as far as looks tell."""

    def look(self, now: _Look) -> Iterator[tuple[int, float, bool]]:
        """Yield the half seconds that have passed: number, bit/s, whether there was more to send."""
        last, self._last = self._last, now
        if (
            last is None
            or not 0.0 < now.at - last.at <= _LONGEST_S  # nobody looked, or a clock was put right
            or now.bits < last.bits  # another connection
            or now.busy_s < last.busy_s
        ):
            self._began = None
            return
        number = math.floor(last.at / CARRIED_S) + 1
        self._eager = self._eager and last.waits
        while number * CARRIED_S <= now.at:
            edge = last.until(now, number * CARRIED_S)
            if self._began is not None:
                busy = edge.busy_s - self._began.busy_s >= _BUSY * CARRIED_S
                rate = (edge.bits - self._began.bits) / CARRIED_S
                yield number - 1, rate, self._eager and edge.waits and busy
            self._began, self._eager = edge, edge.waits
            number += 1
        self._eager = self._eager and now.waits


class ThroughputSampler:
    """All links out of a node."""

    def __init__(self) -> None:
        self._links: dict[Peer, _Link] = {}
        self._open: Final[dict[int, list[LinkThroughput]]] = {}
        self._over: Final[deque[ThroughputReport]] = deque(maxlen=_KEPT)

    def look(self, told: Mapping[Peer, Progress], now: float) -> None:
        """Take how far all connections have come; `now` in s of the cluster clock."""
        self._links = {peer: self._links.get(peer) or _Link() for peer in told}
        for peer, one in told.items():
            arrived = now - one.shortest_s / 2
            look = _Look(arrived, 8.0 * one.delivered * one.segment, one.busy_s, one.waiting > 0)
            for number, rate, eager in self._links[peer].look(look):
                if rate > 0.0:
                    self._open.setdefault(number, []).append(LinkThroughput(int(peer), rate, eager))
        known = now - max((one.shortest_s for one in told.values()), default=0.0) / 2
        for number in sorted(self._open):
            if (number + 1) * CARRIED_S <= known:
                self._over.append(ThroughputReport(number, tuple(self._open.pop(number))))

    def __len__(self) -> int:
        """Return how many links and half seconds wait to be told."""
        return sum(1 + len(one.links) for one in self._over)

    def take(self) -> tuple[ThroughputReport, ...]:
        """Return what was carried in half seconds that are over and were not told yet; it will have been."""
        told = tuple(self._over)
        self._over.clear()
        return told
