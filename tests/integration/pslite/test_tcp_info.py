"""What the kernel says of real connections."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import pytest

from netstorm.observe.log import Counters
from netstorm.pslite.tcp_info import is_acknowledged, progress_of, restart_bbr
from netstorm.pslite.van import Connection
from netstorm.pslite.zeromq import ZmqVan


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
    assert full.unsent > 0
    taken = 0
    while taken < sent:
        taken += len(other.recv(1 << 20))
    after = told(one.fileno())
    assert after.unsent == 0
    assert (after.delivered - before.delivered) * after.segment >= 0.9 * sent
    assert after.busy_s >= full.busy_s >= before.busy_s
    assert 0 < after.min_rtt_s <= after.smoothed_rtt_s
    one.send(b"it is still open")
    assert other.recv(100)


@pytest.mark.parametrize("name", [b"reno", b"bbr", b"dctcp", b"vegas"])
def test_only_bbr_says_what_bandwidth_it_has_seen(pair, name):
    one, other = pair
    control(one, name)
    one.sendall(bytes(100_000))
    taken = 0
    while taken < 100_000:
        taken += len(other.recv(100_000))
    assert (told(one.fileno()).bandwidth > 0.0) == (name == b"bbr")


def take(connection, number):
    """Return so many bytes."""
    taken = b""
    while len(taken) < number:
        taken += connection.recv(number - len(taken))
    return taken


def test_bbr_forgets_what_it_has_seen_and_nothing_under_way_is_lost(pair):
    one, other = pair
    control(one, b"bbr")
    sent = os.urandom(400_000)
    one.sendall(sent[:100_000])
    taken = take(other, 100_000)
    assert told(one.fileno()).bandwidth > 0.0
    assert restart_bbr(one.fileno())
    assert told(one.fileno()).bandwidth == 0.0
    one.sendall(sent[100_000:200_000])
    assert restart_bbr(one.fileno())
    assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"bbr"
    one.sendall(sent[200_000:])
    assert taken + take(other, 300_000) == sent
    assert told(one.fileno()).bandwidth > 0.0


def test_another_congestion_control_stays_what_it_is(pair):
    one, _ = pair
    control(one, b"reno")
    assert not restart_bbr(one.fileno())
    assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"


def control(connection, name):
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
    except OSError:
        pytest.skip(f"this kernel has no {name.decode()}, or does not allow it")


def test_what_is_no_connection_says_nothing():
    reading, writing = os.pipe()
    try:
        assert progress_of(reading) is None
        assert not restart_bbr(reading)
    finally:
        os.close(reading)
        os.close(writing)
    assert progress_of(reading) is None
    assert progress_of(-1) is None
    assert not restart_bbr(reading)
    assert not restart_bbr(-1)


def test_a_van_tells_of_connections_that_it_has_opened():
    listener, opener = ZmqVan(counters=Counters()), ZmqVan(counters=Counters())
    try:
        port = listener.bind("127.0.0.1", 0)
        assert opener.progress(Connection(1)) is None
        assert not opener.restart_bbr(Connection(1))
        opener.open(Connection(1), "127.0.0.1", port)
        assert opener.transmit(Connection(1), b"header", bytes(500_000))
        while not listener.poll(1.0):
            opener.poll(0.01)
        opener.poll(0.1)
        found = opener.progress(Connection(1))
        assert found is not None
        assert found.delivered * found.segment >= 500_000
        assert opener.restart_bbr(Connection(1)) == (found.bandwidth > 0.0)
        opener.close(Connection(1))
        assert opener.progress(Connection(1)) is None
        assert not opener.restart_bbr(Connection(1))
    finally:
        listener.shut(0.0)
        opener.shut(0.0)


def test_a_kernel_acknowledges_for_a_process_that_reads_nothing(pair):
    """Also once its window has closed, and is probed ever more rarely."""
    one, other = pair
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            one.send(bytes(65_536))
    time.sleep(1.0)
    assert is_acknowledged(one.fileno(), 0.0)
    assert is_acknowledged(other.fileno(), 10.0)


def test_a_connection_that_has_ended_is_not_acknowledged(pair):
    one, other = pair
    assert is_acknowledged(one.fileno(), 10.0)
    other.close()
    deadline = time.monotonic() + 30
    while is_acknowledged(one.fileno(), 10.0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not is_acknowledged(-1, 10.0)
