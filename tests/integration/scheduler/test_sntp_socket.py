"""The cluster clock over real UDP sockets on loopback."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from netstorm.errors import SettingsError
from netstorm.pslite import sntp_socket
from netstorm.pslite.host_addresses import source_towards, udp_socket
from netstorm.pslite.sntp import PacketKey
from netstorm.pslite.sntp_socket import SntpClient, SntpServer
from netstorm.pslite.system import TimerFd


class Watching:
    """Watches descriptors as an I/O thread does, but only while `run_until` is called."""

    def __init__(self):
        self.callbacks: dict[int, Callable[[], None]] = {}

    def watch(self, fd, callback):
        self.callbacks[fd] = callback

    def unwatch(self, fd):
        self.callbacks.pop(fd, None)

    def run_until(self, wanted, limit_s=10.0):
        deadline = time.monotonic() + limit_s
        while not wanted():
            assert time.monotonic() < deadline
            readable, _, _ = select.select(list(self.callbacks), [], [], 0.05)
            for fd in readable:
                self.callbacks[fd]()

    @contextlib.contextmanager
    def on_a_thread(self):
        """Run while somebody blocks."""
        stop = threading.Event()
        thread = threading.Thread(target=self.run_until, args=(stop.is_set, 60.0))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@pytest.fixture
def watching():
    return Watching()


@pytest.fixture
def server(watching):
    made = SntpServer("127.0.0.1", 0, now=lambda: time.time() + 5.0)
    made.start(watching)
    yield made
    made.stop(watching)


@pytest.fixture
def client(watching, server):
    made = SntpClient("127.0.0.1", server.port)
    made.start(watching)
    yield made
    made.stop(watching)


def assert_now(client: SntpClient, ahead_s: float, within_s: float) -> None:
    """Assert how far a client's time is ahead of this machine's, whatever happens between two readings."""
    before, found, after = time.time_ns(), client.now_ns(), time.time_ns()
    assert before / 1e9 - within_s <= found / 1e9 - ahead_s <= after / 1e9 + within_s


def assert_follows(client: SntpClient) -> None:
    """Assert that a client has the server's time, which is 5 s ahead, as exactly as it says."""
    bound_s = client.sync.error_bound(time.monotonic())
    assert bound_s < 1.0
    assert_now(client, 5.0, bound_s + 1e-4)


def test_a_node_finds_the_schedulers_clock(watching, client):
    watching.run_until(lambda: client.counters.get("sntp_exchanges") >= 3)
    assert_follows(client)


def test_a_server_on_all_addresses_answers_those_of_both_families_and_a_client_asks_both(watching):
    if not source_towards("::1"):
        pytest.skip("this machine has no IPv6")
    server = SntpServer("*", 0)
    server.start(watching)
    present = [("127.0.0.1", server.port)]
    client = SntpClient("::1", server.port, scheduler=lambda: present[0])
    client.start(watching)
    for address in ("127.0.0.1", "::1", "localhost"):
        present[0] = (address, server.port)
        before = client.counters.get("sntp_exchanges")
        watching.run_until(lambda before=before: client.counters.get("sntp_exchanges") >= before + 2)
    client.stop(watching)
    server.stop(watching)


def test_a_node_follows_the_clock_of_a_scheduler_that_takes_over_elsewhere(watching, server):
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as gone:
        gone.bind(("127.0.0.1", 0))
        present = [gone.getsockname()]
        client = SntpClient("127.0.0.1", gone.getsockname()[1], scheduler=lambda: present[0])
        client.start(watching)
        watching.run_until(lambda: client.counters.get("sntp_requests") >= 2)
        assert client.counters.get("sntp_exchanges") == 0
        present[0] = ("127.0.0.1", server.port)
        watching.run_until(lambda: client.counters.get("sntp_exchanges") >= 1)
        assert_follows(client)
        client.stop(watching)


@pytest.mark.parametrize("wrong", [("x" * 70, 9), ("127.0.0.1", 1 << 20), ("no\0host", 9)], ids=str)
def test_an_address_that_is_none_is_counted_and_another_one_asked_later(watching, server, wrong):
    present = [wrong]
    client = SntpClient("127.0.0.1", server.port, scheduler=lambda: present[0])
    client.start(watching)
    watching.run_until(lambda: client.counters.get("sntp_unreachable") >= 1)
    present[0] = ("127.0.0.1", server.port)
    watching.run_until(lambda: client.counters.get("sntp_exchanges") >= 1)
    client.stop(watching)


def wait_until_arrivals_are_stamped():
    """The kernel begins to stamp what arrives some time after the first socket has asked it to (a work queue
    does that); until then it tells the time of reading.
    """
    deadline = time.monotonic() + 30.0
    with sntp_socket._timestamping(udp_socket("127.0.0.1")) as own:
        own.bind(("127.0.0.1", 0))
        while time.monotonic() < deadline:
            own.sendto(b"x", own.getsockname())
            time.sleep(0.02)
            if any(waited >= 0.02 for _, _, waited in sntp_socket._datagrams(own)):
                return
    raise AssertionError("the kernel stamps no arrivals")


def test_the_time_that_a_datagram_waited_for_a_busy_thread_is_not_measured(watching, server, client):
    wait_until_arrivals_are_stamped()
    of_server, of_client = (
        fd for fd in watching.callbacks if "socket" in str(Path(f"/proc/self/fd/{fd}").readlink())
    )
    (timer,) = set(watching.callbacks) - {of_server, of_client}
    watching.callbacks[timer]()
    time.sleep(0.3)
    watching.callbacks[of_server]()
    time.sleep(0.2)
    watching.callbacks[of_client]()
    assert client.sync.error_bound(time.monotonic()) < 0.1
    assert_follows(client)


def test_garbage_is_counted_and_the_time_goes_on_being_told(watching, server, client):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for data in (b"", b"x", bytes(48), bytes(400), b"\xff" * 48):
            stranger.sendto(data, ("127.0.0.1", server.port))
    watching.run_until(lambda: client.counters.get("sntp_exchanges") >= 1)
    assert server.counters.get("sntp_garbage") == 5


def test_what_a_stranger_sends_to_a_client_never_reaches_it(watching, client):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"x" * 48, ("127.0.0.1", client._socket.getsockname()[1]))
    watching.run_until(lambda: client.counters.get("sntp_exchanges") >= 1)
    assert client.counters.get("sntp_garbage") == 0


def test_a_client_without_a_server_keeps_asking_and_has_its_own_time(watching):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    client = SntpClient("127.0.0.1", port)
    client.start(watching)
    watching.run_until(lambda: client.counters.get("sntp_requests") >= 3)
    assert_now(client, 0.0, 0.05)
    client.stop(watching)
    client.stop(watching)


def test_a_port_that_is_taken_is_an_error_that_names_the_variable(server):
    with pytest.raises(SettingsError, match="NETSTORM_SNTP_PORT") as caught:
        SntpServer("127.0.0.1", server.port)
    assert f"cannot tell the time at UDP 127.0.0.1:{server.port}: Address already in use" in str(caught.value)


# ------------------------------------------------------------------------------------------------ with a key


@contextlib.contextmanager
def running(watching, *made):
    for one in made:
        one.start(watching)
    try:
        yield
    finally:
        for one in made:
            one.stop(watching)


def test_a_node_with_the_key_finds_the_schedulers_clock(watching):
    server = SntpServer("127.0.0.1", 0, now=lambda: time.time() + 5.0, key=PacketKey(b"key"))
    client = SntpClient("127.0.0.1", server.port, key=PacketKey(b"key"))
    with running(watching, server, client):
        watching.run_until(lambda: client.counters.get("sntp_exchanges") >= 1)
        assert_follows(client)


@pytest.mark.parametrize(
    ("servers", "clients", "counted_by", "reason"),
    [
        (PacketKey(b"key"), None, "server", "sntp_no_mac"),
        (PacketKey(b"key"), PacketKey(b"another"), "server", "sntp_other_key"),
        (None, PacketKey(b"key"), "client", "sntp_no_mac"),
    ],
)
def test_processes_without_the_same_key_do_not_tell_each_other_the_time(
    watching, servers, clients, counted_by, reason
):
    server = SntpServer("127.0.0.1", 0, now=lambda: time.time() + 5.0, key=servers)
    client = SntpClient("127.0.0.1", server.port, key=clients)
    counters = {"server": server.counters, "client": client.counters}[counted_by]
    with running(watching, server, client):
        watching.run_until(lambda: counters.get(reason) >= 2)
        assert client.counters.get("sntp_exchanges") == 0
        assert_now(client, 0.0, 0.05)
        assert counted_by == "client" or server.counters.get("sntp_answers") == 0


class ManInTheMiddle:
    """Stands for the time server of one client, passes packets on, and repeats old answers as well."""

    def __init__(self, server_port):
        self.kept = []
        self._server = ("127.0.0.1", server_port)
        self._client = ("", 0)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]

    def start(self, watching):
        watching.watch(self.socket.fileno(), self._readable)

    def stop(self, watching):
        watching.unwatch(self.socket.fileno())
        self.socket.close()

    def _readable(self):
        data, sender = self.socket.recvfrom(512)
        if sender != self._server:
            self._client = sender
            self.socket.sendto(data, self._server)
            self.socket.sendto(data, sender)  # the client's own request
            return
        for answer in [*self.kept, data[:40] + bytes(8) + data[48:]]:  # replayed, and with another time
            self.socket.sendto(answer, self._client)
        self.socket.sendto(data, self._client)
        self.kept.append(data)


def test_replayed_changed_and_reflected_packets_do_not_move_a_clock(watching):
    server = SntpServer("127.0.0.1", 0, now=lambda: time.time() + 5.0, key=PacketKey(b"key"))
    middle = ManInTheMiddle(server.port)
    client = SntpClient("127.0.0.1", middle.port, key=PacketKey(b"key"))
    with running(watching, server, middle, client):
        watching.run_until(lambda: client.counters.get("sntp_exchanges") >= 3)
        assert client.counters.get("sntp_forged") >= 3
        assert client.counters.get("sntp_garbage") >= 3 + 2 + 1  # own requests, and answers of before
        assert_follows(client)


# -------------------------------------------------------------------------------------------------- timers


@pytest.fixture
def timer():
    made = TimerFd()
    yield made
    made.close()


def test_a_timer_goes_off_once_not_before_its_time(timer):
    began = time.monotonic()
    timer.arm(0.2)
    assert not timer.take()
    assert select.select([timer], [], [], 10.0)[0]
    assert time.monotonic() - began >= 0.2
    assert timer.take()
    assert not timer.take()
    assert not select.select([timer], [], [], 0.05)[0]


@pytest.mark.parametrize("seconds", [0.0, -5.0, float("-inf"), 1e-12])
def test_a_timer_armed_for_the_past_goes_off_at_once(timer, seconds):
    timer.arm(seconds)
    assert select.select([timer], [], [], 10.0)[0]


def test_arming_a_timer_again_forgets_the_first_time(timer):
    timer.arm(0.01)
    timer.arm(3600.0)
    assert not select.select([timer], [], [], 0.1)[0]
