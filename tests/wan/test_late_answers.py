"""What a silent peer's kernel says: it answers late, as where heartbeats wait behind data, or not at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

FULL_LINK = """
ip link set lo up mtu 1500
tc qdisc add dev lo root tbf rate 200kbit burst 3000 limit 1000000
"""
"""Both ways of one connection are the same queue, which holds 40 s of data."""

PROGRAM = """
import socket, threading, time
from netstorm.pslite.tcp_info import answers_late, is_acknowledged

def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]

def read_all(end):
    while end.recv(65536):
        pass

def is_late():
    one.send(b"x")  # the other end reads nothing: only its kernel answers
    time.sleep(0.5)
    assert is_acknowledged(one.fileno(), 60.0)
    return answers_late(one.fileno())

one, other = pair()
print([is_late() for _ in range(3)])
sender, reader = pair()
threading.Thread(target=read_all, args=(reader,), daemon=True).start()
threading.Thread(target=sender.sendall, args=(bytes(10_000_000),), daemon=True).start()
deadline = time.monotonic() + 60
while not is_late():
    assert time.monotonic() < deadline
print("late", answers_late(-1))
"""


QUIET_VANS = """
import socket, subprocess, time
from netstorm.pslite.van import Connection
from netstorm.pslite.zeromq import ZmqVan

LINK_TIMEOUT_S = 3.0  # the kernel asks once a second

def fill(rate, nbytes):
    tbf = ["tbf", "rate", rate, "burst", "3000", "limit", "1000000"]
    subprocess.run(["tc", "qdisc", "change", "dev", "lo", "root", *tbf], check=True)
    for _ in range(nbytes // 1400):
        other.sendto(bytes(1400), ("127.0.0.1", 9))

def events_for(seconds, enough=lambda events: False):
    events, end = [], time.monotonic() + seconds
    while time.monotonic() < end and not enough(events):
        events += [event for van in (listener, opener) for event in van.poll(0.05)]
    return events

other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listener, opener = (ZmqVan(link_timeout_s=LINK_TIMEOUT_S) for _ in range(2))
port = listener.bind("127.0.0.1", 0)
opener.open(Connection(1), "127.0.0.1", port)
assert opener.transmit(Connection(1), b"up", None)
[up] = events_for(20.0, bool)
listener.admit(up.connection)
fill("200kbit", 100_000)  # 4 s, all at once
assert not events_for(5.0), "a connection has ended whose peer has only been late"
assert opener.transmit(Connection(1), b"late", None)
[late] = events_for(20.0, bool)
print(late.frames)

fill("1kbit", 20_000)  # minutes
deadline = time.monotonic() + 60.0
while opener.acknowledges(Connection(1)):
    assert time.monotonic() < deadline
    assert not events_for(0.05)  # it is silent before it ends
ended = events_for(60.0, lambda events: len(events) == 2)
print([type(event).__name__ for event in ended])
opener.shut(0.0)
listener.shut(0.0)
"""


def in_a_network_of_its_own(setup: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program after shell commands that make its loopback."""
    words = ["unshare", "--user", "--map-root-user", "--net", "sh", "-ec", setup + 'exec "$0" -c "$1"']
    command = [*words, sys.executable, program]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_quiet_connection_outlives_answers_that_are_late_and_not_a_peer_that_is_gone() -> None:
    ended = in_a_network_of_its_own(FULL_LINK, QUIET_VANS)
    assert ended.stdout == "(b'late',)\n['Broken', 'Broken']\n", ended.stderr


def test_a_kernel_answers_late_over_a_full_link_and_at_once_for_a_process_that_reads_nothing() -> None:
    ended = in_a_network_of_its_own(FULL_LINK, PROGRAM)
    assert ended.stdout == "[False, False, False]\nlate False\n", ended.stderr
