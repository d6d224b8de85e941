"""What only real sockets do: options, strangers on the port, names, heartbeats."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq

from netstorm.errors import SettingsError, UsageError
from netstorm.lab.testing.tcp_proxy import TcpProxy
from netstorm.observe.log import Counters
from netstorm.pslite import tcp_info
from netstorm.pslite import zeromq as zmq_options
from netstorm.pslite.guard import LETTER
from netstorm.pslite.host_addresses import source_towards
from netstorm.pslite.tcp_info import borrowed_socket, shut_down
from netstorm.pslite.van import Broken, Connection, Received, VanEvent, Widened
from netstorm.pslite.zeromq import ZmqVan

A, B = Connection(1), Connection(2)


@pytest.fixture
def vans():
    made = []

    def make(**options):
        van = ZmqVan(**options)
        made.append(van)
        return van, van.bind("127.0.0.1", 0)

    yield make
    for van in made:
        van.shut(0)


def poll_until(van, wanted, seconds=20.0):
    events: list[VanEvent] = []
    deadline = time.monotonic() + seconds
    while not wanted(events):
        assert time.monotonic() < deadline, events
        events += van.poll(0.05)
    return events


def still_works(here, there, port, connection=B):
    here.open(connection, "127.0.0.1", port)
    assert here.transmit(connection, b"still there?", b"payload")
    [event] = poll_until(there, bool)
    assert [bytes(frame) for frame in event.frames] == [b"still there?", b"payload"]


# ------------------------------------------------------------------------------------------------------
# connections that are opened ahead


def opened_ahead(here, there, port):
    """Open a connection ahead, and return it as the other side knows it."""
    here.open_ahead("127.0.0.1", port, b"later")
    [event] = poll_until(there, bool)
    assert event.frames == (b"later",)
    there.admit(event.connection)
    return event.connection


def test_a_connection_that_was_opened_ahead_is_the_one_that_is_used_to_its_address(vans):
    counters = Counters()
    (here, _), (there, port), (other, its_port) = vans(), vans(counters=counters), vans()
    ahead = opened_ahead(here, there, port)
    still_works(here, other, its_port, A)
    here.open(B, "127.0.0.1", port)
    here.transmit(B, b"now", None)
    [event] = poll_until(there, bool)
    assert (event.connection, event.frames) == (ahead, (b"now",))
    there.transmit(ahead, b"answer", None)
    [answer] = poll_until(here, bool)
    assert (answer.connection, answer.frames) == (B, (b"answer",))
    assert counters.get("accepted_connections") == 1
    still_works(here, there, port, Connection(3))
    assert counters.get("accepted_connections") == 2, "each is used once"


def test_one_that_has_ended_meanwhile_is_not_used(vans):
    (here, _), (there, port) = vans(), vans()
    opened_ahead(here, there, port)
    there.shut(0)
    deadline = time.monotonic() + 20
    while marks(port):  # ZeroMQ closes its socket once it has reported the end
        assert time.monotonic() < deadline
        time.sleep(0.01)
    again = ZmqVan()
    again.bind("127.0.0.1", port)
    still_works(here, again, port)
    again.shut(0)


def test_those_that_are_not_needed_are_closed(vans):
    (here, _), (there, port) = vans(), vans()
    ahead = opened_ahead(here, there, port)
    here.close_ahead()
    [event] = poll_until(there, bool)
    assert isinstance(event, Broken)
    assert event.connection == ahead
    still_works(here, there, port)


# ------------------------------------------------------------------------------------------------------
# streams


def local_port(link, number):
    stream = link if not number else link.streams[number - 1]
    with borrowed_socket(stream.descriptor) as connection:
        return connection.getsockname()[1]


def widened(here, there, port):
    """Return a connection with three streams, as the other side knows it."""
    here.open(A, "127.0.0.1", port)
    here.transmit(A, b"first", None)
    [first] = poll_until(there, bool)
    there.admit(first.connection)
    here.widen(A)
    while here.poll(0.01)[-1:] != [Widened(A, 3)]:
        assert not there.poll(0.01), "what makes a stream known is no message"
    return first.connection


def test_what_comes_over_any_stream_is_of_one_connection(vans):
    counters = Counters()
    (here, _), (there, port) = vans(streams=3), vans(counters=counters)
    connection = widened(here, there, port)
    assert counters.get("accepted_connections") == 3
    for number in range(30):
        assert here.transmit(A, b"%d" % number, bytes(1000), number % 3)
    events = poll_until(there, lambda events: len(events) == 30)
    assert {event.connection for event in events} == {connection}
    for stream in range(3):
        numbers = [int(event.frames[0]) for event in events if int(event.frames[0]) % 3 == stream]
        assert numbers == list(range(stream, 30, 3)), "each keeps its order"
    there.transmit(connection, b"answer", None)
    [answer] = poll_until(here, bool)
    assert (answer.connection, answer.frames) == (A, (b"answer",))
    assert here.progress(A).delivered > 3


@pytest.mark.parametrize("number", range(3))
def test_with_one_stream_the_connection_ends_at_both_sides(vans, number):
    (here, _), (there, port) = vans(streams=3), vans()
    connection = widened(here, there, port)
    link = here._links[A]
    shut_down(
        link.descriptor if not number else link.streams[number - 1].descriptor, local_port(link, number)
    )
    [mine] = poll_until(here, bool)
    assert isinstance(mine, Broken)
    assert mine.connection == A
    assert connection in {event.connection for event in poll_until(there, bool)}
    there.close(connection)
    deadline = time.monotonic() + 20
    while there.accepted:  # the others end, too
        assert time.monotonic() < deadline
        there.poll(0.05)
    while there.poll(0.05):
        pass
    still_works(here, there, port)


def test_a_connection_without_a_session_gets_no_streams(vans):
    (here, _), (there, port) = vans(streams=3), vans()
    here.open(A, "127.0.0.1", port)
    here.transmit(A, b"first", None)
    poll_until(there, bool)
    here.widen(A)
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert not here.poll(0.02)
        assert not there.poll(0.02)
    assert here.transmit(A, b"second", bytes(10))
    [second] = poll_until(there, bool)
    assert second.frames[0] == b"second"


def test_where_there_is_no_room_for_streams_the_connection_goes_on_with_one(vans):
    counters = Counters()
    (here, _), (there, port) = vans(streams=3), vans(counters=counters)
    there.accepted.most_in_use = 2
    here.open(A, "127.0.0.1", port)
    here.transmit(A, b"first", None)
    [first] = poll_until(there, bool)
    there.admit(first.connection)
    here.widen(A)
    deadline = time.monotonic() + 20
    while here._links[A].not_used:
        assert time.monotonic() < deadline
        assert not here.poll(0.02)
        assert not there.poll(0.02)
    assert counters.get("refused_streams") == 2
    assert here.transmit(A, b"second", bytes(10))
    [second] = poll_until(there, bool)
    assert (second.connection, second.frames[0]) == (first.connection, b"second")


def test_connections_within_this_machine_have_one_stream(vans, monkeypatch):
    (here, _), (there, port) = vans(streams=3), vans()
    monkeypatch.setattr(zmq_options, "loses", lambda _: True)
    here.open(A, "127.0.0.1", port)
    here.transmit(A, b"first", None)
    [first] = poll_until(there, bool)
    there.admit(first.connection)
    for _ in range(3):
        assert here.transmit(A, b"", bytes(2**20))
        poll_until(there, bool)
    assert here._links[A].not_used == here._links[A].streams == []


# ------------------------------------------------------------------------------------------------------
# options


def test_every_option_is_in_force_and_has_a_reason(vans):
    van, port = vans(max_message_bytes=17 * 2**20, link_timeout_s=4.0)
    van.open(A, "127.0.0.1", port)
    common = zmq_options.both(max_message_bytes=17 * 2**20, link_timeout_s=4.0)
    dealer = van._links[A].socket
    for options, one in (
        (common, van._router),
        (common, dealer),
        (zmq_options.opening(link_timeout_s=4.0), dealer),
        (zmq_options.context_options(), van._context),
    ):
        for option in options:
            assert one.get(getattr(zmq, option.name)) == option.value, option
            assert len(option.reason) > 10
    for option in zmq_options.accepting():
        if option.name == "BACKLOG":  # the only one that libzmq lets us read
            assert van._router.get(zmq.BACKLOG) == option.value


def test_small_messages_are_not_held_back_by_nagle(vans):
    (here, _), (there, port) = vans(), vans()
    here.open(A, "127.0.0.1", port)
    here.transmit(A, b"", None)
    poll_until(there, bool)
    ours = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            one = socket.socket(fileno=int(entry.name))
            if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                with contextlib.suppress(OSError):
                    one.getpeername()
                    ours.add(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            one.detach()
    assert ours == {1}


def marks(port):
    """Return the type-of-service bytes of this process's TCP connections from or to a port."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as one:
            tcp = one.family == socket.AF_INET and one.type == socket.SOCK_STREAM
            if tcp and port in (one.getsockname()[1], one.getpeername()[1]):
                found.append(one.getsockopt(socket.IPPROTO_IP, socket.IP_TOS))
    return found


def test_packets_of_both_ends_are_marked_but_not_those_to_the_one_that_is_left_out(vans):
    (here, _), (there, port), (scheduler, its_port) = vans(dscp=8), vans(dscp=8), vans()
    sender, _ = vans(dscp=46, unmarked=("127.0.0.1", its_port))
    still_works(here, there, port)
    still_works(sender, scheduler, its_port)
    assert marks(port) == [8 << 2, 8 << 2]
    assert marks(its_port) == [0, 0]


def test_a_port_that_is_taken_and_an_address_of_another_machine_are_named_with_what_to_do(vans):
    _, port = vans()
    van = ZmqVan()
    for host, wanted, problem in (
        ("127.0.0.1", port, "Address already in use.*NETSTORM_PORT"),
        ("192.0.2.1", 0, ".*NETSTORM_BIND"),
    ):
        with pytest.raises(SettingsError, match=rf"cannot listen on {host}:{wanted}: {problem}"):
            van.bind(host, wanted)
    van.shut(0)


def test_listening_on_every_interface_is_listening_at_addresses_of_both_families(vans):
    here, _ = vans()
    there = ZmqVan()
    port = there.bind("*", 0)
    still_works(here, there, port)
    if source_towards("::1"):
        here.open(A, "::1", port)
        here.transmit(A, b"six", None)
        [event] = poll_until(there, bool)
        assert event.frames == (b"six",)
    there.shut(0)


# ----------------------------------------------------------------------------------------------------
# strangers


STRANGERS = [
    b"",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    bytes.fromhex("16030100c8010000c403036158") + bytes(range(200)),  # TLS
    b"SSH-2.0-OpenSSH_9.2\r\n",
    bytes(5000),
    b"\xff" + bytes(8) + b"\x7f\x03",  # half a greeting of ZMTP
    b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31) + b"\x9c" * 500,
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00" * 10,  # of ZMTP 1, which announces a huge frame
]


def test_strangers_on_the_port_do_no_harm(vans):
    (here, _), (there, port) = vans(), vans()
    rng = random.Random(4)
    noise = [rng.randbytes(rng.randrange(2000)) for _ in range(20)]
    for close_at_once in (True, False):
        strangers = [(socket.create_connection(("127.0.0.1", port)), hello) for hello in (*STRANGERS, *noise)]
        for stranger, hello in strangers:
            with contextlib.suppress(OSError):
                stranger.sendall(hello)
            if close_at_once:
                stranger.close()
        still_works(here, there, port, Connection(10 + close_at_once))
        for stranger, _ in strangers:
            stranger.close()
    assert there.poll(0.05) == []


@pytest.fixture
def raw_dealer():
    context = zmq.Context()
    made = []

    def make(port, identity):
        dealer = context.socket(zmq.DEALER)
        if identity:
            dealer.set(zmq.ROUTING_ID, identity)
        dealer.set(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        made.append(dealer)
        return dealer

    yield make
    for dealer in made:
        dealer.close()
    context.term()


def test_messages_of_too_many_frames_are_dropped_and_counted_and_empty_frames_are_frames(vans, raw_dealer):
    counters = Counters()
    there, port = vans(counters=counters)
    dealer = raw_dealer(port, LETTER + bytes(7) + b"\1")
    for frames in ([b"frame"] * 3, [b"frame"] * 100, [b""], [b"", b""]):
        dealer.send_multipart(frames)
    first, second = poll_until(there, lambda events: len(events) == 2)
    assert (first.frames, len(second.frames), len(second.frames[1])) == ((b"",), 2, 0)
    assert counters.get("dropped_frames") == 2


@pytest.mark.parametrize("identity", [b"", b"N", b"X" + bytes(8), b"N" + bytes(7), b"N" * 255])
def test_whoever_chooses_another_kind_of_identity_is_no_van_and_logged_with_its_address(
    vans, raw_dealer, caplog, identity
):
    counters = Counters()
    there, port = vans(counters=counters)
    dealer = raw_dealer(port, identity)
    dealer.send_multipart([b"one", b"two"])
    deadline = time.monotonic() + 60
    while not counters.get("dropped_identity"):
        assert time.monotonic() < deadline
        assert there.poll(0.05) == []
    assert "127.0.0.1" in caplog.text


def test_an_address_of_ipv4_is_logged_as_such_by_a_socket_of_both_families(raw_dealer, caplog):
    counters = Counters()
    there = ZmqVan(counters=counters)
    raw_dealer(there.bind("*", 0), b"strange").send(b"one")
    deadline = time.monotonic() + 10
    while not counters.get("dropped_identity"):
        assert time.monotonic() < deadline
        there.poll(0.05)
    there.shut(0)
    assert "from 127.0.0.1:" in caplog.text


def test_nobody_takes_over_a_connection_by_naming_its_identity(vans, raw_dealer):
    there, port = vans()
    identity = LETTER + bytes(7) + b"\1"
    honest = raw_dealer(port, identity)
    honest.send(b"honest")
    [first] = poll_until(there, bool)
    thief = raw_dealer(port, identity)
    thief.send(b"thief")
    assert there.poll(0.3) == []
    there.transmit(first.connection, b"for the honest", None)
    assert honest.poll(5000)
    assert honest.recv() == b"for the honest"


def test_a_frame_that_is_too_large_ends_the_connection_that_it_came_over_and_nothing_else(vans):
    here, _ = vans(max_message_bytes=2**26)
    there, port = vans(max_message_bytes=17 * 2**20)
    here.open(A, "127.0.0.1", port)
    here.transmit(A, b"too large", bytes(18 * 2**20))
    [event] = poll_until(here, bool)
    assert isinstance(event, Broken)
    assert there.poll(0.05) == []
    still_works(here, there, port)


# ---------------------------------------------------------------------------------------- connections that
# fail


def test_a_name_is_looked_up_and_what_was_handed_over_meanwhile_is_sent(vans):
    (here, _), (there, port) = vans(), vans()
    here.open(A, "localhost", port)
    for number in range(10):
        here.transmit(A, b"%d" % number, b"payload")
    received: list[bytes] = []
    deadline = time.monotonic() + 20
    while len(received) < 10:
        assert time.monotonic() < deadline
        here.poll(0.01)
        received += [event.frames[0] for event in there.poll(0.01)]
    assert received == [b"%d" % number for number in range(10)]


def test_a_name_without_an_address_breaks_the_connection_and_says_so(vans):
    here, _ = vans()
    here.open(A, "no-such-host.invalid", 1)
    here.transmit(A, b"header", None)
    [event] = poll_until(here, bool)
    assert event.connection == A
    assert "no address for the name 'no-such-host.invalid'" in event.reason


def test_when_no_descriptors_are_left_a_connection_breaks_and_the_van_lives(vans):
    (here, _), (there, port) = vans(), vans()
    here.poll(0.0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open("/dev/null", os.O_RDONLY))
        here.open(A, "127.0.0.1", port)
        [event] = here.poll(0.0)
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(event, Broken)
    assert event.connection == A
    assert "ulimit -n" in event.reason
    still_works(here, there, port)


def test_a_connection_closed_while_its_name_is_looked_up_is_forgotten(vans):
    here, _ = vans()
    here.open(A, "localhost", 1)
    here.close(A)
    assert here.poll(0.2) == []


def test_a_host_that_accepts_and_says_nothing_is_given_up(vans):
    here, _ = vans(link_timeout_s=0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        here.open(A, *silent.getsockname())
        [event] = poll_until(here, bool)
    assert isinstance(event, Broken)
    assert "does not speak ZeroMQ's protocol" in event.reason


def test_a_host_that_speaks_another_protocol_is_given_up(vans):
    here, _ = vans()
    with socket.create_server(("127.0.0.1", 0)) as server:
        here.open(A, *server.getsockname())
        connection, _ = server.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20)
        connection.close()
        # libzmq may take the text for a message of its first protocol, which had no greeting
        events = poll_until(here, lambda events: any(isinstance(event, Broken) for event in events))
    assert {event.connection for event in events} == {A}
    assert [type(event) for event in events].index(Broken) == len(events) - 1


def test_a_short_silence_breaks_nothing(vans):
    here, _ = vans(link_timeout_s=4.0)
    there, port = vans(link_timeout_s=4.0)
    with TcpProxy("127.0.0.1", port) as proxy:
        here.open(A, proxy.host, proxy.port)
        here.transmit(A, b"hello", None)
        poll_until(there, bool)
        proxy.pause()
        here.transmit(A, b"later", None)
        assert there.poll(0.3) == []
        proxy.resume()
        [event] = poll_until(there, bool)
        assert event.frames == (b"later",)
        assert here.poll(0.1) == []


def test_what_came_before_the_end_is_delivered_before_it(vans):
    (here, _), (there, port) = vans(), vans()
    here.open(A, "127.0.0.1", port)
    here.transmit(A, b"question", None)
    [question] = poll_until(there, bool)
    for number in range(10):
        there.transmit(question.connection, b"%d" % number, None)
    there.shut(1.0)
    time.sleep(0.2)
    events = poll_until(here, lambda events: len(events) == 11)
    assert [event.frames[0] for event in events[:-1]] == [b"%d" % number for number in range(10)]
    assert isinstance(events[-1], Broken)


# ---------------------------------------------------------------------------------------------------- the
# rest


def test_another_descriptor_can_be_watched(vans):
    van, _ = vans()
    ours, theirs = socket.socketpair()
    heard = []
    van.watch(ours.fileno(), lambda: heard.append(ours.recv(10)))
    van.poll(0.05)
    theirs.send(b"tick")
    van.poll(5.0)
    assert heard == [b"tick"]
    van.unwatch(ours.fileno())
    van.unwatch(ours.fileno())
    theirs.send(b"tock")
    van.poll(0.05)
    assert heard == [b"tick"]
    ours.close()
    theirs.close()


def test_a_wake_up_from_another_thread_ends_a_poll(vans):
    van, _ = vans()
    van.poll(0.01)
    timer = threading.Timer(0.1, van.wake)
    timer.start()
    began = time.monotonic()
    van.poll(20.0)
    assert time.monotonic() - began < 10
    timer.join()


def test_waking_a_van_that_was_shut_does_nothing(vans):
    van, _ = vans()
    van.shut(0)
    van.wake()
    with pytest.raises(UsageError):
        van.open(A, "127.0.0.1", 1)


def test_a_poll_returns_a_bounded_number_of_messages_from_everybody_in_turn(vans):
    there, port = vans()
    others = [vans()[0] for _ in range(3)]
    for other in others:
        other.open(A, "127.0.0.1", port)
        for _ in range(200):
            other.transmit(A, b"", None)
    first = poll_until(there, bool)
    time.sleep(0.5)
    events = there.poll(0.0)
    assert 0 < len(events) <= 16
    received = len(first) + len(events)
    while received < 600:
        received += len(poll_until(there, bool))
    assert there.poll(0.05) == []


def test_idle_connections_cost_next_to_nothing(vans):
    van, port = vans()

    def cost(turns=300):
        began = time.thread_time()
        for _ in range(turns):
            van.poll(0.0)
        return (time.thread_time() - began) / turns

    van.poll(0.05)
    alone = min(cost() for _ in range(5))
    for number in range(1, 101):
        van.open(Connection(number), "127.0.0.1", port)
        van.transmit(Connection(number), b"", None)
    received = 0
    while received < 100:
        received += len([event for event in van.poll(0.05) if isinstance(event, Received)])
    van.poll(0.2)
    assert min(cost() for _ in range(5)) < alone + 20e-6


def test_a_peer_that_has_stopped_reading_breaks_its_connection_and_fills_no_memory(vans, monkeypatch):
    small = zmq_options.both(max_message_bytes=2**24, link_timeout_s=10)
    monkeypatch.setattr(
        zmq_options,
        "both",
        lambda **_: tuple(
            zmq_options.SocketOption("SNDHWM", 50, "") if option.name == "SNDHWM" else option
            for option in small
        ),
    )
    (here, _), (there, port) = vans(), vans()
    with TcpProxy("127.0.0.1", port) as proxy:
        here.open(A, proxy.host, proxy.port)
        here.transmit(A, b"", None)
        poll_until(there, bool)
        proxy.pause()
        taken = 0
        while here.transmit(A, b"", bytes(1_000_000)):
            taken += 1
            assert taken < 1000
        assert [event.connection for event in here.poll(0.0)] == [A]


@pytest.mark.parametrize("way", ["opened here", "opened by others"])
def test_what_waits_for_a_peer_that_has_stopped_reading_is_bounded_in_bytes(vans, monkeypatch, way):
    """Beside what waits here there are 64 MB in ZeroMQ's queue at the other end."""
    monkeypatch.setattr(tcp_info, "MOST_WAITING_BYTES", 2**23)
    (here, _), (there, port) = vans(), vans()
    here.open(A, "127.0.0.1", port)
    here.transmit(A, b"", None)
    [event] = poll_until(there, bool)
    there.admit(event.connection)
    sender, connection = (here, A) if way == "opened here" else (there, event.connection)
    here.poll(0.0)
    taken = 0
    while sender.transmit(connection, b"", bytes(2**16)):
        taken += 1
        assert taken < 10_000
    [ended] = poll_until(sender, bool)
    assert (type(ended), ended.connection) == (Broken, connection)


def test_more_than_what_may_wait_goes_to_a_peer_that_reads(vans, monkeypatch):
    monkeypatch.setattr(tcp_info, "MOST_WAITING_BYTES", 2**22)
    monkeypatch.setattr(tcp_info, "_FLIGHTS", 0)
    (here, _), (there, port) = vans(), vans()
    here.open(A, "127.0.0.1", port)
    for number in range(40):
        assert here.transmit(A, b"%d" % number, bytes(2**20))
        here.poll(0.0)
        poll_until(there, bool)
