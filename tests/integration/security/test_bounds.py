"""What one process can take from another: memory, connections, descriptors; over real, encrypted sockets."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer, checksum, encode_body, open_frames, seal
from netstorm.pslite import tcp_info, zeromq
from netstorm.pslite.io_thread import Driver
from netstorm.pslite.machine import Connect, ForwardedBytes, Send
from netstorm.pslite.van import Broken, Connection, Received
from netstorm.pslite.zeromq import SocketOption
from tests.integration.forking import ForkedProcess
from tests.integration.jobs import Job
from tests.integration.scheduler.scripted import wait_for
from tests.integration.security.test_impersonation import KEY, hello, node_of, started
from tests.integration.security.vans import KeyedVan, events_of, poll_all
from tests.unit.scheduler.driving import Driven

__all__ = ["started"]

MIB = 1 << 20


class Hostile:
    """A connection of a process that has the job's key, and says what it likes."""

    def __init__(self, van: KeyedVan, port: int) -> None:
        self.van = van
        self.connection = Connection(time.monotonic_ns())
        van.van.open(self.connection, "127.0.0.1", port)

    def says(self, frame: bytes, payload: bytes | None = None) -> None:
        self.van.van.transmit(self.connection, frame, payload)

    def hears(self) -> list[m.Message]:
        return [
            open_frames(event.frames[0], len(event.frames)).message
            for event in events_of(self.van, Received)
            if event.connection == self.connection
        ]

    def greets(self, said: bytes) -> None:
        self.says(said)
        poll_all(self.hears, self.van)
        assert isinstance(self.hears()[0], m.Welcome)

    def is_cut(self) -> bool:
        return self.connection in [event.connection for event in events_of(self.van, Broken)]


PART: dict[str, Any] = {
    "key": 1,
    "round": 0,
    "chunk": 0,
    "phase": m.Phase.REDUCE,
    "version": 1,
    "tree": 0,
    "contributors": b"\x02",
    "dtype": "float32",
}


def part(key: int, sequence: int, payload: bytes, **along: Any) -> bytes:
    body = m.Part(**{**PART, "key": key, **along})
    return seal(encode_body(body), sequence=sequence, sent_at=1, payload_crc=checksum(payload))


def on_thread(driver: Driver[Any], function: Callable[[], Any]) -> Any:
    return driver.thread.call(lambda _: function()).result(20)


def cut_off(connections: list[socket.socket]) -> list[socket.socket]:
    """Return the connections that their other side has ended."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLRDHUP)
    ended = {descriptor for descriptor, _ in poll.poll(0)}
    return [connection for connection in connections if connection.fileno() in ended]


@pytest.fixture
def strangers() -> Iterator[Callable[[int, int], list[socket.socket]]]:
    """Connect to a port, and say nothing."""
    with ExitStack() as stack:

        def connect(port: int, number: int) -> list[socket.socket]:
            return [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
                for _ in range(number)
            ]

        yield connect


# -------------------------------------------------------------------------------------------------- memory


def test_parts_of_keys_that_there_are_not_are_kept_up_to_a_bound_and_the_member_is_named(
    keyed, started, caplog, monkeypatch
):
    hostile, other = keyed(KEY), keyed(KEY)
    node = node_of(hostile, other)
    monkeypatch.setattr(node.waiting, "_of_one", 8 * MIB)
    driver, counters = started(node, 0, ordered=lambda _: False)
    one = Hostile(hostile, driver.port)
    one.greets(hello(1, 101, 0))
    payload = bytes(MIB)
    for number in range(1, 17):
        one.says(part(1000 + number, number, payload), payload)
    poll_all(lambda: counters.get("messages_no_room") >= 9, hostile)
    assert node.counters.get("parts_kept_early") == 7
    assert "cannot keep a message from rank 1" in caplog.text
    poll_all(lambda: sum(isinstance(heard, m.Nack) for heard in one.hears()) == 9, hostile)
    left = [heard.sequence for heard in one.hears() if isinstance(heard, m.Nack)]
    assert left == list(range(8, 17))
    two = Hostile(other, driver.port)
    two.greets(hello(2, 102, 0))
    two.says(part(1, 1, payload), payload)
    poll_all(lambda: node.counters.get("parts_kept_early") == 8, other, hostile)


def test_parts_to_forward_are_kept_up_to_a_bound_and_the_member_that_sends_more_is_told(
    keyed, started, caplog
):
    hostile, slow = keyed(KEY), keyed(KEY)
    node = node_of(hostile, slow)
    outbox: Any = node._outbox
    outbox.forwarded = ForwardedBytes(16 * MIB)
    outbox.add(Connect(peer=Peer(2), host="127.0.0.1", port=slow.port))  # it never answers
    driver, _ = started(node, 0, ordered=lambda _: False)
    one = Hostile(hostile, driver.port)
    one.greets(hello(1, 101, 0))
    payload = bytes(MIB)
    for number in range(1, 17):
        one.says(part(1, number, payload, is_aux=True, path=(1, 0, 2), hop=1), payload)
    poll_all(lambda: isinstance(one.hears()[-1], m.Refused), hostile)
    assert node.counters.get("relayed") == 7
    *_, acknowledged, refused = one.hears()
    assert acknowledged == m.Ack(received=7), "the others go another way"
    waiting = f"it has sent a message to forward, and {7 * (MIB + 1024)} bytes from it wait here"
    assert isinstance(refused, m.Refused)
    assert refused.reason.startswith(waiting)
    assert "the session with it is ended" in caplog.text


def test_values_for_the_scheduler_are_refused_before_they_are_held_and_the_connection_is_cut(
    keyed, started, caplog
):
    hostile = keyed(KEY)
    driver, counters = started(Driven().machine, -1)
    one = Hostile(hostile, driver.port)
    one.greets(hello(-1, 101, -1))
    payload = bytes(MIB)
    for sequence in range(2, 20):  # 1 is missing, so a correct receiver would hold them
        one.says(part(1, sequence, payload), payload)
    poll_all(one.is_cut, hostile)
    assert counters.get("dropped_protocol") == 1
    assert f"Part with {MIB} bytes of values, which no message between these two processes has" in caplog.text
    assert f"refused a connection from 127.0.0.1 (key {hostile.user})" in caplog.text
    assert on_thread(driver, lambda: driver.endpoint._sessions.held_bytes.room(Peer(0))) == float("inf")


def test_a_member_that_asks_for_values_again_and_reads_none_makes_no_more_than_a_bound_wait(
    keyed, started, monkeypatch
):
    """Each request, of less than 100 bytes, is for a megabyte."""
    monkeypatch.setattr(tcp_info, "MOST_WAITING_BYTES", 32 * MIB)
    few = SocketOption("RCVHWM", 2, "the test's own memory")
    accepting = zeromq.accepting
    monkeypatch.setattr(zeromq, "accepting", lambda: (*accepting(), few))
    hostile = keyed(KEY)
    driver, _ = started(node_of(hostile), 0, ordered=lambda _: False)
    connect = Connect(peer=Peer(1), host="127.0.0.1", port=hostile.port)
    on_thread(driver, lambda: driver.endpoint.connect(connect, time.monotonic()))
    values = Send(peer=Peer(1), message=m.Part(**PART), payload=bytes(MIB))
    on_thread(driver, lambda: driver.endpoint.send(values, time.monotonic()))
    poll_all(lambda: events_of(hostile, Received), hostile)
    first = events_of(hostile, Received)[0]
    said = open_frames(first.frames[0], 1).message
    assert isinstance(said, m.Hello)

    def say(message: m.Message) -> None:
        header = seal(encode_body(message), sequence=0, sent_at=1, payload_crc=None)
        assert hostile.van.transmit(first.connection, header, None)

    say(m.Welcome(incarnation=101, session=said.session, received=0, token=1))

    def counted(name: str) -> int:
        return int(on_thread(driver, driver.endpoint.links)[Peer(1), True][name])

    for _ in range(400):  # one at a time: those that come together are one
        before = counted("messages_resent")
        say(m.Nack(sequence=1))
        deadline = time.monotonic() + 2
        while counted("messages_resent") == before and time.monotonic() < deadline:
            time.sleep(0.001)
        if counted("messages_resent") == before:
            break
    assert 16 < counted("messages_resent") < 300


# --------------------------------------------------------------------------------------------- connections


def test_a_key_holder_that_says_what_no_process_says_is_cut_and_named_by_address_and_key(
    keyed, started, caplog
):
    hostile = keyed(KEY)
    driver, counters = started(Driven().machine, -1)
    held = [Hostile(hostile, driver.port) for _ in range(5)]
    for number, one in enumerate(held):
        # a message of a session, garbage, and values that nobody has asked for
        said = [
            seal(encode_body(m.Query(number=1)), sequence=0, sent_at=1, payload_crc=None),
            b"x",
            b"x" * 99,
        ]
        one.says(said[number % 3], bytes(MIB) if number % 2 else None)
    poll_all(lambda: all(one.is_cut() for one in held), hostile)
    assert counters.get("refused_message") == 5
    assert f"refused a connection from 127.0.0.1 (key {hostile.user}): " in caplog.text
    Hostile(hostile, driver.port).greets(hello(-1, 101, -1))


def test_connections_that_a_session_has_left_do_not_add_up(keyed, started):
    hostile = keyed(KEY)
    driver, counters = started(Driven().machine, -1)
    waiting = driver.van.accepted
    on_thread(driver, lambda: setattr(waiting, "most", 8))
    first = hello(-1, 101, -1)
    held = []
    for _ in range(12):
        held.append(Hostile(hostile, driver.port))
        held[-1].greets(first)  # each time the session goes over to the new connection
    poll_all(lambda: sum(one.is_cut() for one in held) == 12 - 1 - 4, hostile)
    assert not held[-1].is_cut(), "the session's own"
    assert counters.get("refused_waiting") == 7


def test_strangers_that_say_nothing_do_not_keep_out_who_has_the_key(keyed, strangers):
    here, there = keyed(KEY), keyed(KEY)
    there.van.accepted.most = 40
    for number in range(1, 4):
        strangers(there.port, 50)
        here.van.open(Connection(number), "127.0.0.1", there.port)
        here.van.transmit(Connection(number), b"hello", None)
        strangers(there.port, 50)
        poll_all(partial(lambda wanted: len(events_of(there, Received)) == wanted, number), here, there)
    assert there.counters.get("refused_waiting") >= 250
    assert not events_of(here, Broken)


def test_strangers_that_connect_and_leave_without_end_leave_others_their_turn(keyed, caplog):
    there = keyed(KEY)
    caplog.set_level("ERROR")
    for _ in range(700):
        with socket.create_connection(("127.0.0.1", there.port), timeout=20) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(0.5)  # ZeroMQ's thread tells of most of them
    before, most, deadline = 0, 0, time.monotonic() + 20
    while before < 700 and time.monotonic() < deadline:
        there.van.poll(0.0)
        now = there.counters.get("accepted_connections")
        before, most = now, max(most, now - before)
    assert 0 < most <= 256
    assert before == 700


def test_what_strangers_may_take_is_bounded_while_a_member_sends_without_end(keyed, strangers):
    """ZeroMQ itself waits for a handshake for twice the link time-out."""
    here, there = keyed(KEY), keyed(KEY, link_timeout_s=3.0)
    here.van.open(Connection(1), "127.0.0.1", there.port)
    here.van.transmit(Connection(1), b"x", None)
    poll_all(lambda: events_of(there, Received), here, there)
    for _ in range(5000):
        here.van.transmit(Connection(1), b"x", None)
    strangers(there.port, 1)
    deadline = time.monotonic() + 5
    while not there.counters.get("refused_silent"):
        assert time.monotonic() < deadline
        for _ in range(24):  # more than a turn reads
            here.van.transmit(Connection(1), b"x", None)
        time.sleep(0.002)  # for what has come
        there.van.poll(0.0)


FEW_DESCRIPTORS = """
import resource, sys, time
from pathlib import Path
from netstorm.pslite.zeromq import ZmqVan
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
van = ZmqVan()
print(van.bind("127.0.0.1", 0), resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
most = 0
while not Path(sys.argv[0]).with_name("stop").exists():
    van.poll(0.01)
    open("/etc/hostname").close()
    most = max(most, len(van.accepted))
print(most, flush=True)
van.shut(0.0)
"""


@pytest.mark.parametrize(("soft", "hard", "raised"), [(128, 2000, 2000), (256, 256, 256)])
def test_strangers_leave_descriptors_to_the_script(tmp_path, strangers, soft, hard, raised):
    (tmp_path / "script.py").write_text(FEW_DESCRIPTORS)
    out, err = tmp_path / "out", tmp_path / "err"
    out.touch()
    assert Job.forker is not None
    process = ForkedProcess(
        Job.forker,
        words=[str(tmp_path / "script.py"), str(soft), str(hard)],
        environment=dict(os.environ),
        out=str(out),
        err=str(err),
    )
    try:
        wait_for(lambda: "\n" in out.read_text(), "the port")
        port, limit = map(int, out.read_text().split())
        assert limit == raised
        there: list[socket.socket] = []
        for _ in range(10):  # a burst lasts until the van's thread runs again, so each one may wait for that
            there.extend(strangers(port, 40))
            wait_for(lambda: len(there) - len(cut_off(there)) <= raised // 8, "room for the next")
        (tmp_path / "stop").touch()
        assert process.wait(60) == 0, err.read_text()
        assert 0 < int(out.read_text().splitlines()[1]) <= raised // 8
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
