"""A network in memory on virtual time: connections that carry frames in order and break as TCP's do.

What it shares with TCP and ZeroMQ: a connection keeps its order and loses nothing while it exists. When it
breaks, what was in flight is lost, in both directions, and both sides are told. Frames can be handed over
that never arrive. A path that drops everything is noticed only after a while, as by TCP's keepalive.

What it leaves out: ZeroMQ's handshake takes one round trip here, not three; queues are unbounded, since the
sessions' windows bound them; names are not resolved.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Final

from netstorm.addresses import host_port
from netstorm.errors import UsageError
from netstorm.protocol.frames import Buffer, checksum
from netstorm.pslite.clock.virtual_time import Timeline
from netstorm.pslite.van.interface import Broken, Connection, Received
from netstorm.pslite.van.link_model import FixedDelay, LinkModel
from netstorm.pslite.van.memory_pipes import Flight, FlightKind, NetworkVan, Pipe, ReceivedFrame
from netstorm.pslite.van.partitions import Partitions

__all__ = ["MemoryNetwork"]


_REFUSED: Final = "connection refused"
"""Begins the reason of a connection to an address at which no process listens."""


class MemoryNetwork:
    """Hosts, listeners and connections, and the faults injected into them.

    Attributes:
        corrupt_probability: that one bit of a payload changes on its way.
        break_probability: that a connection breaks instead of delivering a message.
        detect_s: how long until a path that drops everything counts as broken (TCP's keepalive).
        extra_delay_s: added to the link model's times, by (source host, target host).
        traffic: bytes and messages delivered, by (source host, target host).
        watch: called with (source host, target host, frame 0, payload) of every delivered message.
        corrupted: number of payloads that were changed.
        keyed: the job has a key, so each process has one of its own, by which the receiver knows it.
    """

    def __init__(
        self,
        timeline: Timeline,
        link_model: LinkModel | None = None,
        *,
        seed: int = 0,
        corrupt_probability: float = 0.0,
        break_probability: float = 0.0,
        detect_s: float = 3.0,
    ) -> None:
        """Begin with no hosts. `seed` decides what is corrupted and broken."""
        self.timeline: Final = timeline
        self.link_model: Final = link_model or FixedDelay(timeline, seed=seed)
        self.corrupt_probability = corrupt_probability
        self.break_probability = break_probability
        self.detect_s = detect_s
        self.extra_delay_s: dict[tuple[str, str], float] = {}
        self.traffic: dict[tuple[str, str], tuple[int, int]] = {}
        self.watch: Callable[[str, str, bytes, Buffer | None], None] | None = None
        self.corrupted = 0
        self.keyed = False
        self._keys = itertools.count(1)
        self._random = random.Random(f"faults {seed}")
        self._listeners: dict[tuple[str, int], NetworkVan] = {}
        self._pipes: dict[int, Pipe] = {}
        self._opened = 0
        self._next_port = 49152
        self._partitions: Final = Partitions()

    # ------------------------------------------------------------------------------------------- for the vans

    def new_key(self) -> str:
        """Return what stands for the public key of a process."""
        return f"key {next(self._keys)}"

    def listen(self, van: NetworkVan, host: str, port: int) -> int:
        """Accept connections to `van`; return its port."""
        names = sorted({van.host, host})
        if port == 0:
            while any((name, self._next_port) in self._listeners for name in names):
                self._next_port += 1
            port = self._next_port
            self._next_port += 1
        for name in names:
            if (name, port) in self._listeners:
                raise UsageError(
                    f"{host_port(name, port)} is taken: choose another port, or 0 for any that is free"
                )
            self._listeners[name, port] = van
        self._partitions.power_on(van.host)
        return port

    def connect(self, van: NetworkVan, connection: Connection, host: str, port: int) -> Pipe:
        """Begin to connect `van` to the van that listens at `host`:`port`."""
        self._opened += 1
        listener = self._listeners.get((host, port))
        host = host if listener is None else listener.host
        pipe = Pipe(number=self._opened, opener=van, connection=connection, host=host, port=port)
        self._pipes[pipe.number] = pipe
        self._launch(pipe, pipe.forward, Flight(FlightKind.OPEN))
        self._expect_silence(pipe)
        return pipe

    def send(self, pipe: Pipe, *, from_opener: bool, header: bytes, payload: Buffer | None) -> bool:
        """Hand over a message; False if this side knows that the connection is gone."""
        if pipe.opener_knows_end if from_opener else pipe.acceptor_knows_end:
            return False
        flight = Flight(FlightKind.DATA, header=header)
        if isinstance(payload, ReceivedFrame):
            flight.payload, flight.digest = payload, checksum(payload)
        elif payload is not None:
            flight.payload = ReceivedFrame(memoryview(payload))
        if from_opener and not pipe.established:
            pipe.held.append(flight)
        else:
            self._launch(pipe, pipe.forward if from_opener else pipe.backward, flight)
        return True

    def hang_up(self, pipe: Pipe, *, from_opener: bool, drop: bool, reason: str) -> None:
        """Close one side's end; what it handed over arrives before, unless `drop`."""
        way = pipe.forward if from_opener else pipe.backward
        if from_opener:
            pipe.opener_knows_end = True
            pipe.held.clear()
        else:
            pipe.acceptor_knows_end = True
        if drop:
            self._drop(pipe, way)
        self._launch(pipe, way, Flight(FlightKind.END, reason=reason))

    def acknowledges(self, pipe: Pipe, *, from_opener: bool) -> bool:
        """Return whether the kernel at the other end of a connection acknowledges: it can be reached, and has
        not been started again.
        """
        if pipe.acceptor_knows_end if from_opener else pipe.opener_knows_end:
            return False
        return self._partitions.silent_since(pipe.opener.host, pipe.host) is None

    def unlisten(self, van: NetworkVan) -> None:
        """Accept no more connections to `van`."""
        for address in [address for address, listener in self._listeners.items() if listener is van]:
            del self._listeners[address]

    # ------------------------------------------------------------------------------------------------- faults

    def cut(self, source: str, target: str, *, one_way: bool = False) -> None:
        """Drop everything between two hosts from now on. After `detect_s` connections break."""
        for pair in ((source, target),) if one_way else ((source, target), (target, source)):
            self._partitions.cut(*pair, self.timeline.now)
        for pipe in self._pipes_between(source, target):
            self._expect_silence(pipe)

    def heal(self, source: str, target: str) -> None:
        """End a cut, in both directions. What is in flight on connections that still exist arrives now."""
        self._partitions.heal(source, target)
        for pipe in self._pipes_between(source, target):
            self._arrive(pipe, pipe.forward)
            self._arrive(pipe, pipe.backward)

    def reset(self, source: str, target: str) -> int:
        """Break all connections between two hosts now, as a router that lost its state; return how many."""
        pipes = self._pipes_between(source, target)
        for pipe in pipes:
            self._break(pipe, f"connection between {source} and {target} reset")
        return len(pipes)

    def crash(self, van: NetworkVan, *, silent: bool = False) -> None:
        """End a van without warning: a killed process, whose peers get resets; `silent`: a host without
        power.
        """
        self.unlisten(van)
        if silent:
            self._partitions.power_off(van.host)
        for pipe in list(self._pipes.values()):
            if pipe.opener is van:
                pipe.opener_knows_end = True
            elif pipe.acceptor is van:
                pipe.acceptor_knows_end = True
            elif not (silent and pipe.host == van.host):
                continue
            self._drop(pipe, pipe.forward)
            self._drop(pipe, pipe.backward)
            pipe.held.clear()
            if silent:
                self._expect_silence(pipe)
            else:
                way = pipe.forward if pipe.opener is van else pipe.backward
                self._launch(pipe, way, Flight(FlightKind.END, reason=f"connection reset by {van.host}"))

    def connections(self) -> int:
        """Return how many connections have an end that does not know that they are gone."""
        return len(self._pipes)

    # ------------------------------------------------------------------------------------------------- inside

    def _pipes_between(self, one: str, other: str) -> list[Pipe]:
        return [pipe for pipe in self._pipes.values() if {pipe.opener.host, pipe.host} == {one, other}]

    def _ends(self, pipe: Pipe, way: deque[Flight]) -> tuple[str, str]:
        return (pipe.opener.host, pipe.host) if way is pipe.forward else (pipe.host, pipe.opener.host)

    def _flow(self, pipe: Pipe, way: deque[Flight]) -> int:
        return 2 * pipe.number + (way is pipe.backward)

    def _launch(self, pipe: Pipe, way: deque[Flight], flight: Flight) -> None:
        way.append(flight)
        source, target = self._ends(pipe, way)

        def arrived() -> None:
            flight.arrived = True
            self._arrive(pipe, way)

        def late() -> None:
            extra = self.extra_delay_s.get((source, target), 0.0)
            if extra:
                self.timeline.after(extra, arrived)
            else:
                arrived()

        self.link_model.carry(self._flow(pipe, way), source, target, flight.size(), late)

    def _drop(self, pipe: Pipe, way: deque[Flight]) -> None:
        way.clear()
        self.link_model.forget(self._flow(pipe, way))

    def _arrive(self, pipe: Pipe, way: deque[Flight]) -> None:
        """Deliver what has arrived, in order."""
        source, target = self._ends(pipe, way)
        while way and way[0].arrived and not self._partitions.block(source, target):
            flight = way.popleft()
            if flight.kind is FlightKind.DATA:
                self._deliver(pipe, way, flight)
            elif flight.kind is FlightKind.OPEN:
                self._opened_at_target(pipe)
            elif flight.kind is FlightKind.ACCEPT:
                pipe.established = True
                while pipe.held:
                    self._launch(pipe, pipe.forward, pipe.held.popleft())
            elif way is pipe.backward:
                self._tell_opener(pipe, flight.reason)
            else:
                self._tell_acceptor(pipe, flight.reason)
        self._tidy(pipe)

    def _opened_at_target(self, pipe: Pipe) -> None:
        listener = self._listeners.get((pipe.host, pipe.port))
        if listener is None:
            pipe.acceptor_knows_end = True
            reason = f"{_REFUSED}: nobody listens at {host_port(pipe.host, pipe.port)}"
            self._launch(pipe, pipe.backward, Flight(FlightKind.END, reason=reason))
        else:
            pipe.acceptor = listener
            pipe.accepted_as = listener.accept(pipe)
            self._launch(pipe, pipe.backward, Flight(FlightKind.ACCEPT))

    def _deliver(self, pipe: Pipe, way: deque[Flight], flight: Flight) -> None:
        source, target = self._ends(pipe, way)
        gone = pipe.acceptor_knows_end if way is pipe.forward else pipe.opener_knows_end
        if gone:
            return
        if self.break_probability and self._random.random() < self.break_probability:
            self._break(pipe, f"connection between {source} and {target} lost")
            return
        payload = flight.payload
        if payload is not None and flight.digest is not None:
            payload = ReceivedFrame(payload)
            if checksum(payload) != flight.digest:
                raise AssertionError(f"{source} changed a received frame that it had forwarded to {target}")
        if payload and self.corrupt_probability and self._random.random() < self.corrupt_probability:
            payload[self._random.randrange(len(payload))] ^= 1 << self._random.randrange(8)
            self.corrupted += 1
        total, messages = self.traffic.get((source, target), (0, 0))
        self.traffic[source, target] = (total + flight.size(), messages + 1)
        if self.watch is not None:
            self.watch(source, target, flight.header, payload)
        frames = (flight.header,) if payload is None else (flight.header, payload)
        if way is pipe.backward:
            pipe.opener.deliver(Received(pipe.connection, frames))
        elif pipe.acceptor is not None and pipe.accepted_as is not None:
            user = pipe.opener.key if self.keyed else ""
            pipe.acceptor.deliver(Received(pipe.accepted_as, frames, user))

    def _break(self, pipe: Pipe, reason: str) -> None:
        """Break a connection: everything in flight is lost, and both sides' kernels notice now."""
        self._drop(pipe, pipe.forward)
        self._drop(pipe, pipe.backward)
        pipe.held.clear()
        self._tell_acceptor(pipe, reason)
        self._tell_opener(pipe, reason)
        self._tidy(pipe)

    def _tell_opener(self, pipe: Pipe, reason: str) -> None:
        if not pipe.opener_knows_end:
            pipe.opener_knows_end = True
            refused = reason.startswith(_REFUSED)
            pipe.opener.deliver(Broken(pipe.connection, reason, refused=refused))

    def _tell_acceptor(self, pipe: Pipe, reason: str) -> None:
        if not pipe.acceptor_knows_end:
            pipe.acceptor_knows_end = True
            if pipe.acceptor is not None and pipe.accepted_as is not None:
                pipe.acceptor.deliver(Broken(pipe.accepted_as, reason))

    def _tidy(self, pipe: Pipe) -> None:
        if pipe.opener_knows_end and pipe.acceptor_knows_end and not pipe.forward and not pipe.backward:
            self._pipes.pop(pipe.number, None)

    def _expect_silence(self, pipe: Pipe) -> None:
        """Break a connection once nothing has come through for `detect_s`."""
        ends = (pipe.opener.host, pipe.host)
        since = self._partitions.silent_since(*ends)
        if since is None:
            return

        def detect() -> None:
            if self._partitions.silent_since(*ends) == since and pipe.number in self._pipes:
                self._break(pipe, f"nothing heard from {pipe.host} for {self.detect_s:g} s")

        self.timeline.after(self.detect_s, detect)
