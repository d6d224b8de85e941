"""SNTP between simulated hosts: datagrams over the virtual network, and the clocks that they synchronise.

Nodes ask the scheduler, or their parent in a tree. A datagram takes as long as a message in the network.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeAlias

from netstorm.errors import FrameError
from netstorm.kvstore.membership import DriverStatus
from netstorm.pslite import sntp
from netstorm.pslite.memory_network import MemoryNetwork
from netstorm.pslite.sntp import Address, ClockSource, ClockSync
from netstorm.simulation.local_clock import LocalClock

__all__ = ["Datagrams", "SyncedClock"]

_FLOWS: Final = 1 << 40
"""Flow numbers from here on belong to datagrams. They are even, as those of data that leaves an opener."""

_BYTES: Final = sntp.PACKET_BYTES + 28
"""Bytes of a datagram, with the headers of UDP and IP."""

Answer: TypeAlias = Callable[[bytes], bytes | None]


class Datagrams:
    """SNTP requests and answers between the hosts of one cluster."""

    def __init__(self, network: MemoryNetwork, *, seed: int, loss: float = 0.0) -> None:
        """Begin without traffic.

        Args:
            network: carries the datagrams.
            seed: of the random losses.
            loss: probability that a datagram is lost.
        """
        self.timeline: Final = network.timeline
        self._network: Final = network
        self._loss: Final = loss
        self._random: Final = random.Random(f"datagrams {seed}")
        self._flows: dict[tuple[str, str], int] = {}
        self._answers: dict[str, Answer] = {}

    def serve(self, host: str, answer: Answer) -> None:
        """Answer requests to `host` with this function; if it returns None, the request stays unanswered."""
        self._answers[host] = answer

    def serve_cluster_time(self, host: str, clock: LocalClock) -> None:
        """Answer requests to `host`, the scheduler's, by `clock`, which is the cluster clock."""

        def answer(data: bytes) -> bytes:
            now = clock.cluster(self.timeline.now)
            return sntp.answer(data, received=now, transmitted=now)

        self.serve(host, answer)

    def ask(self, source: str, target: str, request: bytes, receive: Callable[[bytes], None]) -> None:
        """Send a request to a host, and call `receive` with the answer, if one arrives."""

        def arrived() -> None:
            answer = self._answers.get(target)
            data = None if answer is None else answer(request)
            if data is not None:
                self._carry(target, source, lambda: receive(data))

        self._carry(source, target, arrived)

    def _carry(self, source: str, target: str, arrived: Callable[[], None]) -> None:
        if self._random.random() < self._loss:
            return
        flow = self._flows.setdefault((source, target), _FLOWS + 2 * len(self._flows))

        def late() -> None:
            self.timeline.after(self._network.extra_delay_s.get((source, target), 0.0), arrived)

        self._network.link_model.carry(flow, source, target, _BYTES, late)


class SyncedClock:
    """One host's estimate of the cluster clock, which is the clock of the scheduler's host."""

    def __init__(
        self,
        datagrams: Datagrams,
        host: str,
        clock: LocalClock,
        *,
        scheduler: Address,
        parent: Callable[[], Address | None],
        seed: int,
    ) -> None:
        """Send the first request at once.

        Args:
            datagrams: carries requests and answers.
            host: this clock's.
            clock: the host's own clock.
            scheduler: asked if `parent` returns None.
            parent: returns the address to ask.
            seed: of the random intervals between requests.
        """
        self.sync: Final = ClockSync(seed=seed)
        self._datagrams: Final = datagrams
        self._host: Final = host
        self._clock: Final = clock
        self._source: Final = ClockSource(scheduler)
        self._parent: Final = parent
        datagrams.serve(host, self._answer)
        datagrams.timeline.after(0.0, self._poll)

    def cluster(self) -> float:
        """Return this host's estimate of the cluster clock, now."""
        now = self._datagrams.timeline.now
        if not self.sync.synchronised:
            return self._clock.cluster(now)
        return self.sync.cluster_time(self._local())

    def error_bound(self) -> float:
        """Return the largest possible error of the estimate, in s."""
        return self.sync.error_bound(self._local())

    def with_clock(self, status: DriverStatus) -> DriverStatus:
        """Return a driver's status with the offset, drift and error of this clock."""
        known = self.sync.synchronised
        return replace(
            status,
            clock_offset=self.cluster() - self._clock.cluster(self._datagrams.timeline.now),
            clock_drift=self.sync.drift,
            clock_error=self.error_bound() if known else -1.0,
            clock_hops=self.sync.hops,
        )

    def _local(self) -> float:
        return self._clock.local(self._datagrams.timeline.now)

    def _poll(self) -> None:
        local = self._local()
        self._source.set_parent(self._parent())
        host, _ = self._source.next_server(local)
        self._datagrams.ask(self._host, host, self.sync.poll(local), self._receive)
        self._datagrams.timeline.at(self._clock.virtual(self.sync.next_poll()), self._poll)

    def _receive(self, data: bytes) -> None:
        try:
            self.sync.receive(data, self._local())
        except FrameError:
            return
        self._source.answered()

    def _answer(self, data: bytes) -> bytes:
        now = self.cluster()
        return sntp.answer(data, received=now, transmitted=now, hops=self.sync.hops, error=self.error_bound())
