"""Strangers at a van's port: their connections are few and short, and a process of the job gets through."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from netstorm import clock
from netstorm.observe.log import Counters
from netstorm.pslite import guard as waiting_connections
from netstorm.pslite.van import Connection, Received, VanEvent
from netstorm.pslite.zeromq import ZmqVan

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1e\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"


def wait_for(van: ZmqVan, happened: Callable[[list[VanEvent]], bool]) -> None:
    events: list[VanEvent] = []
    deadline = clock.monotonic() + 20.0
    while not happened(events):
        assert clock.monotonic() < deadline, events
        events += van.poll(0.05)


@pytest.fixture
def counters() -> Counters:
    return Counters()


def test_strangers_are_shut_out_and_a_process_of_the_job_is_heard(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_connections, "_MOST", 20)
    with ExitStack() as stack:
        van = ZmqVan(link_timeout_s=1.0, counters=counters)
        stack.callback(van.shut, 0.0)
        port = van.bind("127.0.0.1", 0)

        def connect(*parts: bytes) -> socket.socket:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.settimeout(20.0)
            for part in parts:
                client.sendall(part)
            return client

        claims = connect(GREETING, READY, b"\x02", struct.pack(">Q", 2**40))
        idle = [connect() for _ in range(30)]
        slow = connect(GREETING[:12])
        wait_for(van, lambda _: counters.get("accepted_connections") >= 32)
        wait_for(van, lambda _: counters.get("refused_waiting") >= 10)
        wait_for(van, lambda _: counters.get("refused_silent") + counters.get("refused_handshake") > 0)

        peer = ZmqVan(link_timeout_s=1.0)
        stack.callback(peer.shut, 0.0)
        peer.open(Connection(1), "127.0.0.1", port)
        peer.transmit(Connection(1), b"hello", None)
        wait_for(van, lambda events: any(isinstance(event, Received) for event in events))
        for client in (claims, slow, *idle):
            wait_for(van, lambda _, client=client: is_shut(client))  # type: ignore[misc]


def is_shut(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        while data := client.recv(4096):
            assert data
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True
