"""Connections without a session are few, young, and of few bytes: the others are shut down."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from netstorm.observe.log import Counters, Drops
from netstorm.pslite import guard
from netstorm.pslite.guard import (
    LETTER,
    AcceptedConnections,
    connection_of,
    identity_of,
    main_of,
    of_stream,
)
from netstorm.pslite.van import Connection

A = Connection(-1)


class Accepted:
    """Accepted connections, and what the clients at their other ends see."""

    def __init__(self, stack: ExitStack, most: int, max_message_bytes: int) -> None:
        self.counters = Counters()
        self.table = AcceptedConnections(
            Drops(self.counters, counted_as="refused"),
            limit_s=10.0,
            max_message_bytes=max_message_bytes,
            rng=random.Random(1),
        )
        self.table.most = most
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.table.port = self._listener.getsockname()[1]
        self._stack = stack

    def connect(self, now: float, address: str = "127.0.0.1") -> tuple[socket.socket, int]:
        """Return a client, and the descriptor of its connection here."""
        client = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.table.port)))
        client.settimeout(10.0)
        here = self._stack.enter_context(self._listener.accept()[0])
        self.table.accepted(here.fileno(), address, now)
        return client, here.fileno()


@contextmanager
def accepting(most: int = 100, max_message_bytes: int = 2**26) -> Iterator[Accepted]:
    with ExitStack() as stack:
        yield Accepted(stack, most, max_message_bytes)


def is_shut(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


def test_a_silent_connection_is_shut_down_after_a_while() -> None:
    with accepting() as here:
        client, _ = here.connect(100.0)
        for tenth in range(99):
            here.table.check(100.0 + tenth / 10)
        assert not is_shut(client)
        for tenth in range(99, 103):
            here.table.check(100.0 + tenth / 10)
        assert is_shut(client)
        assert here.counters.get("refused_silent") == 1
        assert not here.table


@pytest.mark.parametrize(("round_trip_s", "limit_s"), [(0.1, 10.0), (2.0, 16.0), (5.0, 20.0)])
def test_a_connection_from_far_away_has_eight_round_trips_and_twice_the_limit_at_most(
    monkeypatch: pytest.MonkeyPatch, round_trip_s: float, limit_s: float
) -> None:
    monkeypatch.setattr(guard, "progress_of", lambda _: SimpleNamespace(smoothed_rtt_s=round_trip_s))
    with accepting() as here:
        client, _ = here.connect(100.0)
        now = 100.0
        while not is_shut(client):
            now += 0.5
            here.table.check(now)
            assert now < 130.0
        assert now == pytest.approx(100.0 + limit_s, abs=0.5)


def test_a_connection_from_far_away_that_sends_too_much_is_shut_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "progress_of", lambda _: SimpleNamespace(smoothed_rtt_s=5.0))
    received = 0
    monkeypatch.setattr(guard, "bytes_received", lambda _: received)
    with accepting() as here:
        client, _ = here.connect(100.0)
        for second in range(101, 115):  # for longer than one that is near may take
            here.table.check(float(second))
        assert not is_shut(client)
        received = 10**9
        here.table.check(115.0)
        assert is_shut(client)


def test_a_connection_over_which_a_message_has_come_waits_for_a_decision() -> None:
    with accepting() as here:
        client, descriptor = here.connect(100.0)
        here.table.heard(A, descriptor, "")
        for second in range(100, 200):
            here.table.check(float(second))
        assert not is_shut(client)
        assert len(here.table) == 1, "it counts"
        here.table.admitted(A)
        assert not here.table


def test_a_connection_that_has_no_session_any_more_is_shut_down_after_a_while() -> None:
    with accepting() as here:
        client, descriptor = here.connect(100.0)
        here.table.heard(A, descriptor, "")
        here.table.admitted(A)
        here.table.left(A, 150.0)
        for half in range(300, 320):
            here.table.check(half / 2)
        assert not is_shut(client)
        here.table.check(160.1)
        assert is_shut(client)
        assert here.counters.get("refused_left") == 1


def test_who_says_what_no_process_says_is_shut_down_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with accepting() as here:
        client, descriptor = here.connect(100.0)
        here.table.heard(A, descriptor, "its key")
        here.table.refuse(A, "message", "it says nothing", 101.0)
        assert is_shut(client)
        assert "from 127.0.0.1 (key its key): it says nothing" in caplog.text


def test_connections_of_one_address_are_half_of_all_at_most() -> None:
    with accepting(most=8) as here:
        clients = [here.connect(100.0, "10.0.0.1")[0] for _ in range(9)]
        others = [here.connect(100.0, f"10.0.1.{number}")[0] for number in range(4)]
        assert sum(map(is_shut, clients)) == 5
        assert not any(map(is_shut, others))
        assert len(here.table) == 8
        more = [here.connect(100.0, f"10.0.2.{number}")[0] for number in range(3)]
        assert sum(map(is_shut, clients)) == 8, "of several addresses it is the one with the most"
        assert not any(map(is_shut, others + more))
        assert here.counters.get("refused_waiting") == 8


def test_sessions_of_one_address_leave_room_for_those_of_others() -> None:
    with accepting() as here:
        here.table.most_in_use = 3
        clients = []
        for number in range(1, 6):
            client, descriptor = here.connect(100.0, "10.0.0.1")
            clients.append(client)
            here.table.heard(Connection(-number), descriptor, "")
            here.table.admitted(Connection(-number))
        assert [is_shut(client) for client in clients] == [False] * 3 + [True] * 2
        assert here.counters.get("refused_sessions") == 2
        other, _ = here.connect(100.0, "10.0.0.2")
        assert not is_shut(other)
        here.table.left(Connection(-1), 100.0)
        assert not is_shut(here.connect(100.0, "10.0.0.1")[0]), "one has no session any more"


def test_whose_end_comes_late_has_ended_and_the_next_one_has_its_descriptor() -> None:
    with accepting() as here:
        ended: list[Connection] = []
        here.table.on_end = ended.append
        _, descriptor = here.connect(100.0)
        here.table.heard(A, descriptor, "")
        assert here.table.descriptor(A) == descriptor
        here.table.heard(Connection(-2), descriptor, "")
        assert ended == [A]
        assert (here.table.descriptor(A), here.table.descriptor(Connection(-2))) == (-1, descriptor)
        here.table.ended(descriptor)
        assert ended == [A, Connection(-2)]
        here.table.heard(Connection(-3), descriptor, "")
        assert ended[2:] == [Connection(-3)], "it had ended before its message was read"


def test_a_connection_that_was_shut_down_does_not_wait_again() -> None:
    with accepting() as here:
        _, descriptor = here.connect(100.0)
        here.table.heard(A, descriptor, "")
        here.table.refuse(A, "message", "it says nothing", 101.0)
        here.table.admitted(A)
        here.table.left(A, 102.0)
        here.table.refuse(A, "message", "it says nothing", 103.0)
        assert not here.table
        assert here.counters.get("refused_message") == 1


def test_an_address_of_ipv6_counts_as_its_network() -> None:
    with accepting(most=4) as here:
        for number in range(5):
            here.connect(100.0, f"2001:db8::{number}")
        assert len(here.table) == 2


def test_who_has_said_the_greeting_is_not_shut_down_while_others_are_silent() -> None:
    with accepting(most=40) as here:
        honest, _ = here.connect(100.0)
        honest.sendall(bytes(64))
        strangers = [here.connect(100.0)[0] for _ in range(200)]
        assert not is_shut(honest)
        assert sum(map(is_shut, strangers)) == 181


def test_the_newest_silent_connections_are_not_the_ones_to_go() -> None:
    with accepting(most=40) as here:
        [here.connect(100.0) for _ in range(100)]
        newest, _ = here.connect(100.0)
        [here.connect(100.0) for _ in range(8)]
        assert not is_shut(newest), "its greeting may be on its way"


def test_a_newcomer_is_not_shut_down_because_all_others_have_said_the_greeting() -> None:
    with accepting(most=40) as here:
        for stranger in [here.connect(100.0)[0] for _ in range(20)]:
            stranger.sendall(bytes(64))
        here.table.check(100.3)
        newcomer, _ = here.connect(100.3)
        assert not is_shut(newcomer)
        assert here.counters.get("refused_waiting") == 1


def test_connections_that_nobody_uses_go_first_and_who_waits_for_a_decision_for_long_makes_room() -> None:
    with accepting(most=8) as here:
        used, descriptor = here.connect(100.0)
        here.table.heard(A, descriptor, "")
        here.table.left(A, 100.0)
        others = [here.connect(100.0) for _ in range(4)]
        assert is_shut(used)
        assert not any(is_shut(client) for client, _ in others)
        for number, (_, descriptor) in enumerate(others, start=2):
            here.table.heard(Connection(-number), descriptor, "")
        assert not any(is_shut(here.connect(111.0)[0]) for _ in range(4))
        assert all(is_shut(client) for client, _ in others)


def test_of_connections_that_may_have_announced_frames_few_are_kept() -> None:
    with accepting(most=400, max_message_bytes=2**29) as here:
        clients = [here.connect(100.0)[0] for _ in range(40)]
        for client in clients:
            client.sendall(bytes(80))
        here.table.check(100.3)
        assert sum(map(is_shut, clients)) == 8, "four times 8 of one address, while they are young"
        here.table.check(101.2)
        assert sum(map(is_shut, clients)) == 32
        assert here.counters.get("refused_waiting") == 32


def test_a_connection_that_sends_much_before_its_first_message_is_shut_down() -> None:
    with accepting() as here:
        client, descriptor = here.connect(100.0)
        other, _ = here.connect(100.0)
        with socket.socket(fileno=descriptor) as connection:
            try:
                for _ in range(20):
                    client.sendall(bytes(1 << 16))
                    connection.recv(1 << 16, socket.MSG_WAITALL)
            finally:
                connection.detach()
        here.table.check(100.5)
        here.table.check(101.0)
        assert is_shut(client)
        assert not is_shut(other)
        assert here.counters.get("refused_large") == 1


def test_what_this_process_was_too_busy_to_read_is_not_held_against_a_connection() -> None:
    with accepting() as here:
        client, _ = here.connect(100.0)
        here.table.check(100.5)
        here.table.check(150.0)
        assert not is_shut(client)


# --------------------------------------------------------------------------------- streams of one connection

MAIN = LETTER + bytes(range(1, 17))
STREAMS = [connection_of(of_stream(MAIN, number)) for number in range(3)]


def with_streams(here: Accepted) -> tuple[list[socket.socket], list[int]]:
    """Return the clients of a connection with three streams that has a session, and their descriptors."""
    pairs = [here.connect(100.0) for _ in STREAMS]
    here.table.heard(STREAMS[0], pairs[0][1], "")
    here.table.admitted(STREAMS[0])
    for stream, (_, descriptor) in zip(STREAMS[1:], pairs[1:], strict=True):
        here.table.heard(stream, descriptor, "")
    return [client for client, _ in pairs], [descriptor for _, descriptor in pairs]


def test_streams_are_known_by_their_connection() -> None:
    assert [main_of(stream) for stream in STREAMS] == [STREAMS[0]] * 3
    assert identity_of(STREAMS[0]) == MAIN
    assert len(set(STREAMS)) == 3


def test_streams_of_a_connection_with_a_session_wait_for_nothing() -> None:
    with accepting() as here:
        clients, _ = with_streams(here)
        assert not here.table
        assert all(map(here.table.is_in_use, STREAMS))
        for second in range(100, 200):
            here.table.check(float(second))
        assert not any(map(is_shut, clients))
        here.table.left(STREAMS[0], 200.0)
        for second in range(200, 220):
            here.table.check(float(second))
        assert all(map(is_shut, clients)), "they go with it"


def test_a_stream_of_a_connection_without_a_session_waits_as_all_others_do() -> None:
    with accepting(most=2) as here:
        client, descriptor = here.connect(100.0)
        here.table.heard(STREAMS[1], descriptor, "")
        assert not here.table.is_in_use(STREAMS[1])
        assert len(here.table) == 1
        here.table.refuse(STREAMS[0], "message", "it has sent what no process sends", 100.0)
        assert is_shut(client)


@pytest.mark.parametrize("number", range(3))
def test_the_end_of_one_stream_is_that_of_the_connection(number: int) -> None:
    with accepting() as here:
        ended: list[Connection] = []
        here.table.on_end = ended.append
        _, descriptors = with_streams(here)
        here.table.ended(descriptors[number])
        assert ended == [STREAMS[0]]


def test_streams_leave_room_for_sessions_and_one_that_is_refused_ends_nothing() -> None:
    with accepting() as here:
        ended: list[Connection] = []
        here.table.on_end = ended.append
        here.table.most_in_use = 4
        clients, _ = with_streams(here)
        assert list(map(is_shut, clients)) == [False, False, True], "half of the room is taken"
        assert here.counters.get("refused_streams") == 1
        assert not here.table.is_in_use(STREAMS[2])
        client, descriptor = here.connect(100.0)
        here.table.heard(A, descriptor, "")
        here.table.admitted(A)
        assert not is_shut(client)
        here.table.check(101.0)
        assert not ended


def test_the_end_of_a_refused_stream_is_not_that_of_the_connection() -> None:
    with accepting() as here:
        ended: list[Connection] = []
        here.table.on_end = ended.append
        here.table.most_in_use = 2
        clients, descriptors = with_streams(here)
        assert list(map(is_shut, clients)) == [False, True, True]
        here.table.ended(descriptors[1])
        assert not ended
        here.table.ended(descriptors[0])
        assert ended == [STREAMS[0]]
