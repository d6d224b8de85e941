"""Ten thousand changes of policy at random moments: no deadlock, nothing lost or doubled, all ranks alike."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from netstorm.lab.simulation.cluster import SimulatedCluster
from tests.simulated.jobs import random_detours, random_policy

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
    cluster.finish()


@pytest.mark.parametrize("seed", range(2))
def test_sums_are_exact_over_a_hundred_policy_changes(seed):
    many_changes(seed, 50)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(100, 108))
def test_sums_are_exact_over_ten_thousand_policy_changes(seed):
    many_changes(seed, CHANGES)
