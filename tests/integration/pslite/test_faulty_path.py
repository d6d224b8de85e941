"""Two processes over a TCP path that cuts, corrupts, delays and swallows: everything arrives once."""

from __future__ import annotations

import random
import socket
import threading
import time
from functools import partial

import pytest

from netstorm.lab.testing.recorder import part
from netstorm.lab.testing.tcp_proxy import TcpProxy
from netstorm.protocol.frames import Peer
from netstorm.pslite.machine import Send
from tests.integration.pslite.processes import RealProcess, wait_until

IMPATIENT = pytest.mark.parametrize("path", [2.0], indirect=True)


@pytest.fixture
def path(request):
    """Return two processes, the first of which knows the second by the proxy's address, and the proxy."""
    limit_s = getattr(request, "param", 10.0)
    here, there = RealProcess(0, link_timeout_s=limit_s), RealProcess(1, link_timeout_s=limit_s)
    proxy = TcpProxy("127.0.0.1", there.port, seed=1)
    here.connect(1, proxy.port)
    yield here, there, proxy
    here.close()
    there.close()
    proxy.close()


def payload(number):
    return random.Random(number).randbytes(20_000 + number)


def send(here, numbers):
    here.do(
        *[
            Send(peer=Peer(1), message=part(number), payload=payload(number), order=(0, 0, number))
            for number in numbers
        ]
    )


def assert_all_arrived(here, there, count, seconds=60):
    wait_until(lambda: len(there.machine.got) >= count and here.is_idle(), seconds)
    time.sleep(0.1)
    assert sorted(there.machine.numbers()) == list(range(count))
    assert there.machine.payloads() == {number: payload(number) for number in range(count)}
    assert here.machine.lost == there.machine.lost == []


def test_connections_that_are_cut_again_and_again(path):
    here, there, proxy = path
    made = 0
    for batch in range(20):
        send(here, range(batch * 10, batch * 10 + 10))
        if batch % 5 == 0:  # else there may be none to cut
            wait_until(partial(lambda before: proxy.connections > before, made))
        time.sleep(0.02)
        made = proxy.connections
        proxy.cut()
    assert_all_arrived(here, there, 200)
    assert here.endpoint.links()[Peer(1), True]["connections"] > 3


def test_bits_that_flip_anywhere_in_the_stream(path):
    here, there, proxy = path
    send(here, range(20))
    wait_until(lambda: there.machine.got)
    proxy.flip_probability = 0.02
    for batch in range(1, 10):
        send(here, range(batch * 20, batch * 20 + 20))
        time.sleep(0.05)
    time.sleep(0.3)
    proxy.flip_probability = 0.0
    assert_all_arrived(here, there, 200)


def test_a_long_way(path):
    here, there, proxy = path
    proxy.delay_s = 0.1
    send(here, range(100))
    assert_all_arrived(here, there, 100)
    link = here.endpoint.links()[Peer(1), True]
    assert link["messages_resent"] == 0
    assert link["connections"] == 1


def test_a_path_that_is_silent_for_a_while(path):
    here, there, proxy = path
    send(here, range(10))
    wait_until(lambda: there.machine.got)
    proxy.pause()
    send(here, range(10, 100))
    time.sleep(0.5)
    proxy.resume()
    assert_all_arrived(here, there, 100)


@IMPATIENT
def test_a_path_that_stays_silent_is_lost_within_a_bounded_time_and_named(path):
    here, there, proxy = path
    send(here, range(10))
    wait_until(lambda: there.machine.got)
    proxy.pause()
    send(here, range(10, 20))  # over an idle connection nothing is missed
    began = time.monotonic()
    wait_until(lambda: here.machine.lost, 90)
    # A query; the link time-out to notice, since the proxy's kernel acknowledges; and again, to try again.
    assert time.monotonic() - began < 60
    [(peer, reason)] = here.machine.lost
    assert peer == 1
    assert f"127.0.0.1:{proxy.port}" in reason
    proxy.resume()


@IMPATIENT
def test_a_path_that_refuses_is_lost_when_the_link_time_out_has_passed(path):
    here, there, proxy = path
    send(here, range(10))
    wait_until(lambda: there.machine.got)
    began = time.monotonic()
    proxy.refuse()
    proxy.cut()
    wait_until(lambda: here.machine.lost, 30)
    assert time.monotonic() - began > 1.8
    assert proxy.connections > 3


def test_a_path_that_comes_back_in_time_is_no_failure(path):
    here, there, proxy = path
    send(here, range(10))
    wait_until(lambda: there.machine.got)
    proxy.refuse()
    proxy.cut()
    send(here, range(10, 20))
    time.sleep(0.5)
    proxy.refuse(refuse=False)
    assert_all_arrived(here, there, 20)


# --------------------------------------------------------------------------------------- the proxy itself


@pytest.fixture
def echo():
    """Return the address of a server that sends back what it gets."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve(connection):
        with connection:
            try:
                while data := connection.recv(65_536):
                    connection.sendall(data)
            except OSError:
                pass

    def accept():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    yield server.getsockname()
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    for thread in threads:
        thread.join(10)


def exchange(connection, data):
    connection.settimeout(60)
    sender = threading.Thread(target=connection.sendall, args=(data,))
    sender.start()
    back = bytearray()
    while len(back) < len(data):
        more = connection.recv(65_536)
        if not more:
            break
        back += more
    sender.join(10)
    return back


def test_the_proxy_forwards_delays_flips_and_resets_and_takes_new_connections(echo):
    data = random.Random(0).randbytes(8_000_000)  # more than fits in any buffer
    with TcpProxy(*echo) as proxy:
        with socket.create_connection((proxy.host, proxy.port)) as connection:
            assert exchange(connection, data) == data
            proxy.delay_s = 0.1
            began = time.monotonic()
            assert exchange(connection, b"ping") == b"ping"
            assert time.monotonic() - began >= 0.2
            proxy.delay_s, proxy.flip_probability = 0.0, 1.0
            assert 1 <= int.from_bytes(exchange(connection, bytes(1000)), "big").bit_count() < 100
            proxy.flip_probability = 0.0
            proxy.cut()
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
        with socket.create_connection((proxy.host, proxy.port)) as connection:
            assert exchange(connection, b"ping") == b"ping"
        assert proxy.connections == 2


def test_closing_the_proxy_ends_its_connections_and_its_thread(echo):
    proxy = TcpProxy(*echo)
    with socket.create_connection((proxy.host, proxy.port)) as connection:
        assert exchange(connection, b"ping") == b"ping"
        proxy.close()
        proxy.close()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    assert not any(thread.name == "netstorm-tcp-proxy" for thread in threading.enumerate())
