"""Changes of policy at random moments: no deadlock, nothing lost or doubled; since which round."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.protocol.messages import Part
from netstorm.topology.files import load_network
from netstorm.topology.network import Network, Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.simulated.jobs import nothing_was_amiss, on_messages, random_detours, random_policy

CHANGES = 500
"""Of one job."""


def many_changes(seed, changes):
    """Change over to random policies at random moments while rounds of three keys run; check every sum."""
    chance = random.Random(f"changes {seed}")
    nodes = chance.randint(2, 7)
    jitter_s = chance.choice((0.0, 0.003, 0.05))
    cluster = SimulatedCluster(
        nodes,
        seed=seed,
        policy=random_policy(chance, nodes),
        chunk_size=chance.choice((5, 20, 100)),
        jitter_s=jitter_s,
        delay_s=0.002,
        aux_rule=chance.choice(("arrival", "queue")),
        auxiliary_queue_length=3,
        explore_share=chance.choice((0.0, 0.1)),
        window_bytes=chance.choice((0, 300)),
    ).join()
    sizes = {f"key{number}": chance.randint(1, 90) for number in range(3)}
    taking_over = chance.choice((0.0, 0.3, 1.0))
    installed = 0
    ended = dict.fromkeys(sizes, 0)

    def change():
        nonlocal installed
        installed += 1
        policy = random_policy(chance, nodes, installed)
        policy = msgspec.structs.replace(policy, takes_over=chance.random() < taking_over)
        cluster.install_policy(random_detours(chance, policy) if chance.random() < 0.5 else policy)
        if installed < changes:
            cluster.at(cluster.now + chance.expovariate(1.0 / pause_s), change)

    def values(name, rank, number):
        return np.arange(sizes[name]) % 11 + rank * 3 + number % 13

    def push(node, name, number):
        one = node.push(name, values(name, node.rank, number))

        def check():
            right = sum(values(name, rank, number) for rank in range(nodes))
            assert one.result().tobytes() == right.tobytes(), (name, node.rank, number)
            ended[name] += 1
            if installed < changes or number < last[name]:
                last[name] = max(last[name], number + 1)
                push(node, name, number + 1)

        one.then(check)

    pause_s = chance.choice((0.001, 0.01, 0.05)) + jitter_s
    last = dict.fromkeys(sizes, 0)
    for node in cluster.nodes:
        for name in sizes:
            push(node, name, 0)
    change()
    cluster.run_until(
        lambda: installed == changes and all(ended[name] == nodes * (last[name] + 1) for name in sizes),
        3600.0,
        "the end of all rounds",
    )
    versions = {
        row for node in cluster.nodes for row in [node.machine.counters.snapshot().get("policies", 0)]
    }
    assert versions == {changes}
    nothing_was_amiss(cluster)
    cluster.finish()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_sums_are_exact_over_a_hundred_policy_changes(seed):
    many_changes(seed, 50)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(100, 104))
def test_sums_are_exact_over_thousands_of_policy_changes(seed):
    many_changes(seed, CHANGES)


# ------------------------------------------------------------------- from which round on a new policy applies

STAR = Tree.undirected(Rank(0), (-1, 0, 0))
CHAIN = Tree.undirected(Rank(0), (-1, 0, 1))
VALUES = 20_000


def versions_by_round(cluster):
    """Return, once it has run, which policy versions the parts of each round named."""
    found: dict[int, set[int]] = {}
    on_messages(cluster, Part, lambda _, __, part: found.setdefault(part.round, set()).add(part.version))
    return found


def push_all(cluster, *, times=1):
    return [node.push("a", np.ones(VALUES, np.float32)) for node in cluster.nodes for _ in range(times)]


def timed_job(rate):
    network = Network.uniform(3, rate=rate, latency=0.01)
    policy = Policy(version=0, trees=(STAR,), weights=(1,))
    cluster = SimulatedCluster(3, network=network, policy=policy, chunk_size=1000).join()
    for node in cluster.nodes:
        node.register("a", (VALUES,), "float32")
    return cluster


@pytest.mark.parametrize(("rate", "first"), [(4e5, 4), (20e6, 9)])  # short ones are granted .25 s ahead
def test_after_long_rounds_the_next_one_runs_under_a_policy_that_comes_during_one(rate, first):
    cluster = timed_job(rate)
    seen = versions_by_round(cluster)
    for _ in range(3):
        cluster.run_until_ended(push_all(cluster), 60)
    pending = push_all(cluster)  # round 3
    cluster.run_for(0.035)
    cluster.install_policy(Policy(version=1, trees=(CHAIN,), weights=(1,)))
    cluster.run_until_ended(pending, 60)
    for _ in range(10):
        cluster.run_until_ended(push_all(cluster), 60)
    assert {round: versions for round, versions in seen.items() if round >= 2} == {
        round: {int(round >= first)} for round in range(2, 14)
    }


def test_the_second_round_runs_under_a_policy_that_comes_during_the_first():
    cluster = timed_job(4e5)
    seen = versions_by_round(cluster)
    pending = push_all(cluster)
    cluster.run_for(1.0)
    cluster.install_policy(Policy(version=1, trees=(CHAIN,), weights=(1,)))
    for _ in range(2):
        cluster.run_until_ended(pending, 60)
        pending = push_all(cluster)
    assert seen == {0: {0}, 1: {1}}


def test_rounds_that_are_pushed_ahead_do_not_wait_for_the_end_of_the_one_before():
    cluster = timed_job(4e5)
    for _ in range(3):
        cluster.run_until_ended(push_all(cluster), 60)
    begun = cluster.now
    one = push_all(cluster)
    cluster.run_until_ended(one, 60)
    alone = cluster.now - begun
    begun = cluster.now
    both = push_all(cluster, times=2)
    cluster.run_for(0.5)
    rounds = {round for _, round in cluster.nodes[0].machine.joined.aggregation.rounds}
    assert len(rounds) == 2  # the second one is under way, too
    cluster.run_until_ended(both, 60)
    assert cluster.now - begun < 2.2 * alone


# ---------------------------------------------------------- smaller chunks on links that are known to be slow

SLOW = """
nodes: {0: {}, 1: {}, 2: {}, 3: {}}
links:
  - {between: [0, 1], rate: 13Mbit, latency: 5ms}
  - {between: [1, 2], rate: 14Mbit, latency: 5ms}
  - {between: [2, 3], rate: 12Mbit, latency: 5ms}
"""


def test_a_job_uses_them_and_a_round_over_slow_links_is_shorter(tmp_path: Path) -> None:
    file = tmp_path / "network.yaml"
    file.write_text(SLOW)
    ones = [np.ones(500_000, np.float32)] * 4
    seconds = []
    for asked in (["chunk_size"], []):
        settings: dict[str, Any] = dict.fromkeys(asked, 32_768)
        network = load_network(file)
        cluster = SimulatedCluster(4, network=network, network_file=str(file), model="2MB", **settings).join()
        cluster.allreduce("w", ones)
        began = cluster.now
        for total in cluster.allreduce("w", ones):
            assert (total == 4.0).all()
        seconds.append(cluster.now - began)
    assert seconds[1] < 0.9 * seconds[0]
