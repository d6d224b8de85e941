"""Under gradient compression all ranks end with the exact sum of the quantised values, whatever the trees."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from netstorm.compression.quantised import quantised
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.strategies import fault_plans
from netstorm.topology.network import Network, Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.simulated.jobs import KeyUse, examples, jobs

THRESHOLD = 0.5


def compressed(job):
    """Return a job of one float32 key of as many elements as all of its keys."""
    elements = sum(int(np.prod(key.shape)) for key in job.keys)
    return replace(
        job, keys=(KeyUse("w", (elements,), "float32"),), chunk_size=max(job.chunk_size, elements // 50)
    )


def push_all(cluster, gradients, plain_rounds, seed):
    """Push [round][rank], at times of each rank's own; return what is waited for, by round and rank."""
    pending = {}
    for node in cluster.nodes:
        chance = random.Random(f"{seed} {node.rank}")
        times = sorted(chance.random() * 0.2 for _ in gradients)
        for number, (time, values) in enumerate(zip(times, gradients, strict=True)):

            def push(node=node, number=number, values=values):
                threshold = None if number in plain_rounds else THRESHOLD
                pending[number, node.rank] = node.push(
                    "w", values[node.rank], in_place=(node.rank + number) % 2 == 0, threshold=threshold
                )

            cluster.at(cluster.now + time, push)
    cluster.run_until(lambda: len(pending) == len(gradients) * cluster.size, 1.0, "all pushes")
    return pending


def expected(gradients, plain_rounds):
    """Return the sums, from each rank's own signs and residuals."""
    residuals = [np.zeros_like(values) for values in gradients[0]]
    for number, values in enumerate(gradients):
        if number in plain_rounds:
            yield sum(values)
            continue
        total = np.zeros_like(values[0])
        for value, residual in zip(values, residuals, strict=True):
            before = residual + value
            quantised(value, residual, np.float32(THRESHOLD))
            total += before - residual  # multiples of a power of two: exact
        yield total


@given(jobs(nodes=(1, 9), policies=(1, 4)), st.data())
@examples(8)
def test_sums_are_exact_for_all_sizes_trees_delays_and_breaks(job, data):
    job = compressed(job)
    plan = data.draw(fault_plans(job.nodes, duration_s=0.2, longest_cut_s=1.0)) if job.nodes > 1 else ()
    cluster = job.cluster(faults=plan).join()
    drawn = np.random.default_rng(job.seed)
    shape = (job.rounds, job.nodes, *job.keys[0].shape)
    gradients = [list(of_ranks) for of_ranks in drawn.integers(-8, 9, shape).astype(np.float32) / 8]
    plain_rounds = {0} if data.draw(st.booleans()) else set()
    job.change_policies(cluster)
    pending = push_all(cluster, gradients, plain_rounds, job.seed)
    cluster.run_until_ended(pending.values(), 600.0)
    for number, right in enumerate(expected(gradients, plain_rounds)):
        for rank in range(job.nodes):
            np.testing.assert_array_equal(
                pending[number, rank].result(), right, f"round {number}, rank {rank}"
            )
    cluster.finish()


def carried(threshold, *, nodes=4, elements=1_000_000):
    """Return the bytes from the leaf of a chain to its parent, and from the root to its child, in a round."""
    chain = Tree.undirected(Rank(0), (-1, *range(nodes - 1)))
    cluster = SimulatedCluster(nodes, policy=Policy(version=0, trees=(chain,), weights=(1,))).join()
    cluster.allreduce("w", [np.zeros(elements, np.float32)] * nodes)
    last = nodes - 1
    links = (last, last - 1), (0, 1)
    before = [cluster.traffic(*link) for link in links]
    drawn = np.random.default_rng(5)
    pending = [
        node.push("w", drawn.standard_normal(elements).astype(np.float32), threshold=threshold)
        for node in cluster.nodes
    ]
    cluster.run_until_ended(pending)
    return [cluster.traffic(*link) - begin for link, begin in zip(links, before, strict=True)]


def test_a_leaf_sends_a_16th_of_the_bytes_and_a_sum_over_4_ranks_comes_back_in_an_8th():
    plain, packed = carried(None), carried(0.5)
    assert plain[0] / packed[0] > 15.7  # headers
    assert plain[1] / packed[1] > 7.9


def test_gradients_below_the_threshold_cost_only_headers():
    cluster = SimulatedCluster(3).join()
    cluster.allreduce("w", [np.zeros(100_000, np.float32)] * 3)
    before = cluster.traffic(1, 0) + cluster.traffic(0, 1)
    pending = [node.push("w", np.full(100_000, 0.3, np.float32), threshold=0.5) for node in cluster.nodes]
    cluster.run_until_ended(pending)
    assert not any(one.result().any() for one in pending)
    assert cluster.traffic(1, 0) + cluster.traffic(0, 1) - before < 2000


def test_links_are_measured_and_rounds_are_several_times_shorter():
    took, meter = {}, None
    values = [np.random.default_rng(rank).standard_normal(1_500_000).astype(np.float32) for rank in range(4)]
    for threshold, rounds in ((None, 2), (0.5, 8)):
        network = Network.uniform(4, rate=50e6, latency=0.01)
        cluster = SimulatedCluster(4, network=network, awareness=True, topology="star").join()
        for _ in range(rounds):
            began = cluster.now
            pending = [node.push("w", values[node.rank], threshold=threshold) for node in cluster.nodes]
            cluster.run_until_ended(pending)
            took[threshold] = cluster.now - began
        meter = cluster.nodes[0].machine.meter
    assert meter is not None
    rates = {link.source: link.rate for link in meter.known().links}
    assert rates.keys() == {1, 2, 3}
    assert all(abs(rate / 50e6 - 1) < 0.05 for rate in rates.values())
    assert took[None] / took[0.5] > 4
