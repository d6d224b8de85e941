"""Sums that may be late go as packets, over a network that does to packets whatever it likes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from netstorm.errors import SettingsError
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.packets import PacketFaults
from netstorm.protocol.messages import LossTerms
from netstorm.pslite.datagram.lanes import Packet
from netstorm.settings import Settings
from netstorm.topology.network import Link, Network, Rank, Routing
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.simulated.bounded_loss.lossy_job import run

BAD = PacketFaults(loss=0.2, duplicate=0.1, corrupt=0.05, late=0.2, late_s=0.05)
TERMS = LossTerms(bound=0.5, deadline_s=30.0)
VALUES, CHUNK = 40_000, 4000


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("more", [{}, {"policies": 3}, {"crashes": 1, "policies": 1}], ids=str)
def test_sums_are_exact_over_those_that_they_name_whatever_happens_to_packets(seed, more):
    report = run(1000 * len(more) + seed, packets=BAD, **more)
    assert report.results
    assert report.over_lanes
    assert report.resent


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2030))
def test_so_it_is_in_many_jobs(seed):
    faults = PacketFaults(loss=seed % 7 / 10, duplicate=seed % 3 / 5, corrupt=seed % 4 / 20, late=0.3)
    run(seed, policies=seed % 3, crashes=int(seed % 4 == 3), packets=faults)


def job(faults=PacketFaults(), *, steps=3, rate=20e6, before_last=lambda _: None, **settings: Any):  # noqa: B008
    """Run some steps of a star of three; return the cluster, its counters and the last results."""
    links = tuple(
        Link(source=Rank(a), target=Rank(b), rate=rate, latency=0.01)
        for a in range(3)
        for b in range(3)
        if a != b
    )
    cluster = SimulatedCluster(
        3,
        network=Network(nodes=Network.uniform(3).nodes, links=links, routing=Routing.OVERLAY),
        policy=Policy(version=0, trees=(Tree.undirected(Rank(0), (-1, 0, 0)),), weights=(1,)),
        chunk_size=CHUNK,
        loss_bound=TERMS.bound,
        packet_faults=faults,
        **{"datagrams": True, **settings},
    ).join()
    for node in cluster.nodes:
        node.register("a", (VALUES,), "float32")
    pending = []
    for step in range(steps):
        if step == steps - 1:
            before_last(cluster)
        pending = [
            node.push("a", np.full(VALUES, rank + 1, np.float32), loss=TERMS)
            for rank, node in enumerate(cluster.nodes)
        ]
        cluster.run_until_ended(pending, 300)
    return cluster, [node.machine.counters.snapshot() for node in cluster.nodes], pending


def all_sums(pending):
    return [set(one.result()) for one in pending]


def test_once_a_lane_works_all_sums_and_no_results_go_over_it():
    _, counters, pending = job(steps=4)
    assert all_sums(pending) == [{6.0}] * 3
    assert "lane_messages" not in counters[0]  # the root sends results alone
    assert all(one["lane_messages"] >= 2 * VALUES / CHUNK for one in counters[1:])


def test_a_run_follows_from_its_seed():
    clusters = [job(BAD, seed=7)[0] for _ in range(2)]
    assert len({cluster.digest() for cluster in clusters}) == 1


def test_without_the_setting_there_are_no_lanes():
    cluster, counters, _ = job(datagrams=False)
    assert not cluster.packets.sockets()
    assert not any(name.startswith("lane") for one in counters for name in one)


def test_where_no_packets_arrive_sums_go_over_tcp():
    cluster, counters, pending = job(PacketFaults(loss=1.0))
    assert all_sums(pending) == [{6.0}] * 3
    assert cluster.packets.lost
    assert not any("lane_messages" in one for one in counters)


def test_what_is_on_a_lane_that_falls_silent_goes_over_tcp():
    def cut(cluster):
        cluster.packets.faults = PacketFaults(loss=1.0)

    _, counters, pending = job(steps=4, before_last=cut)
    assert all_sums(pending) == [{6.0}] * 3
    assert all(one["lane_failures"] == 1 for one in counters[1:])


def test_a_strangers_packets_are_dropped_and_counted():
    def attack(cluster):
        chance = np.random.default_rng(1)
        for sockets in cluster.packets.sockets():
            recorded = list(cluster.packets.recorded)
            for _ in range(200):
                packet = bytearray(recorded[chance.integers(len(recorded))])
                for _ in range(chance.integers(0, 4)):
                    packet[chance.integers(len(packet))] ^= chance.integers(1, 256)
                sockets.deliver(Packet(0, bytes(packet), "stranger", 1))
                sockets.deliver(Packet(0, chance.bytes(chance.integers(0, 1500)), "stranger", 1))

    _, counters, pending = job(steps=4, before_last=attack)
    assert all_sums(pending) == [{6.0}] * 3
    dropped = [sum(one.get(f"lane_dropped_{why}", 0) for why in ("frame", "unknown")) for one in counters]
    assert min(dropped) >= 200  # all that are random; of recorded ones, those that have changed


def test_packets_say_how_important_they_are():
    cluster, _, _ = job(steps=4)
    marks = {mark for sockets in cluster.packets.sockets() for mark in sockets.marks}
    assert marks == {0, 34}  # acknowledgements, and AF41: one layer, whose values are all as large


def test_datagrams_without_a_bound_are_an_error_that_says_so():
    with pytest.raises(SettingsError, match="NETSTORM_DATAGRAMS=1: expected NETSTORM_LOSS_BOUND"):
        Settings.from_environment({"NETSTORM_DATAGRAMS": "1"})
