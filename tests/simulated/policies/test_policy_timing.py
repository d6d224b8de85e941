"""From which round on a new policy applies."""

from __future__ import annotations

import numpy as np
import pytest

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.protocol.frames import open_frames
from netstorm.protocol.messages import Part
from netstorm.topology.network import Network, Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree

STAR = Tree.undirected(Rank(0), (-1, 0, 0))
CHAIN = Tree.undirected(Rank(0), (-1, 0, 1))
VALUES = 20_000


def versions_by_round(cluster):
    """Return, once it has run, which policy versions the parts of each round named."""
    found: dict[int, set[int]] = {}

    def watch(source, target, header, payload):
        message = open_frames(header, 1 if payload is None else 2).message
        if isinstance(message, Part):
            found.setdefault(message.round, set()).add(message.version)

    cluster.network.watch = watch
    return found


def push(cluster, *, times=1):
    return [node.push("a", np.ones(VALUES, np.float32)) for node in cluster.nodes for _ in range(times)]


def job(rate):
    network = Network.uniform(3, rate=rate, latency=0.01)
    policy = Policy(version=0, trees=(STAR,), weights=(1,))
    cluster = SimulatedCluster(3, network=network, policy=policy, chunk_size=1000).join()
    for node in cluster.nodes:
        node.register("a", (VALUES,), "float32")
    return cluster


@pytest.mark.parametrize(("rate", "first"), [(4e5, 4), (20e6, 5)])
def test_after_long_rounds_the_next_one_runs_under_a_policy_that_comes_during_one(rate, first):
    cluster = job(rate)
    seen = versions_by_round(cluster)
    for _ in range(3):
        cluster.run_until_ended(push(cluster), 60)
    pending = push(cluster)  # round 3
    cluster.run_for(0.035)
    cluster.install_policy(Policy(version=1, trees=(CHAIN,), weights=(1,)))
    cluster.run_until_ended(pending, 60)
    for _ in range(3):
        cluster.run_until_ended(push(cluster), 60)
    assert {round: versions for round, versions in seen.items() if round >= 2} == {
        round: {int(round >= first)} for round in range(2, 7)
    }


def test_rounds_that_are_pushed_ahead_do_not_wait_for_the_end_of_the_one_before():
    cluster = job(4e5)
    for _ in range(3):
        cluster.run_until_ended(push(cluster), 60)
    begun = cluster.now
    one = push(cluster)
    cluster.run_until_ended(one, 60)
    alone = cluster.now - begun
    begun = cluster.now
    both = push(cluster, times=2)
    cluster.run_for(0.5)
    rounds = {round for _, round in cluster.nodes[0].machine.joined.aggregation.rounds}
    assert len(rounds) == 2  # the second one is under way, too
    cluster.run_until_ended(both, 60)
    assert cluster.now - begun < 2.2 * alone
