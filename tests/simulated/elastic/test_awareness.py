"""Policies of elastic jobs follow the network and the members together."""

from __future__ import annotations

import numpy as np

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.scheduler.policies import tree_pairs
from netstorm.topology.network import Link, Network, Node, Rank

BYTES = 200_000


def mesh(fast=1e8, slow=2e6):
    """Return a mesh of four in which 1-2 is slow: the best trees of all lead over rank 0, and the best ones
    without it over rank 3.
    """
    quick = ({0, 1}, {0, 2}, {0, 3}, {1, 3}, {2, 3})
    return Network(
        nodes=tuple(Node(rank=Rank(rank)) for rank in range(4)),
        links=tuple(
            Link(source=Rank(a), target=Rank(b), rate=fast if {a, b} in quick else slow, latency=0.005)
            for a in range(4)
            for b in range(4)
            if a != b
        ),
    )


def rounds(cluster, ranks, number, limit_s=60.0):
    """Let ranks make some rounds; return how many seconds the last one took."""
    began = cluster.now
    for _ in range(number):
        began = cluster.now
        pending = [cluster.started(rank).push("w", np.full(BYTES // 4, 1.0, np.float32)) for rank in ranks]
        cluster.run_until_ended(pending, limit_s)
        assert all(one.result()[0] == len(ranks) for one in pending)
    return cluster.now - began


def test_when_a_rank_dies_the_next_policy_is_for_the_others_alone():
    cluster = SimulatedCluster(
        4,
        network=mesh(),
        awareness=True,
        elastic="1:4",
        update_time_s=2.0,
        heartbeat_timeout_s=4.0,
        chunk_size=10_000,
        topology="fapt",
    ).join()
    rounds(cluster, range(4), 3)
    cluster.faults.crash(0)
    rounds(cluster, (1, 2, 3), 1)
    job = cluster.scheduler.machine.job
    assert job is not None
    assert tree_pairs(job.policy) & {(1, 2), (2, 1)}, "the trees of all, without rank 0"
    rounds(cluster, (1, 2, 3), 20)
    policy = job.policy
    assert policy.members == (1, 2, 3)
    assert not tree_pairs(policy) & {(1, 2), (2, 1)}
    assert "3 of 3 ranks are roots" in policy.reason
    cluster.finish()


def test_links_that_fail_are_planned_without_and_without_the_places_that_no_node_has():
    cluster = SimulatedCluster(
        4, elastic="1:5", heartbeat_timeout_s=4.0, link_timeout_s=2.0, chunk_size=1000, topology="fapt"
    ).join()
    rounds(cluster, range(4), 1)
    cluster.faults.crash(3)
    rounds(cluster, (0, 1, 2), 1)
    pairs = tree_pairs(cluster.scheduler.machine.policy)
    source, target = min(pairs)
    cluster.faults.cut(source, target)
    rounds(cluster, (0, 1, 2), 1)
    machine = cluster.scheduler.machine
    cluster.run_until(lambda: not tree_pairs(machine.policy) & {(source, target)}, 30.0)
    rounds(cluster, (0, 1, 2), 2)
    assert machine.policy.members == (0, 1, 2)
    assert cluster.started(source).failure is None
    assert "failed" in machine.policy.reason
    cluster.finish()
