"""Clocks of a simulated cluster that are synchronised as real ones are: by SNTP.

Nodes ask the scheduler, or along the trees. Datagrams take what messages take in the network.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeAlias

from netstorm.errors import FrameError
from netstorm.kvstore.membership.node_status import DriverStatus
from netstorm.pslite.clock import sntp
from netstorm.pslite.clock.source import Address, ClockSource
from netstorm.pslite.clock.sync import ClockSync
from netstorm.pslite.van.memory_network import MemoryNetwork
from netstorm.simulation.process import LocalClock

__all__ = ["Timekeeper", "Timekeepers"]

_FLOWS: Final = 1 << 40
"""Numbers of flows from here on are of datagrams; even, as those that lead away from an opener."""

_BYTES: Final = sntp.PACKET_BYTES + 28
"""Of a packet, with the headers of UDP and IP."""

Answer: TypeAlias = Callable[[bytes], bytes | None]


class Timekeepers:
    """The datagrams of one cluster's hosts."""

    def __init__(self, network: MemoryNetwork, *, seed: int, loss: float = 0.0) -> None:
        """Carry nothing yet.

        Args:
            network: what it takes.
            seed: of what is lost.
            loss: the probability that a datagram is.
        """
        self.timeline: Final = network.timeline
        self._network: Final = network
        self._loss: Final = loss
        self._random: Final = random.Random(f"datagrams {seed}")
        self._flows: dict[tuple[str, str], int] = {}
        self._answers: dict[str, Answer] = {}

    def answer_at(self, host: str, answer: Answer) -> None:
        """Let a host answer requests by this function; a None is no answer."""
        self._answers[host] = answer

    def tell_cluster_time(self, host: str, clock: LocalClock) -> None:
        """Let a host, the scheduler's, answer by its clock, which is the cluster's."""

        def answer(data: bytes) -> bytes:
            now = clock.cluster(self.timeline.now)
            return sntp.answer(data, received=now, transmitted=now)

        self.answer_at(host, answer)

    def ask(self, source: str, target: str, request: bytes, take: Callable[[bytes], None]) -> None:
        """Bring a request to a host, and what it answers back."""

        def there() -> None:
            answer = self._answers.get(target)
            data = None if answer is None else answer(request)
            if data is not None:
                self._carry(target, source, lambda: take(data))

        self._carry(source, target, there)

    def _carry(self, source: str, target: str, arrived: Callable[[], None]) -> None:
        if self._random.random() < self._loss:
            return
        flow = self._flows.setdefault((source, target), _FLOWS + 2 * len(self._flows))

        def late() -> None:
            self.timeline.after(self._network.extra_delay_s.get((source, target), 0.0), arrived)

        self._network.link_model.carry(flow, source, target, _BYTES, late)


class Timekeeper:
    """One host's idea of the cluster clock, which is what the scheduler's host shows."""

    def __init__(
        self,
        hall: Timekeepers,
        host: str,
        clock: LocalClock,
        *,
        scheduler: Address,
        whom: Callable[[], Address | None],
        seed: int,
    ) -> None:
        """Ask at once; `whom` as of `SntpClient`."""
        self.sync: Final = ClockSync(seed=seed)
        self._hall: Final = hall
        self._host: Final = host
        self._clock: Final = clock
        self._source: Final = ClockSource(scheduler)
        self._whom: Final = whom
        hall.answer_at(host, self._answer)
        hall.timeline.after(0.0, self._poll)

    def cluster(self) -> float:
        """Return what this host takes for the cluster clock's time, now."""
        now = self._hall.timeline.now
        if not self.sync.synchronised:
            return self._clock.cluster(now)
        return self.sync.cluster_time(self._local())

    def error_bound(self) -> float:
        """Return the most that it may be off, in s."""
        return self.sync.error_bound(self._local())

    def told(self, outside: DriverStatus) -> DriverStatus:
        """Return what a node's driver knows, with the clock as it is known here."""
        known = self.sync.synchronised
        return replace(
            outside,
            clock_offset=self.cluster() - self._clock.cluster(self._hall.timeline.now),
            clock_drift=self.sync.drift,
            clock_error=self.error_bound() if known else -1.0,
            clock_hops=self.sync.hops,
        )

    def _local(self) -> float:
        return self._clock.local(self._hall.timeline.now)

    def _poll(self) -> None:
        local = self._local()
        self._source.set_parent(self._whom())
        host, _ = self._source.next_server(local)
        self._hall.ask(self._host, host, self.sync.poll(local), self._take)
        self._hall.timeline.at(self._clock.virtual(self.sync.next_poll()), self._poll)

    def _take(self, data: bytes) -> None:
        try:
            self.sync.receive(data, self._local())
        except FrameError:
            return
        self._source.answered()

    def _answer(self, data: bytes) -> bytes:
        now = self.cluster()
        return sntp.answer(data, received=now, transmitted=now, hops=self.sync.hops, error=self.error_bound())
