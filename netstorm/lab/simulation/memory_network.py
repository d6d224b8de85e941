"""A network in memory on virtual time: connections that carry frames in order and break as TCP's do.

What it shares with TCP and ZeroMQ: a connection keeps its order and loses nothing while it exists. When it
breaks, what was in flight is lost, in both directions, and both sides are told. Frames can be handed over
that never arrive. A path that drops everything is noticed only after a while, as by TCP's keepalive.

What it leaves out: ZeroMQ's handshake takes one round trip here, not three; queues are unbounded, since the
sessions' windows bound them; names are not resolved.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from netstorm.addresses import host_port
from netstorm.errors import UsageError
from netstorm.protocol.frames import Buffer, checksum
from netstorm.pslite.rates import TcpProgress
from netstorm.pslite.van import Broken, Connection, Received, VanEvent

__all__ = ["FixedDelay", "LinkModel", "MemoryNetwork", "MemoryVan", "Timeline", "Timer"]


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

    def is_cut(self, source: str, target: str) -> bool:
        """Return whether nothing arrives at `target` from `source`."""
        return self._partitions.block(source, target)

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


_POLL_AT_MOST: Final = 256
"""Most events that one `poll` returns: the owner also has timers to serve."""

_SILENT: Final = TcpProgress(
    delivered=0,
    segment=0,
    retransmitted=0,
    unsent=0,
    window=0,
    busy_s=0.0,
    receiver_limited_s=0.0,
    smoothed_rtt_s=0.0,
    min_rtt_s=0.0,
)
"""Progress of a connection without any delivery."""


class MemoryVan:
    """One process's end of a `MemoryNetwork`: does what the ZeroMQ van does, on virtual time and without
    sockets.

    Attributes:
        host: on which it is.
        key: stands for the key pair that a process makes when it begins.
        notify: called when there is an event to poll for and there was none before.
    """

    def __init__(self, network: MemoryNetwork, host: str) -> None:
        """Put a van on host `host`; several may share one."""
        self.host = host
        self.key = network.new_key()
        self.notify: Callable[[], None] | None = None
        self._network: Final = network
        self._opened: dict[Connection, Pipe] = {}
        self._accepted: dict[Connection, Pipe] = {}
        self._accept_numbers = itertools.count(1)
        self._events: deque[VanEvent] = deque()
        self._woken = False
        self._shut = False

    # ------------------------------------------------------------------------------------------------ the van

    def bind(self, host: str, port: int) -> int:
        """Listen as `host`, and as this van's own host name."""
        self._check_open()
        return self._network.listen(self, host if host not in ("", "*") else self.host, port)

    def open(self, connection: Connection, host: str, port: int) -> None:
        """Begin to connect."""
        self._check_open()
        if connection <= 0 or connection in self._opened:
            raise UsageError(f"connection {connection} is not a new positive number")
        self._opened[connection] = self._network.connect(self, connection, host, port)

    def transmit(
        self, connection: Connection, header: bytes, payload: Buffer | None, stream: int = 0
    ) -> bool:
        """Hand over a message; the payload is copied, unless it is a frame that a van has received. Each
        connection is one stream.
        """
        pipe = self._opened.get(connection) or self._accepted.get(connection)
        if pipe is None or self._shut:
            return False
        taken = self._network.send(pipe, from_opener=connection > 0, header=header, payload=payload)
        if not taken and connection < 0:
            del self._accepted[connection]
        return taken

    def close(self, connection: Connection) -> None:
        """Close a connection. The opener of a connection accepted here is not told: a ROUTER cannot close
        it.
        """
        pipe = self._opened.pop(connection, None)
        if pipe is not None:
            self._network.hang_up(pipe, from_opener=True, drop=False, reason=f"closed by {self.host}")
        pipe = self._accepted.pop(connection, None)
        if pipe is not None:
            pipe.acceptor_knows_end = True

    def admit(self, connection: Connection) -> None:
        """See `Transmitter`."""

    def refuse(self, connection: Connection, reason: str) -> None:
        """Cut a connection."""
        pipe = self._accepted.pop(connection, None)
        if pipe is not None:
            self._network.hang_up(pipe, from_opener=False, drop=True, reason=f"closed by {self.host}")

    def poll(self, timeout_s: float) -> list[VanEvent]:
        """Return events; if there are none, let at most `timeout_s` of virtual time pass first."""
        if timeout_s > 0 and not self._events and not self._woken:
            timeline = self._network.timeline
            timeline.run_until(lambda: bool(self._events) or self._woken, timeline.now + timeout_s)
        self._woken = False
        return [self._events.popleft() for _ in range(min(len(self._events), _POLL_AT_MOST))]

    def progress(self, connection: Connection) -> TcpProgress | None:
        """Return what is known of a connection that was opened here: only its round trip."""
        pipe = self._opened.get(connection)
        if pipe is None or not pipe.established:
            return None
        trip = self._network.link_model.round_trip(self.host, pipe.host)
        return _SILENT._replace(smoothed_rtt_s=trip, min_rtt_s=trip)

    def acknowledges(self, connection: Connection) -> bool:
        """Return whether the host at the other end can be reached; its process may be stopped."""
        pipe = self._opened.get(connection) or self._accepted.get(connection)
        if pipe is None or not (pipe.established or connection < 0):
            return False
        return self._network.acknowledges(pipe, from_opener=connection > 0)

    def wake(self) -> None:
        """Make the `poll` that waits, or the next one, return."""
        self._woken = True
        if self.notify is not None:
            self.notify()

    def shut(self, linger_s: float) -> None:
        """Close everything. What was handed over has `linger_s` of virtual time to arrive."""
        if self._shut:
            return
        self._shut = True
        network = self._network
        network.unlisten(self)
        left = [(pipe, True) for pipe in self._opened.values()] + [
            (pipe, False) for pipe in self._accepted.values()
        ]
        for pipe, opened in left:
            network.hang_up(pipe, from_opener=opened, drop=linger_s <= 0, reason=f"closed by {self.host}")
        if linger_s > 0:
            network.timeline.after(linger_s, lambda: network.crash(self))
        self._opened.clear()
        self._accepted.clear()
        self._events.clear()

    # ------------------------------------------------------------------------------------------- the network

    def deliver(self, event: VanEvent) -> None:
        """Receive an event from the network."""
        if self._shut:
            return
        if isinstance(event, Received):
            if event.connection not in (self._opened if event.connection > 0 else self._accepted):
                return
        elif (self._opened if event.connection > 0 else self._accepted).pop(event.connection, None) is None:
            return
        self._events.append(event)
        if len(self._events) == 1 and self.notify is not None:
            self.notify()

    def accept(self, pipe: Pipe) -> Connection:
        """Return a number for a connection that another van has opened."""
        connection = Connection(-next(self._accept_numbers))
        self._accepted[connection] = pipe
        return connection

    def die(self, *, silent: bool = False) -> None:
        """End without closing anything, as a killed process does; `silent`: as a host without power."""
        self._shut = True
        self._network.crash(self, silent=silent)
        self._opened.clear()
        self._accepted.clear()
        self._events.clear()

    def _check_open(self) -> None:
        if self._shut:
            raise UsageError(f"the van of {self.host} has been shut")


_FRAME_OVERHEAD: Final = 9
"""Bytes that ZMTP 3 puts before each frame (RFC 37)."""

_SIGNAL_BYTES: Final = 64
"""A TCP segment without data."""


class ReceivedFrame(bytearray):
    """A received payload. Passed to `transmit` it is shared, not copied, and must not change any more."""

    __slots__ = ()


class FlightKind(enum.Enum):
    """What is in flight."""

    OPEN = enum.auto()
    ACCEPT = enum.auto()
    DATA = enum.auto()
    END = enum.auto()


@dataclass(slots=True, eq=False)
class Flight:
    """One message in flight."""

    kind: FlightKind
    header: bytes = b""
    payload: Buffer | None = None
    digest: int | None = None
    """Checksum at hand-over of a payload that the sender still shares."""
    reason: str = ""
    arrived: bool = False

    def size(self) -> int:
        """Return the bytes on the wire."""
        if self.kind is not FlightKind.DATA:
            return _SIGNAL_BYTES
        payload = 0 if self.payload is None else len(self.payload) + _FRAME_OVERHEAD
        return len(self.header) + _FRAME_OVERHEAD + payload


class NetworkVan(Protocol):
    """What the network needs of a van.

    Attributes:
        host: name of its host.
        key: stands for the public key of its process.
    """

    host: str
    key: str

    def deliver(self, event: VanEvent) -> None:
        """Receive an event."""

    def accept(self, pipe: Pipe) -> Connection:
        """Return a number for a connection that another van has opened."""


@dataclass(slots=True, eq=False)
class Pipe:
    """A connection between two vans, as the network sees it."""

    number: int
    opener: NetworkVan
    connection: Connection
    """Its number at the opener."""
    host: str
    """The host it was opened to."""
    port: int
    acceptor: NetworkVan | None = None
    accepted_as: Connection | None = None
    established: bool = False
    """The opener knows that the connection was accepted; until then its frames are held."""
    opener_knows_end: bool = False
    acceptor_knows_end: bool = False
    forward: deque[Flight] = field(default_factory=deque)
    """From the opener, in order."""
    backward: deque[Flight] = field(default_factory=deque)
    held: deque[Flight] = field(default_factory=deque)


class LinkModel(Protocol):
    """How long messages take in a network in memory."""

    def carry(self, flow: int, source: str, target: str, size: int, arrived: Callable[[], None]) -> None:
        """Call `arrived` when `size` bytes, handed over now at host `source`, are at host `target`.

        A flow is one direction of a connection: even numbers lead away from its opener, odd ones back. The
        network restores the order if messages of a flow overtake one another.
        """

    def forget(self, flow: int) -> None:
        """Drop what a flow has in flight: its connection is gone. The calls to `arrived` may be left out."""

    def round_trip(self, source: str, target: str) -> float:
        """Return the round trip of a small message in s, without queues."""


class FixedDelay:
    """All messages take about the same time; there are no capacities."""

    def __init__(
        self, timeline: Timeline, *, delay_s: float = 0.001, jitter_s: float = 0.0, seed: int = 0
    ) -> None:
        """Make each message take `delay_s` and up to `jitter_s` more."""
        self._timeline = timeline
        self._random = random.Random(f"delay {seed}")
        self.delay_s = delay_s
        self.jitter_s = jitter_s

    def carry(self, flow: int, source: str, target: str, size: int, arrived: Callable[[], None]) -> None:
        """See `LinkModel`."""
        jitter = self._random.random() * self.jitter_s if self.jitter_s else 0.0
        self._timeline.after(self.delay_s + jitter, arrived)

    def forget(self, flow: int) -> None:
        """See `LinkModel`; what is in flight arrives, and is ignored."""

    def round_trip(self, source: str, target: str) -> float:
        """See `LinkModel`."""
        return 2 * self.delay_s


_ALWAYS: Final = -1.0
"""Stands for the time at which a host lost power; the exact time does not matter."""


class Partitions:
    """Cut paths between hosts of a network in memory, hosts without power, and since when."""

    def __init__(self) -> None:
        self._cut_since: Final[dict[tuple[str, str], float]] = {}
        self._without_power: Final[set[str]] = set()

    def cut(self, source: str, target: str, now: float) -> None:
        """Drop everything from one host to another from now on."""
        self._cut_since.setdefault((source, target), now)

    def heal(self, one: str, other: str) -> None:
        """End a cut, in both directions."""
        self._cut_since.pop((one, other), None)
        self._cut_since.pop((other, one), None)

    def power_off(self, host: str) -> None:
        """Drop everything from and to a host from now on."""
        self._without_power.add(host)

    def power_on(self, host: str) -> None:
        """End the effect of `power_off`."""
        self._without_power.discard(host)

    def block(self, source: str, target: str) -> bool:
        """Return whether nothing can arrive at `target` from `source`."""
        return (source, target) in self._cut_since or target in self._without_power

    def silent_since(self, one: str, other: str) -> float | None:
        """Return since when something between two hosts is dropped; None if nothing is."""
        if one in self._without_power or other in self._without_power:
            return _ALWAYS
        times = [self._cut_since[pair] for pair in ((one, other), (other, one)) if pair in self._cut_since]
        return min(times, default=None)


# Virtual time: actions and when they are due, in a deterministic order.
#
# A test or a simulated cluster drives it; nothing here waits. Actions that are due at the same time run in
# the order in which they were scheduled, so a run is a function of its inputs.


class Timer:
    """A scheduled action, which can be cancelled."""

    __slots__ = ("_action", "time")

    def __init__(self, time: float, action: Callable[[], None]) -> None:
        self.time = time
        self._action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Cancel the action; a late or second call does nothing."""
        self._action = None

    def take(self) -> Callable[[], None] | None:
        """Return the action, once; None if it was cancelled."""
        action, self._action = self._action, None
        return action


class Timeline:
    """A clock that jumps from one due action to the next. Times are in s."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._due: list[tuple[float, int, Timer]] = []
        self._scheduled = 0
        self.steps = 0
        """Number of actions run so far."""

    @property
    def now(self) -> float:
        """The time."""
        return self._now

    def at(self, time: float, action: Callable[[], None]) -> Timer:
        """Schedule `action` at `time`, or at once if that is past. An infinite time is never kept."""
        timer = Timer(max(time, self._now), action)
        if timer.time < math.inf:
            heapq.heappush(self._due, (timer.time, self._scheduled, timer))
            self._scheduled += 1
        return timer

    def after(self, delay: float, action: Callable[[], None]) -> Timer:
        """Schedule `action` after `delay`."""
        return self.at(self._now + delay, action)

    def step(self, limit: float = math.inf) -> bool:
        """Go to the next action and run it; False, and the time is `limit`, if none is due until then."""
        while self._due:
            time, _, timer = self._due[0]
            if time > limit:
                break
            heapq.heappop(self._due)
            action = timer.take()
            if action is not None:
                self._now = time
                self.steps += 1
                action()
                return True
        if limit < math.inf:
            self._now = max(self._now, limit)
        return False

    def run_until(self, wanted: Callable[[], bool], limit: float) -> bool:
        """Run actions until `wanted` holds or `limit` is reached; return whether it holds."""
        while not wanted():
            if not self.step(limit):
                return wanted()
        return True
