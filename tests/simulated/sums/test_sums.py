"""Every rank ends each round with the same bytes, and they are the right sum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.faults import Breaks, Corrupt, Reset
from netstorm.lab.testing.strategies import fault_plans, networks
from netstorm.protocol.codecs import ITEM_BYTES
from tests.simulated.jobs import jobs
from tests.simulated.usable_networks import usable


def test_three_lines_are_enough():
    cluster = SimulatedCluster(nodes=4, seed=7)
    results = cluster.allreduce("w", [np.full(10, rank) for rank in range(4)])
    assert all((total == 6).all() for total in results)


@given(jobs(policies=(1, 4)))
@settings(max_examples=40)
def test_sums_are_right_for_all_shapes_types_orders_trees_and_delays(job):
    cluster = job.cluster().join()
    pending = job.push_all(cluster)
    cluster.run_until_ended(pending.values(), 600.0)  # a look-ahead may mean one chunk at a time
    job.check(pending)
    cluster.finish()


@given(st.data(), jobs(nodes=(2, 6), policies=(1, 3)))
@settings(max_examples=40)
def test_sums_are_right_whatever_breaks_as_long_as_nobody_dies(data, job):
    plan = data.draw(fault_plans(job.nodes, duration_s=max(0.05, job.spread_s), longest_cut_s=4.0))
    cluster = job.cluster(faults=plan).join()
    pending = job.push_all(cluster)
    cluster.run_until_ended(pending.values(), 600.0)  # a look-ahead may mean one chunk at a time
    job.check(pending)
    cluster.finish()


@given(jobs(nodes=(2, 5)), st.floats(0.0, 0.05))
@settings(max_examples=30)
def test_corrupted_payloads_are_sent_again(job, probability):
    cluster = job.cluster(faults=[Corrupt(probability=probability)]).join()
    pending = job.push_all(cluster)
    cluster.run_until_ended(pending.values(), 600.0)  # a look-ahead may mean one chunk at a time
    job.check(pending)


def test_corruption_does_occur_in_these_tests():
    cluster = SimulatedCluster(3, seed=1, faults=[Corrupt(probability=0.3)], chunk_size=10)
    results = cluster.allreduce("w", [np.arange(1000.0) for _ in range(3)])
    assert cluster.network.corrupted > 50
    assert all((total == 3 * np.arange(1000.0)).all() for total in results)


@given(st.integers(0, 2**32), st.integers(2, 6))
@settings(max_examples=30)
def test_a_connection_cut_in_mid_round_costs_nothing_but_time(seed, nodes):
    cut = [Reset(at=0.02 + 0.0007 * n, source=n % nodes, target=(n + 1) % nodes) for n in range(10)]
    cluster = SimulatedCluster(nodes, seed=seed, faults=cut, chunk_size=64)
    results = cluster.allreduce("w", [np.arange(20_000.0) + rank for rank in range(nodes)])
    right = nodes * np.arange(20_000.0) + sum(range(nodes))
    assert all(total.tobytes() == right.tobytes() for total in results)


def test_a_job_goes_on_over_connections_that_break_all_the_time():
    cluster = SimulatedCluster(4, seed=3, faults=[Breaks(probability=0.02)], chunk_size=50)
    cluster.join()
    for _ in range(20):
        results = cluster.allreduce("w", [np.full(1000, rank, np.float32) for rank in range(4)])
        assert all((total == 6).all() for total in results)


@given(networks(2, 7, changing=True, capped=True, routing=None).map(usable), st.integers(0, 2**32))
@settings(max_examples=30)
def test_sums_are_right_on_any_network(network, seed):
    cluster = SimulatedCluster(network.size, seed=seed, network=network, chunk_size=500)
    values = [np.arange(4000) % 100 + rank for rank in range(network.size)]
    results = cluster.allreduce("w", values, limit_s=3600)
    assert all((total == sum(values)).all() for total in results)


@pytest.mark.parametrize("dtype", [name for name in ITEM_BYTES if name.startswith("float")])
@given(st.integers(0, 2**32), st.integers(1, 9))
@settings(max_examples=15)
def test_fractions_are_summed_to_rounding_and_alike_on_all_ranks(dtype, seed, nodes):
    drawn = np.random.default_rng(seed)
    values = [drawn.standard_normal(500).astype(dtype) for _ in range(nodes)]
    cluster = SimulatedCluster(nodes, seed=seed, chunk_size=64)
    results = cluster.allreduce("w", values)
    assert len({total.tobytes() for total in results}) == 1
    exact = sum(value.astype(np.float64) for value in values)
    size = sum(abs(value.astype(np.float64)) for value in values)
    # each of at most `nodes` roundings is off by half a unit in the last place of a partial sum
    assert (abs(results[0] - exact) <= nodes * size * np.finfo(dtype).eps).all()
