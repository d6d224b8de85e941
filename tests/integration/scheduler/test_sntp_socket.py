"""The cluster clock over real UDP sockets on loopback."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

import ntplib
import pytest

from netstorm.errors import SettingsError
from netstorm.pslite.sntp_socket import SntpClient, SntpServer


def serve(server, client, until, limit_s=10.0):
    """Drive both from one thread, as an I/O thread does."""
    deadline = time.monotonic() + limit_s
    while not until():
        assert time.monotonic() < deadline
        client.poll(time.monotonic())
        readable, _, _ = select.select([server, client], [], [], 0.05)
        for one in readable:
            one.readable()


@contextlib.contextmanager
def answering(server):
    """Run a server on a thread of its own while a blocking client asks."""
    stop = threading.Event()

    def run():
        while not stop.is_set():
            if select.select([server], [], [], 0.05)[0]:
                server.readable()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join()
        server.close()


def test_a_stock_ntp_client_gets_the_time():
    with answering(SntpServer("127.0.0.1", 0, now=lambda: time.time() + 42.0)) as server:
        stats = ntplib.NTPClient().request("127.0.0.1", port=server.port, version=4, timeout=5)
    assert stats.offset == pytest.approx(42.0, abs=0.05)
    assert 0 <= stats.delay < 1.0
    assert (stats.stratum, stats.leap, ntplib.ref_id_to_text(stats.ref_id, 2)) == (10, 0, "127.127.1.0")


def test_a_node_finds_the_schedulers_clock():
    ahead_ns = 5_000_000_000
    server = SntpServer("127.0.0.1", 0, now=lambda: time.time() + 5.0)
    client = SntpClient("127.0.0.1", server.port)
    serve(server, client, lambda: client.counters.get("sntp_exchanges") >= 3)
    error_s = (client.now_ns() - time.time_ns() - ahead_ns) / 1e9
    assert abs(error_s) <= client.sync.error_bound(time.monotonic()) + 1e-4
    server.close()
    client.close()


def test_the_time_that_a_datagram_waited_for_a_busy_thread_is_not_measured():
    server = SntpServer("127.0.0.1", 0)
    client = SntpClient("127.0.0.1", server.port)
    client.poll(time.monotonic())
    time.sleep(0.3)
    server.readable()
    time.sleep(0.2)
    client.readable()
    assert client.sync.error_bound(time.monotonic()) < 0.1
    assert abs(client.now_ns() - time.time_ns()) < 50_000_000
    server.close()
    client.close()


def test_garbage_is_counted_and_the_time_goes_on_being_told():
    server = SntpServer("127.0.0.1", 0)
    client = SntpClient("127.0.0.1", server.port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for data in (b"", b"x", bytes(48), bytes(400), b"\xff" * 48):
            stranger.sendto(data, ("127.0.0.1", server.port))
    serve(server, client, lambda: client.counters.get("sntp_exchanges") >= 1)
    assert server.counters.get("sntp_garbage") == 5
    server.close()
    client.close()


def test_what_a_stranger_sends_to_a_client_never_reaches_it():
    server = SntpServer("127.0.0.1", 0)
    client = SntpClient("127.0.0.1", server.port)
    port = client._socket.getsockname()[1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"x" * 48, ("127.0.0.1", port))
    serve(server, client, lambda: client.counters.get("sntp_exchanges") >= 1)
    assert client.counters.get("sntp_garbage") == 0
    server.close()
    client.close()


def test_a_client_without_a_server_keeps_asking_and_has_its_own_time():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    client = SntpClient("127.0.0.1", port)
    for _ in range(3):
        client.poll(time.monotonic())
        client.readable()
        time.sleep(0.6)
    assert client.counters.get("sntp_requests") == 3
    assert abs(client.now_ns() - time.time_ns()) < 50_000_000
    client.close()


def test_a_port_that_is_taken_is_an_error_that_names_the_variable():
    with contextlib.closing(SntpServer("127.0.0.1", 0)) as other:
        with pytest.raises(SettingsError, match="NETSTORM_SNTP_PORT") as caught:
            SntpServer("127.0.0.1", other.port)
        assert f"cannot tell the time at UDP 127.0.0.1:{other.port}: Address already in use" in str(
            caught.value
        )
