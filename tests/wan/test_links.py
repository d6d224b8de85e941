from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from random import Random

import pytest

from netstorm import clock
from netstorm.errors import UsageError
from netstorm.lab.emulation import Wan
from netstorm.lab.emulation.check import measure_latencies, measure_throughput
from netstorm.topology.network import Rank
from tests.wan.traces import LINE, PAIR, network, run

RECEIVE = """
import hashlib, socket, sys
with socket.create_server((sys.argv[1], 7000), family=socket.AddressFamily["AF_" + sys.argv[2]]) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    digest, size = hashlib.sha256(), 0
    while data := connection.recv(1 << 20):
        digest.update(data); size += len(data)
print(size, digest.hexdigest())
"""
SEND = """
import random, socket, sys
source = random.Random(1)
with socket.create_connection((sys.argv[1], 7000)) as connection:
    for _ in range(5):
        connection.sendall(source.randbytes(1_000_000))
"""
RESOLVE = """
import socket
print(socket.gethostbyname("r2"), socket.gethostbyaddr("10.78.0.3")[0])
print(socket.gethostbyname(socket.gethostname()))
"""


def assert_rate(wan: Wan, source: int, target: int, rate: float) -> None:
    """A busy machine carries less than a link could: test_check.py, which is slow, is exact."""
    (carried,) = measure_throughput(wan, [(source, target)], streams=2, warm_up_s=0.5, measure_s=0.5)
    assert 0.5 * rate < carried.goodput / carried.of_rate < 1.1 * rate


def assert_time(measured: float, expected: float) -> None:
    assert expected - 0.001 < measured < expected + 1


def test_ranks_have_names_and_reach_each_other_over_those_between_and_one_direction_can_be_changed():
    with Wan.up(network(LINE)) as wan:
        assert run(wan, 1, RESOLVE).split() == ["10.78.0.3", "r2", "10.78.0.2"]
        assert_time(measure_latencies(wan, 0, 2, expected=0.03).round_trip, 0.030)
        assert_rate(wan, 0, 2, 40e6)
        wan.set(1, 2, rate=10e6, latency=0.020)
        links = {(link.source, link.target): (link.rate, link.latency) for link in wan.status()}
        assert (links[Rank(1), Rank(2)], links[Rank(2), Rank(1)]) == ((10e6, 0.020), (40e6, 0.010))
        measured = measure_latencies(wan, 1, 2, expected=0.03)
        assert_time(measured.there, 0.020)
        assert_time(measured.back, 0.010)
        assert_rate(wan, 0, 2, 10e6)


def test_what_is_sent_over_lossy_links_arrives_as_it_was_over_ipv4_and_ipv6():
    source = Random(1)
    sent = hashlib.sha256(b"".join(source.randbytes(1_000_000) for _ in range(5))).hexdigest()
    with Wan.up(network(LINE.replace("ms}", "ms, loss: 1%}"))) as wan:
        for host, family in (("r2", "INET"), ("r2v6", "INET6")):
            words = wan.command(2, [sys.executable, "-c", RECEIVE, host, family])
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as receiver:
                assert receiver.stdout is not None
                assert receiver.stdout.readline() == "ready\n"
                run(wan, 0, SEND, host)
                assert receiver.communicate(timeout=60)[0].split() == ["5000000", sent]
        assert all(link.lost > 0.003 * link.packets for link in wan.status() if link.source < link.target)


def test_a_change_that_no_link_can_have_and_a_congestion_control_that_there_is_not_are_refused():
    with Wan.up(network(), congestion="reno") as wan:
        read = "print(open('/proc/sys/net/ipv4/tcp_congestion_control').read())"
        assert [run(wan, rank, read) for rank in (0, 1)] == ["reno", "reno"]
        assert wan.report()["congestion"] == "reno"
        with pytest.raises(UsageError, match="no link 0→2"):
            wan.set(0, 2, rate=1e6)
        with pytest.raises(UsageError, match=r"rate of link 0→1 is -1\.0"):
            wan.set(0, 1, rate=-1.0)
        with pytest.raises(UsageError, match=r"loss of link 0→1 is 1\.5"):
            wan.set(0, 1, loss=1.5)
        assert {link.rate for link in wan.status()} == {50e6}
    with pytest.raises(UsageError, match="congestion control 'nonsense': this kernel has"):
        Wan.up(network(), congestion="nonsense")


def test_changes_of_the_file_are_applied_on_time_and_only_once_they_have_begun():
    text = PAIR + "changes: [{at: 500ms, between: [0, 1], rate: 20Mbit}]"
    with Wan.up(network(text), start_changes=False) as wan:
        time.sleep(0.7)
        assert wan.status()[0].rate == 50e6
        began = clock.monotonic()
        wan.start_changes()
        while wan.status()[0].rate == 50e6:
            assert clock.monotonic() < began + 60
            time.sleep(0.005)
        assert clock.monotonic() - began > 0.45
        assert [link.rate for link in wan.status()] == [20e6, 20e6]


def test_access_caps_hold_for_what_a_node_sends_itself_and_not_for_what_it_forwards():
    text = """
nodes: {0: {}, 1: {egress: 10Mbit}, 2: {ingress: 15Mbit}}
links:
  - {between: [0, 1], rate: 40Mbit, latency: 2ms}
  - {between: [1, 2], rate: 40Mbit, latency: 2ms}
"""
    with Wan.up(network(text)) as wan:
        assert wan.backend == "relay"
        assert_rate(wan, 1, 0, 10e6)
        assert_rate(wan, 0, 2, 15e6)
        assert_rate(wan, 2, 0, 40e6)


def test_without_latency_and_loss_the_kernel_alone_makes_the_links():
    text = "nodes: {0: {}, 1: {}}\nlinks: [{between: [0, 1], rate: 50Mbit}]"
    with Wan.up(network(text)) as wan:
        assert wan.backend == "netem"
        assert_rate(wan, 0, 1, 50e6)
        wan.set(0, 1, rate=20e6)
        assert_rate(wan, 0, 1, 20e6)
        assert wan.status()[0].bytes > 1_000_000
