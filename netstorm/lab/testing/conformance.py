"""Conformance suites of vans: the interface itself, and exactly-once delivery on a van that injects
faults.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import pytest

from netstorm.lab.testing.recorder import RecordingProcess, part
from netstorm.protocol.frames import Buffer
from netstorm.pslite.rates import TcpProgress
from netstorm.pslite.session import Limits
from netstorm.pslite.van import Broken, Connection, Received, Van, VanEvent, Widened

__all__ = ["DeliveryConformance", "FaultyVan", "VanConformance"]


# Tests of the van interface: subclass `VanConformance`, and give it a `VanWorld`.
#
# class TestMyVan(VanConformance):
#     @pytest.fixture
#     def world(self):
#         with MyWorld() as world:
#             yield world

A, B = Connection(1), Connection(2)


class VanWorld(Protocol):
    """Makes vans, and breaks the connections between them."""

    def make(self) -> tuple[Van, str, int]:
        """Return a new van that listens, and the address at which others reach it.

        `break_connections` breaks the connections to that address.
        """

    def unused_address(self) -> tuple[str, int]:
        """Return an address at which no process listens."""

    def break_connections(self) -> None:
        """Break all connections between the vans now; what is in flight is lost."""

    def now(self) -> float:
        """Return the time, in s."""

    def pass_time(self, seconds: float) -> None:
        """Let this much time pass (virtual or real)."""


class VanConformance:
    """Tests that a van keeps the contract of `pslite.van.interface.Van`."""

    timeout_s = 10.0
    """Longest time that an expected event may take."""

    def pair(self, world: VanWorld) -> tuple[Van, Van]:
        """Return two vans; the first has opened connection `A` to the second."""
        here, _, _ = world.make()
        there, host, port = world.make()
        here.open(A, host, port)
        return here, there

    def collect(
        self, world: VanWorld, van: Van, wanted: Callable[[list[VanEvent]], bool], *others: Van
    ) -> list[VanEvent]:
        """Poll a van until its events are as wanted; fail if they never are. Events of `others` are
        dropped.
        """
        events: list[VanEvent] = []
        deadline = world.now() + self.timeout_s
        while not wanted(events):
            assert world.now() < deadline, f"not what was wanted within {self.timeout_s} s: {events}"
            world.pass_time(0.002)
            for other in others:
                other.poll(0.0)
            events += van.poll(0.0)
        return events

    def messages(self, world: VanWorld, van: Van, number: int, *others: Van) -> list[Received]:
        """Poll a van until so many messages have arrived."""
        events = self.collect(world, van, lambda events: len(events) >= number, *others)
        received = [event for event in events if isinstance(event, Received)]
        assert len(received) == number, events
        return received

    # ---------------------------------------------------------------------------------------------- delivery

    def test_messages_come_in_order_and_once(self, world: VanWorld) -> None:
        """All messages of a connection, however many."""
        here, there = self.pair(world)
        sent = [b"%d" % number for number in range(3000)]
        for header in sent:
            assert here.transmit(A, header, None)
        assert [bytes(message.frames[0]) for message in self.messages(world, there, 3000, here)] == sent
        world.pass_time(0.05)
        assert there.poll(0.0) == []

    @pytest.mark.parametrize("size", [0, 1, 7, 4096, 262_144, 5_000_001])
    def test_payloads_of_any_size_come_as_they_were(self, world: VanWorld, size: int) -> None:
        """An empty payload is not the same as none."""
        here, there = self.pair(world)
        payload = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        assert here.transmit(A, b"first", None)  # a van may refuse whose first message is large
        self.messages(world, there, 1, here)
        assert here.transmit(A, b"with", payload)
        assert here.transmit(A, b"without", None)
        first, second = self.messages(world, there, 2, here)
        assert len(first.frames) == 2
        assert bytes(first.frames[0]) == b"with"
        assert bytes(first.frames[1]) == payload.tobytes()
        assert len(second.frames) == 1

    def test_many_payloads_come_in_order(self, world: VanWorld) -> None:
        """Large ones overtake neither each other nor small ones."""
        here, there = self.pair(world)
        sizes = [(number * 7919) % 200_000 for number in range(60)]
        for number, size in enumerate(sizes):
            assert here.transmit(A, b"%d" % number, bytes([number]) * size)
        received = self.messages(world, there, 60, here)
        assert [int(bytes(message.frames[0])) for message in received] == list(range(60))
        assert [len(message.frames[1]) for message in received] == sizes

    def test_a_payload_may_be_changed_once_it_was_handed_over(self, world: VanWorld) -> None:
        """The van has copied it."""
        here, there = self.pair(world)
        payload = np.zeros(100_000, np.float32)
        for number in range(20):
            payload[:] = number
            assert here.transmit(A, b"", payload)
        payload[:] = -1
        received = self.messages(world, there, 20, here)
        assert [set(np.frombuffer(message.frames[1], np.float32)) for message in received] == [
            {float(number)} for number in range(20)
        ]

    def test_a_received_payload_is_the_receivers_to_change(self, world: VanWorld) -> None:
        """It is writable, and the changes are seen nowhere else."""
        here, there = self.pair(world)
        payload = np.arange(50_000, dtype=np.float32)
        here.transmit(A, b"", payload)
        here.transmit(A, b"", payload)
        first, second = (
            np.frombuffer(message.frames[1], np.float32) for message in self.messages(world, there, 2, here)
        )
        first += 1
        assert (first == np.arange(1, 50_001)).all()
        assert (second == payload).all()
        assert payload[-1] == 49_999

    def test_a_received_payload_can_be_forwarded_as_it_is(self, world: VanWorld) -> None:
        """To several receivers, each of which gets memory of its own."""
        here, there = self.pair(world)
        last, host, port = world.make()
        there.open(A, host, port)
        here.transmit(A, b"", np.arange(100_000, dtype=np.float32))
        [message] = self.messages(world, there, 1, here)
        there.transmit(A, b"1", message.frames[1])
        there.transmit(A, b"2", message.frames[1])
        there.transmit(message.connection, b"back", message.frames[1])
        first, second = self.messages(world, last, 2, there)
        [back] = self.messages(world, here, 1, there)
        np.frombuffer(first.frames[1], np.float32)[:] = 0
        for frame in (second.frames[1], back.frames[1], message.frames[1]):
            assert (np.frombuffer(frame, np.float32) == np.arange(100_000)).all()

    def test_an_answer_comes_over_the_connection_of_the_question(self, world: VanWorld) -> None:
        """A van that accepted a connection can send over it."""
        here, there = self.pair(world)
        there_host, there_port = world.make()[1:]
        here.open(B, there_host, there_port)
        here.transmit(A, b"question", None)
        [question] = self.messages(world, there, 1, here)
        assert question.connection < 0
        assert there.transmit(question.connection, b"answer", b"payload")
        [answer] = self.messages(world, here, 1, there)
        assert answer.connection == A
        assert [bytes(frame) for frame in answer.frames] == [b"answer", b"payload"]

    def test_connections_between_the_same_vans_are_told_apart(self, world: VanWorld) -> None:
        """Also if they exist at the same time."""
        here, _, _ = world.make()
        there, host, port = world.make()
        here.open(A, host, port)
        here.open(B, host, port)
        here.transmit(A, b"a", None)
        here.transmit(B, b"b", None)
        received = {message.connection: message for message in self.messages(world, there, 2, here)}
        assert len(received) == 2
        for message in received.values():
            there.transmit(message.connection, bytes(message.frames[0]), None)
        answers = {
            message.connection: bytes(message.frames[0]) for message in self.messages(world, here, 2, there)
        }
        assert answers == {A: b"a", B: b"b"}

    # ---------------------------------------------------------------------------------------------- failure

    def test_nobody_listening_breaks_the_connection_with_a_reason(self, world: VanWorld) -> None:
        """There is an event, and no exception."""
        here, _, _ = world.make()
        host, port = world.unused_address()
        here.open(A, host, port)
        here.transmit(A, b"header", b"payload")
        [event] = self.collect(world, here, bool)
        assert isinstance(event, Broken)
        assert event.connection == A
        assert str(port) in event.reason
        assert not here.transmit(A, b"header", None)

    def test_a_connection_that_breaks_has_delivered_a_prefix(self, world: VanWorld) -> None:
        """What was in flight is lost; the opener is told once; a new connection works."""
        here, _, _ = world.make()
        there, host, port = world.make()
        here.open(A, host, port)
        here.transmit(A, b"0", None)
        [first] = self.messages(world, there, 1, here)
        for number in range(1, 200):
            here.transmit(A, b"%d" % number, bytes(50_000))
        world.break_connections()
        events = self.collect(world, here, bool)
        assert [(type(event), event.connection) for event in events] == [(Broken, A)]
        assert not here.transmit(A, b"lost", None)
        here.open(B, host, port)
        here.transmit(B, b"new", None)
        received = self.collect(
            world,
            there,
            lambda events: any(event.connection != first.connection for event in events),
            here,
        )
        numbers = [
            int(bytes(event.frames[0]))
            for event in received
            if isinstance(event, Received) and event.connection == first.connection
        ]
        assert numbers == list(range(1, 1 + len(numbers)))

    def test_what_arrives_before_the_end_comes_first_however_late_it_is_read(self, world: VanWorld) -> None:
        """Both sides are told of the end, after all messages."""
        here, there = self.pair(world)
        here.transmit(A, b"question", None)
        [question] = self.messages(world, there, 1, here)
        for number in range(40):
            assert there.transmit(question.connection, b"%d" % number, None)
        there.shut(1.0)
        world.pass_time(1.0)  # `here` is busy
        events = self.collect(world, here, lambda events: any(isinstance(one, Broken) for one in events))
        assert [bytes(one.frames[0]) for one in events if isinstance(one, Received)] == [
            b"%d" % number for number in range(40)
        ]
        assert isinstance(events[-1], Broken)

    def test_the_end_of_an_accepted_connection_is_told_after_its_messages(self, world: VanWorld) -> None:
        """As that of one that was opened."""
        here, there = self.pair(world)
        for number in range(40):
            assert here.transmit(A, b"%d" % number, None)
        [first] = self.messages(world, there, 40, here)[:1]
        here.transmit(A, b"last words", None)
        here.shut(1.0)
        world.pass_time(1.0)
        events = self.collect(world, there, lambda events: any(isinstance(one, Broken) for one in events))
        received, end = events
        assert isinstance(received, Received)
        assert bytes(received.frames[0]) == b"last words"
        assert isinstance(end, Broken)
        assert end.connection == first.connection
        assert not end.refused

    def test_a_kernel_acknowledges_until_the_connection_ends(self, world: VanWorld) -> None:
        """At both ends, though neither process does anything."""
        here, there = self.pair(world)
        here.transmit(A, b"", None)
        [message] = self.messages(world, there, 1, here)
        world.pass_time(0.1)
        assert here.acknowledges(A)
        assert there.acknowledges(message.connection)
        there.shut(0.0)
        self.collect(world, here, lambda events: any(isinstance(one, Broken) for one in events))
        assert not here.acknowledges(A)
        assert not here.acknowledges(B)

    def test_answering_a_connection_that_is_gone_is_refused(self, world: VanWorld) -> None:
        """At the latest once its end has been noticed."""
        here, there = self.pair(world)
        here.transmit(A, b"", None)
        [question] = self.messages(world, there, 1, here)
        here.close(A)
        deadline = world.now() + self.timeout_s
        while there.transmit(question.connection, b"", None):
            assert world.now() < deadline
            world.pass_time(0.01)
            there.poll(0.0)

    def test_a_closed_connection_is_forgotten(self, world: VanWorld) -> None:
        """Its number is unknown, its end no event, and closing twice no harm."""
        here, there = self.pair(world)
        here.transmit(A, b"", None)
        self.messages(world, there, 1, here)
        here.close(A)
        here.close(A)
        here.close(Connection(99))
        assert not here.transmit(A, b"", None)
        world.pass_time(0.05)
        assert here.poll(0.0) == []

    def test_an_unknown_connection_takes_nothing(self, world: VanWorld) -> None:
        """Neither a positive nor a negative number."""
        here, _, _ = world.make()
        assert not here.transmit(Connection(5), b"", None)
        assert not here.transmit(Connection(-5), b"", b"")

    # ------------------------------------------------------------------------------------------------- ends

    def test_polling_ends_when_it_has_waited_long_enough(self, world: VanWorld) -> None:
        """Even if nothing happens."""
        here, _, _ = world.make()
        here.poll(0.01)  # events of the start-up may still arrive
        began = world.now()
        assert here.poll(0.05) == []
        assert 0.045 <= world.now() - began < 5.0

    def test_a_wake_up_ends_a_poll(self, world: VanWorld) -> None:
        """Also if it comes before the poll."""
        here, _, _ = world.make()
        here.poll(0.0)
        began = world.now()
        here.wake()
        here.poll(5.0)
        assert world.now() - began < 4.0

    def test_last_words_leave_while_a_van_lingers(self, world: VanWorld) -> None:
        """A second shut does nothing."""
        here, there = self.pair(world)
        here.transmit(A, b"hello", None)
        self.messages(world, there, 1, here)
        here.transmit(A, b"last words", bytes(100_000))
        here.shut(5.0)
        here.shut(0.0)
        [message] = self.messages(world, there, 1)
        assert bytes(message.frames[0]) == b"last words"


# Tests of exactly-once delivery: subclass `DeliveryConformance`, and give it a `VanWorld` (see
# `van_conformance`).


class DeliveryConformance:
    """Tests that sessions over a van deliver exactly once, whatever happens to connections and bytes."""

    limits = Limits(link_timeout_s=30.0, query_after_s=0.2, first_retry_s=0.01, longest_retry_s=0.1)
    timeout_s = 60.0
    messages = 150

    def processes(
        self, world: VanWorld, rng: random.Random, *, ordered: bool
    ) -> tuple[list[RecordingProcess], list[FaultyVan]]:
        """Return two processes on faulty vans; the first one knows the address of the second."""
        processes, vans = [], []
        for rank in range(2):
            van, host, port = world.make()
            faulty = FaultyVan(van, random.Random(rng.random()))
            vans.append(faulty)
            processes.append(
                RecordingProcess(
                    faulty, rank, now=world.now, host=host, port=port, ordered=ordered, limits=self.limits
                )
            )
        processes[0].connect(processes[1])
        return processes, vans

    def finish(self, world: VanWorld, processes: list[RecordingProcess], expected: list[int]) -> None:
        """Let time pass until each process has received its number of messages, and all are acknowledged."""
        deadline = world.now() + self.timeout_s
        while any(
            len(process.machine.got) < number or not process.endpoint.idle()
            for process, number in zip(processes, expected, strict=True)
        ):
            assert world.now() < deadline, [
                (len(process.machine.got), process.machine.lost, process.endpoint.links())
                for process in processes
            ]
            world.pass_time(0.002)
            for process in processes:
                process.turn()
        for _ in range(20):  # a duplicate would come late
            world.pass_time(0.005)
            for process in processes:
                process.turn()

    @pytest.mark.parametrize("ordered", [False, True])
    @pytest.mark.parametrize("seed", range(3))
    def test_everything_is_delivered_once_whatever_breaks(
        self,
        world: VanWorld,
        seed: int,
        *,
        ordered: bool,
    ) -> None:
        """Connections break at random on either side's hand-over, bits flip in headers and payloads; some
        connections have several streams.
        """
        rng = random.Random(seed)
        processes, vans = self.processes(world, rng, ordered=ordered)
        for van in vans:
            van.broken_probability = 0.02
            van.header_probability = 0.01
            van.payload_probability = 0.03
            van.streams = 1 + seed
        here, there = processes
        payloads = [rng.randbytes(rng.choice([0, 10, 3000, 100_000])) for _ in range(self.messages)]
        there.connect(here)  # both ways, over connections of their own
        for number, payload in enumerate(payloads):
            for process, other in ((here, there), (there, here)):
                process.send(other, part(number), payload, (0, 0, number))
                process.turn()
            if number % 10 == 0:
                world.pass_time(0.005)
            if number == self.messages // 2:
                world.break_connections()
        self.finish(world, processes, [self.messages] * 2)
        for process in processes:
            assert process.machine.lost == []
            assert sorted(process.machine.numbers()) == list(range(self.messages))
            if ordered:
                assert process.machine.numbers() == list(range(self.messages))
            assert process.machine.payloads() == dict(enumerate(payloads))

    def test_without_faults_nothing_is_sent_twice(self, world: VanWorld) -> None:
        """And queued messages are sent in their order, in both directions of a session."""
        processes, _ = self.processes(world, random.Random(0), ordered=False)
        here, there = processes
        for number in reversed(range(self.messages)):
            here.send(there, part(number), bytes(1000), (0, 0, number))
        self.finish(world, processes, [0, self.messages])
        for number in reversed(range(self.messages)):
            there.send(here, part(number), bytes(1000), (0, 0, number))
        self.finish(world, processes, [self.messages] * 2)
        for process in processes:
            assert process.machine.numbers() == list(range(self.messages))
            [link] = process.endpoint.links().values()
            assert link["messages_resent"] == link["duplicates"] == 0
            assert link["connections"] == 1


# A van that injects faults: it breaks connections and flips bits.


class FaultyVan:
    """Wraps another van; breaks its connections, and flips bits in received messages.

    Attributes:
        broken_probability: that a connection opened here breaks when a message is handed over.
        header_probability: that a bit of a frame 0 changes.
        payload_probability: that a bit of a payload changes.
        streams: of each connection opened here, from its first payload on. Messages over one stream come in
            order, and may pass, and be passed by, those over others.
    """

    def __init__(self, van: Van, rng: random.Random) -> None:
        self.broken_probability = 0.0
        self.header_probability = 0.0
        self.payload_probability = 0.0
        self.streams = 1
        self._van = van
        self._random = rng
        self._events: list[VanEvent] = []
        self._widened: set[Connection] = set()
        self._held: dict[tuple[Connection, int], deque[tuple[bytes, bytes | None]]] = {}
        """What is on its way over further streams."""

    def bind(self, host: str, port: int) -> int:
        """See `Van`."""
        return self._van.bind(host, port)

    def open(self, connection: Connection, host: str, port: int) -> None:
        """See `Van`."""
        self._van.open(connection, host, port)

    def transmit(
        self, connection: Connection, header: bytes, payload: Buffer | None, stream: int = 0
    ) -> bool:
        """See `Van`."""
        if connection > 0 and self._random.random() < self.broken_probability:
            self.close(connection)
            self._events.append(Broken(connection, "the test broke it"))
            return bool(self._random.getrandbits(1))
        if connection > 0 and payload is not None and self.streams > 1 and connection not in self._widened:
            self._widened.add(connection)
            self._events.append(Widened(connection, self.streams))
        if stream and self.streams > 1:
            held = self._held.setdefault((connection, stream), deque())
            held.append((header, None if payload is None else bytes(payload)))
            return True
        return self._van.transmit(connection, header, payload, stream)

    def close(self, connection: Connection) -> None:
        """See `Van`."""
        self._held = {place: held for place, held in self._held.items() if place[0] != connection}
        self._van.close(connection)

    def admit(self, connection: Connection) -> None:
        """See `Transmitter`."""
        self._van.admit(connection)

    def refuse(self, connection: Connection, reason: str) -> None:
        """See `Transmitter`."""
        self._van.refuse(connection, reason)

    def progress(self, connection: Connection) -> TcpProgress | None:
        """See `Van`."""
        return self._van.progress(connection)

    def acknowledges(self, connection: Connection) -> bool:
        """See `Van`."""
        return self._van.acknowledges(connection)

    def poll(self, timeout_s: float) -> list[VanEvent]:
        """See `Van`."""
        for (connection, _), held in self._held.items():
            if held and self._random.random() < 0.5:
                self._van.transmit(connection, *held.popleft())
        events, self._events = self._events, []
        for event in self._van.poll(0.0 if events else timeout_s):
            events.append(self._changed(event) if isinstance(event, Received) else event)
        return events

    def wake(self) -> None:
        """See `Van`."""
        self._van.wake()

    def shut(self, linger_s: float) -> None:
        """See `Van`."""
        self._van.shut(linger_s)

    def _changed(self, event: Received) -> Received:
        header, *payload = event.frames
        if self._random.random() < self.header_probability:
            header = self._flipped(bytearray(header))
        if payload and len(payload[0]) and self._random.random() < self.payload_probability:
            payload = [self._flipped(bytearray(payload[0]))]
        return Received(event.connection, (header, *payload))

    def _flipped(self, data: bytearray) -> bytearray:
        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return data
