"""What the kernel says of real connections."""

from __future__ import annotations

import os
import socket

import pytest

from netstorm.observe.counters import Counters
from netstorm.pslite.tcp_info import progress_of
from netstorm.pslite.van import Connection
from netstorm.pslite.zmq_van import ZmqVan


@pytest.fixture
def pair():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        yield one, other


def told(descriptor):
    found = progress_of(descriptor)
    assert found is not None
    return found


def test_delivered_and_waiting_are_counted(pair):
    one, other = pair
    one.setblocking(False)
    before = told(one.fileno())
    sent = 0
    try:
        while True:
            sent += one.send(bytes(65_536))
    except BlockingIOError:
        pass
    full = told(one.fileno())
    assert full.waiting > 0
    taken = 0
    while taken < sent:
        taken += len(other.recv(1 << 20))
    after = told(one.fileno())
    assert after.waiting == 0
    assert (after.delivered - before.delivered) * after.segment >= 0.9 * sent
    assert after.busy_s >= full.busy_s >= before.busy_s
    assert 0 < after.shortest_s <= after.round_trip_s
    one.send(b"it is still open")
    assert other.recv(100)


@pytest.mark.parametrize("control", [b"reno", b"bbr", b"dctcp", b"vegas"])
def test_only_bbr_says_what_bandwidth_it_has_seen(pair, control):
    one, other = pair
    try:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control)
    except OSError:
        pytest.skip(f"this kernel has no {control.decode()}, or does not allow it")
    one.sendall(bytes(100_000))
    taken = 0
    while taken < 100_000:
        taken += len(other.recv(100_000))
    assert (told(one.fileno()).bandwidth > 0.0) == (control == b"bbr")


def test_what_is_no_connection_says_nothing():
    reading, writing = os.pipe()
    try:
        assert progress_of(reading) is None
    finally:
        os.close(reading)
        os.close(writing)
    assert progress_of(reading) is None
    assert progress_of(-1) is None


def test_a_van_tells_of_connections_that_it_has_opened():
    listener, opener = ZmqVan(counters=Counters()), ZmqVan(counters=Counters())
    try:
        port = listener.bind("127.0.0.1", 0)
        assert opener.progress(Connection(1)) is None
        opener.open(Connection(1), "127.0.0.1", port)
        assert opener.transmit(Connection(1), b"header", bytes(500_000))
        while not listener.poll(1.0):
            opener.poll(0.01)
        opener.poll(0.1)
        found = opener.progress(Connection(1))
        assert found is not None
        assert found.delivered * found.segment >= 500_000
        opener.close(Connection(1))
        assert opener.progress(Connection(1)) is None
    finally:
        listener.shut(0.0)
        opener.shut(0.0)
