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
from tests.wan.traces import LINE, PAIR, network, run

RECEIVE = """
import hashlib, socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
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
with socket.create_connection(("r1", 7000)) as connection:
    for _ in range(int(sys.argv[1])):
        connection.sendall(source.randbytes(1_000_000))
"""
RESOLVE = """
import socket
print(socket.gethostbyname("r2"), socket.gethostbyaddr("10.78.0.3")[0])
print(socket.gethostbyname(socket.gethostname()))
"""


def wire_rate(wan: Wan, source: int, target: int) -> float:
    (carried,) = measure_throughput(wan, [(source, target)], streams=2, warm_up_s=1.0, measure_s=1.0)
    return carried.goodput / carried.of_rate


def test_names_resolve_both_ways_in_every_namespace_and_the_machines_name_is_the_rank():
    with Wan.up(network(LINE)) as wan:
        assert run(wan, 1, RESOLVE).split() == ["10.78.0.3", "r2", "10.78.0.2"]


def test_ranks_without_a_link_reach_each_other_over_those_between():
    with Wan.up(network(LINE)) as wan:
        assert measure_latencies(wan, 0, 2, expected=0.03).round_trip == pytest.approx(0.030, abs=0.004)
        (carried,) = measure_throughput(wan, [(0, 2)], streams=2, warm_up_s=1.0, measure_s=1.0)
        assert carried.goodput / carried.of_rate == pytest.approx(40e6, rel=0.1)


def test_ranks_reach_each_other_by_ipv6_over_the_same_lossy_links():
    text = LINE.replace("latency: 5ms", "latency: 5ms, loss: 1%")
    with Wan.up(network(text)) as wan:
        receive = RECEIVE.replace("((sys.argv[1], 7000))", "((sys.argv[1], 7000), family=socket.AF_INET6)")
        words = wan.command(2, [sys.executable, "-c", receive, "r2v6"])
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "ready\n"
            run(wan, 0, SEND.replace('"r1"', '"r2v6"'), "5")
            source = Random(1)
            sent = hashlib.sha256(b"".join(source.randbytes(1_000_000) for _ in range(5)))
            assert receiver.communicate(timeout=60)[0].split() == ["5000000", sent.hexdigest()]
        assert sum(link.lost for link in wan.status()) > 0


def test_the_congestion_control_of_every_namespace_is_the_one_asked_for():
    with Wan.up(network(), congestion="reno") as wan:
        read = "print(open('/proc/sys/net/ipv4/tcp_congestion_control').read())"
        assert [run(wan, rank, read) for rank in (0, 1)] == ["reno", "reno"]
        assert wan.report()["congestion"] == "reno"


def test_one_direction_can_be_changed_while_the_other_stays():
    with Wan.up(network()) as wan:
        wan.set(0, 1, rate=10e6, latency=0.020)
        there, back = wan.status()
        assert (there.rate, there.latency) == (10e6, 0.020)
        assert (back.rate, back.latency) == (50e6, 0.005)
        measured = measure_latencies(wan, 0, 1, expected=0.03)
        assert measured.there == pytest.approx(0.020, abs=0.003)
        assert measured.back == pytest.approx(0.005, abs=0.003)
        assert wire_rate(wan, 0, 1) == pytest.approx(10e6, rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": 0, "target": 2, "rate": 1e6}, "no link 0→2"),
        ({"source": 0, "target": 1, "rate": -1.0}, "rate of link 0→1 is -1.0"),
        ({"source": 0, "target": 1, "loss": 1.5}, "loss of link 0→1 is 1.5"),
    ],
)
def test_a_change_that_no_link_can_have_is_refused(change, message):
    with Wan.up(network()) as wan:
        with pytest.raises(UsageError, match=message):
            wan.set(**change)
        assert {link.rate for link in wan.status()} == {50e6}


def test_changes_of_the_file_are_applied_on_time_and_only_once_they_have_begun():
    text = PAIR + "changes: [{at: 500ms, between: [0, 1], rate: 20Mbit}]"
    with Wan.up(network(text), start_changes=False) as wan:
        time.sleep(0.7)
        assert wan.status()[0].rate == 50e6
        wan.start_changes()
        began = clock.monotonic()
        while wan.status()[0].rate == 50e6:
            assert clock.monotonic() < began + 5
            time.sleep(0.005)
        assert clock.monotonic() - began == pytest.approx(0.5, abs=0.15)
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
        assert wire_rate(wan, 1, 0) == pytest.approx(10e6, rel=0.1)
        assert wire_rate(wan, 0, 2) == pytest.approx(15e6, rel=0.1)
        assert wire_rate(wan, 2, 0) == pytest.approx(40e6, rel=0.1)


def test_without_latency_and_loss_the_kernel_alone_makes_the_links():
    text = "nodes: {0: {}, 1: {}}\nlinks: [{between: [0, 1], rate: 50Mbit}]"
    with Wan.up(network(text)) as wan:
        assert wan.backend == "netem"
        assert wire_rate(wan, 0, 1) == pytest.approx(50e6, rel=0.1)
        wan.set(0, 1, rate=20e6)
        assert wire_rate(wan, 0, 1) == pytest.approx(20e6, rel=0.1)
        assert wan.status()[0].bytes > 1_000_000


def checksum_over(wan: Wan, megabytes: int, timeout: float) -> None:
    source = Random(1)
    expected = hashlib.sha256()
    for _ in range(megabytes):
        expected.update(source.randbytes(1_000_000))
    receiver = subprocess.Popen(
        wan.command(1, [sys.executable, "-c", RECEIVE, wan.address(1)]), stdout=subprocess.PIPE, text=True
    )
    with receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        run(wan, 0, SEND, str(megabytes), timeout=timeout)
        size, digest = receiver.stdout.read().split()
    assert int(size) == megabytes * 1_000_000
    assert digest == expected.hexdigest()
    assert wan.status()[0].lost > 0.005 * wan.status()[0].packets


def lossy() -> str:
    return PAIR.replace("50Mbit, latency: 5ms", "300Mbit, latency: 5ms, loss: 1%")


def test_the_checksum_of_10_mb_over_a_link_with_one_percent_loss_matches():
    with Wan.up(network(lossy())) as wan:
        checksum_over(wan, 10, 60)


@pytest.mark.slow
def test_the_checksum_of_100_mb_over_a_link_with_one_percent_loss_matches():
    with Wan.up(network(lossy())) as wan:
        checksum_over(wan, 100, 100)
