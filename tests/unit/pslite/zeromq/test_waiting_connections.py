"""Connections without a message are few, young, and of few bytes: the others are shut down."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from netstorm.observe.counters import Counters
from netstorm.observe.drops import Drops
from netstorm.pslite.zeromq import waiting_connections
from netstorm.pslite.zeromq.waiting_connections import WaitingConnections


class Accepted:
    """Accepted connections, and what the clients at their other ends see."""

    def __init__(self, stack: ExitStack) -> None:
        self.counters = Counters()
        self.table = WaitingConnections(Drops(self.counters, counted_as="refused"), limit_s=10.0)
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.table.port = self._listener.getsockname()[1]
        self._stack = stack

    def connect(self, now: float) -> tuple[socket.socket, int]:
        """Return a client, and the descriptor of its connection here."""
        client = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.table.port)))
        client.settimeout(10.0)
        here = self._stack.enter_context(self._listener.accept()[0])
        self.table.accepted(here.fileno(), "127.0.0.1", now)
        return client, here.fileno()


@contextmanager
def accepting() -> Iterator[Accepted]:
    with ExitStack() as stack:
        yield Accepted(stack)


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


def test_a_connection_over_which_a_message_has_come_is_left_alone() -> None:
    with accepting() as here:
        client, descriptor = here.connect(100.0)
        here.table.heard(descriptor)
        for second in range(100, 200):
            here.table.check(float(second))
        assert not is_shut(client)


def test_of_too_many_connections_the_oldest_are_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_connections, "_MOST", 3)
    with accepting() as here:
        clients = [here.connect(100.0 + number)[0] for number in range(5)]
        assert [is_shut(client) for client in clients] == [True, True, False, False, False]
        assert here.counters.get("refused_waiting") == 2
        assert len(here.table) == 3


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
