"""Messages through pipes come as they were, once and in order, whatever is full, damaged or gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.observe.log import Counters
from netstorm.protocol.messages import SharedMemory
from netstorm.pslite import host_pipes
from netstorm.pslite.host_pipes import SLOT_BYTES, SLOTS, HostPipes, PipeMessage
from netstorm.pslite.shared_memory import SharedPayloads
from netstorm.pslite.van import Broken, Connection, Received, VanEvent
from netstorm.pslite.zeromq import DescriptorPoller, ZmqVan
from tests.integration.forking import ROOT

A, B = Connection(1), Connection(2)
MOST = 4 * 2**20


class Vans:
    """Two vans; the first one has opened connection A to the second, which has its memory and pipes."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.here, self.there = ZmqVan(counters=self.counters), ZmqVan()
        self.port = self.there.bind("127.0.0.1", 0)
        self.back = self.connect(A)

    def connect(self, connection: Connection, *, pipes: bool = True) -> Connection:
        """Open a connection; return how the other side numbers it."""
        self.here.open(connection, "127.0.0.1", self.port)
        self.here.transmit(connection, b"hello", None)
        [hello] = self.come(1)
        offered = self.here.memory.lend(connection)
        assert offered is not None
        memory = self.there.memory if pipes else SharedPayloads(Counters(), most_bytes=MOST)
        assert memory.borrow(hello.connection, offered)
        self.here.memory.share(connection)
        return hello.connection

    def events(self, wanted: int, van: ZmqVan | None = None) -> list[VanEvent]:
        """Poll both until one has had so many events."""
        van = van or self.there
        other = self.here if van is self.there else self.there
        events: list[VanEvent] = []
        deadline = time.monotonic() + 20
        while len(events) < wanted:
            assert time.monotonic() < deadline, events
            other.poll(0)
            events += van.poll(0.01)
        return events

    def come(self, wanted: int, van: ZmqVan | None = None) -> list[Received]:
        events = self.events(wanted, van)
        return [event for event in events if isinstance(event, Received)]

    def close(self) -> None:
        self.here.shut(0)
        self.there.shut(0)


@pytest.fixture
def vans() -> Iterator[Vans]:
    vans = Vans()
    yield vans
    vans.close()


def test_all_messages_of_a_turn_are_one_write_and_come_together(vans):
    for number in range(12):
        assert vans.here.transmit(A, b"head %d" % number, bytes([number]) * 100)
    vans.here.poll(0)
    assert vans.counters.snapshot()["pipe_writes"] == 1
    events = vans.there.poll(1)
    assert [bytes(event.frames[0]) for event in events] == [b"head %d" % number for number in range(12)]
    assert [bytes(event.frames[1]) for event in events] == [bytes([number]) * 100 for number in range(12)]


def test_what_refers_to_a_megabyte_leaves_before_the_turn_ends(vans):
    for number in range(5):
        assert vans.here.transmit(A, b"%d" % number, bytes([number]) * 2**19)
    events = vans.there.poll(1)
    assert [(bytes(event.frames[0]), bytes(event.frames[1][:1])) for event in events] == [
        (b"%d" % number, bytes([number])) for number in range(4)
    ]
    assert vans.counters.snapshot()["pipe_writes"] == 2
    vans.here.poll(0)
    [last] = vans.there.poll(1)
    assert bytes(last.frames[0]) == b"4"


def test_answers_come_back_through_a_pipe(vans):
    vans.there.transmit(vans.back, b"answer", None)
    [event] = vans.come(1, vans.here)
    assert event == Received(A, (b"answer",))
    assert "pipe_writes" not in vans.counters.snapshot()  # of the other van


def test_what_a_full_pipe_does_not_take_comes_later_in_order(vans):
    """1,000 messages of 1 KB, and a pipe holds 64."""
    for number in range(1000):
        assert vans.here.transmit(A, b"%d" % number, bytes(1000))
    for _ in range(5):
        vans.here.poll(0)
    assert vans.here.transmit(A, b"last", None)
    came = vans.come(1001)
    assert [bytes(event.frames[0]) for event in came] == [b"%d" % number for number in range(1000)] + [
        b"last"
    ]


def test_a_peer_that_has_stopped_reading_is_given_no_more_than_a_bound(vans):
    taken = 0
    while taken < 100_000 and vans.here.transmit(A, b"x", None):
        taken += 1
        if taken % 1000 == 0:
            vans.here.poll(0)
    assert 65_536 <= taken < 80_000


def test_one_poll_returns_no_more_than_a_few_messages_and_the_next_goes_on(vans):
    for _ in range(100):
        vans.here.transmit(A, b"x", None)
    vans.here.poll(0)
    sizes: list[int] = []
    while sum(sizes) < 100:
        sizes.append(len(vans.there.poll(1)))
    assert max(sizes) <= 16


def test_a_peer_that_has_not_opened_them_gets_everything_over_the_connection(vans):
    vans.connect(B, pipes=False)
    vans.here.transmit(B, b"to B", b"values")
    vans.here.transmit(A, b"to A", b"values")
    assert sorted(bytes(event.frames[0]) for event in vans.come(2)) == [b"to A", b"to B"]
    assert vans.counters.snapshot()["pipe_writes"] == 1


def test_what_is_no_message_ends_that_connection_alone(vans):
    back = vans.connect(B)
    descriptor = vans.here._pipes._pipes[A].descriptor
    os.write(descriptor, b"\xff" * 100)
    [event] = vans.events(1)
    assert isinstance(event, Broken)
    assert (event.connection, "no message" in event.reason) == (vans.back, True)
    vans.here.transmit(B, b"still there", None)
    assert vans.come(1) == [Received(back, (b"still there",))]


def test_a_reference_to_what_is_not_there_ends_the_connection(vans):
    vans.here._pipes.put(A, b"head", None, b"no reference")
    vans.here.poll(0)
    [event] = vans.events(1)
    assert isinstance(event, Broken)
    assert "not there" in event.reason


def test_what_is_behind_a_damaged_message_is_dropped_and_the_connection_ends_once(vans):
    for header in (b"head", b"behind"):
        vans.here._pipes.put(A, header, None, b"no reference")
    vans.here.transmit(A, b"last", None)
    vans.here.poll(0)
    assert [type(event) for event in vans.events(1)] == [Broken]


def test_a_peer_whose_connection_has_ended_is_not_read_for_as_long_as_it_writes(vans):
    """A process that has the pipe writes without end, as fast as it can."""
    program = """
import os, sys
from netstorm.pslite.host_pipes import _PREFIX
descriptor = int(sys.argv[1])
os.set_blocking(descriptor, True)
messages = _PREFIX.pack(0, 0, 0) * 5000
while True:
    os.write(descriptor, messages)
"""
    descriptor = vans.here._pipes._pipes[A].descriptor
    with subprocess.Popen(
        [sys.executable, "-c", program, str(descriptor)], pass_fds=[descriptor], cwd=ROOT
    ) as writer:
        try:
            vans.come(1)
            read: list[int] = []
            reader = threading.Thread(
                target=lambda: read.append(len(vans.there._pipes.drain(vans.back))), daemon=True
            )
            reader.start()
            reader.join(5)
        finally:
            writer.kill()
    reader.join(20)
    assert 0 < read[0] <= 2**20 // 9 + 1, "more than a pipe can hold"


def test_a_pipe_that_is_not_read_is_given_no_more_than_a_bound_in_bytes(vans, monkeypatch):
    monkeypatch.setattr(host_pipes, "MOST_WAITING_BYTES", 2**24)
    taken = 0
    while taken < 100 and vans.here._pipes.put(A, b"x", bytes(2**20), None):
        taken += 1
    assert taken == 16


def test_what_nobody_reads_any_more_is_refused_and_does_not_end_the_process():
    """Where a script has asked to be ended by SIGPIPE, as those do whose output goes to `head`."""
    program = """
import signal, time
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
from tests.integration.pslite.test_host_pipes import A, Vans
vans = Vans()
vans.there.close(vans.back)
deadline = time.monotonic() + 10
while vans.here.transmit(A, b"x", bytes(1000)) and time.monotonic() < deadline:
    vans.here.poll(0.01)
assert time.monotonic() < deadline
vans.close()
print("alive")
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (0, "alive\n"), run.stderr


def test_a_killed_writer_has_delivered_what_it_had_written():
    program = """
import sys
from netstorm.pslite.van import Connection
from netstorm.pslite.zeromq import ZmqVan
import msgspec
van = ZmqVan()
van.open(Connection(1), "127.0.0.1", int(sys.argv[1]))
van.transmit(Connection(1), msgspec.json.encode(van.memory.lend(Connection(1))), None)
while not van.poll(0.1):
    pass
van.memory.share(Connection(1))
for number in range(50):
    van.transmit(Connection(1), b"%d" % number, bytes(1000))
van.poll(0)
print("written", flush=True)
sys.stdin.readline()
"""
    van = ZmqVan()
    port = van.bind("127.0.0.1", 0)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as writer:
        [hello] = poll_for(van, 1)
        assert isinstance(hello, Received)
        offered = msgspec.json.decode(hello.frames[0], type=SharedMemory)
        assert van.memory.borrow(hello.connection, offered)
        van.transmit(hello.connection, b"welcome", None)
        events = van.poll(0)  # the writer may have been fast
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        events += poll_for(van, 51 - len(events))
    came = [event for event in events[:50] if isinstance(event, Received)]
    assert [bytes(event.frames[0]) for event in came] == [b"%d" % number for number in range(50)]
    assert isinstance(events[50], Broken)
    van.shut(0)


def poll_for(van: ZmqVan, wanted: int) -> list[VanEvent]:
    events: list[VanEvent] = []
    deadline = time.monotonic() + 20
    while len(events) < wanted:
        assert time.monotonic() < deadline, events
        events += van.poll(0.05)
    return events


class Ends:
    """The pipes of two processes, without vans."""

    def __init__(self) -> None:
        self.pollers = [DescriptorPoller(lambda: None) for _ in range(2)]
        self.here, self.there = (HostPipes(poller, Counters(), most_bytes=MOST) for poller in self.pollers)
        self.slot = memoryview(bytearray(SLOT_BYTES))

    def open(self) -> None:
        self.here.offer(A, self.slot)
        self.there.accept(B, int(A), os.getpid(), self.slot)
        self.here.opened(A)

    def poll(self) -> None:
        self.here.flush()
        for poller in self.pollers:
            poller.poll(0)

    def close(self) -> None:
        self.here.close_all()
        self.there.close_all()
        for poller in self.pollers:
            poller.close()


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(-1, 300_000)), max_size=30))
@settings(max_examples=25)
def test_headers_and_payloads_of_any_size_come_as_they_were(sizes):
    ends = Ends()
    ends.open()
    random = np.random.default_rng(1)
    sent = [
        (random.bytes(header), None if payload < 0 else random.bytes(payload)) for header, payload in sizes
    ]
    for header, payload in sent:
        assert ends.here.put(A, header, payload, None)
    came: list[PipeMessage] = []
    deadline = time.monotonic() + 20
    while len(came) < len(sent):
        assert time.monotonic() < deadline
        ends.poll()
        came += [message for _, message in ends.there.read(4) if message is not None]
    assert [(message.header, message.payload) for message in came] == sent
    ends.close()


def test_descriptors_end_with_the_connection_and_the_place_is_free_again():
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    ends = Ends()
    begun = count()
    for _ in range(3):
        ends.open()
        assert A in ends.here
        assert count() == begun + 4
        ends.here.close(A)
        ends.there.close(B)
        assert count() == begun
    ends.here.offer(A, ends.slot)  # nobody opens them
    assert count() == begun + 4
    ends.here.opened(A)
    assert A not in ends.here
    assert count() == begun
    ends.close()


def test_a_connection_whose_place_another_one_has_goes_without(vans):
    late = Connection(int(A) + SLOTS)
    vans.connect(late)
    before = vans.counters.snapshot().get("pipe_writes", 0)
    vans.here.transmit(late, b"over the connection", None)
    assert len(vans.come(1)) == 1
    assert vans.counters.snapshot().get("pipe_writes", 0) == before


@pytest.mark.parametrize("wrong", ["number", "descriptor", "file"])
def test_what_is_no_pair_of_pipes_is_not_opened(wrong):
    ends = Ends()
    ends.here.offer(A, ends.slot)
    if wrong == "descriptor":
        ends.slot[8:12] = (99_999).to_bytes(4, "little")
    with Path("/dev/null").open("rb") as file:
        if wrong == "file":
            ends.slot[8:12] = file.fileno().to_bytes(4, "little")
        ends.there.accept(B, int(A) + (wrong == "number"), os.getpid(), ends.slot)
    assert B not in ends.there
    assert ends.slot[16] == 0
    ends.close()


def test_a_terminal_in_place_of_a_pipe_does_not_become_that_of_its_process():
    """Else it ends with the terminal. A process that has none takes the first one that it opens."""
    program = """
import os, sys
from tests.integration.pslite.test_host_pipes import A, B, Ends
ends = Ends()
ends.here.offer(A, ends.slot)
ends.slot[8:12] = int(sys.argv[1]).to_bytes(4, "little")
ends.there.accept(B, int(A), os.getppid(), ends.slot)
assert B not in ends.there
try:
    os.open("/dev/tty", os.O_RDWR)
except OSError:
    print("none")
"""
    ours, terminal = os.openpty()
    run = subprocess.run(
        [sys.executable, "-c", program, str(terminal)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
    )
    os.close(ours)
    os.close(terminal)
    assert (run.returncode, run.stdout) == (0, "none\n"), run.stderr
