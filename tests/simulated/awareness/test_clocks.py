"""Clocks that are off by 50 ms and drift by 50 ppm: synchronised, and their effect on the estimators."""

from __future__ import annotations

import statistics

import pytest

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.process import LocalClock
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.simulated.awareness.reports import Reports

NODES = 9
CHAIN = Tree.undirected(Rank(0), (-1, *range(NODES - 1)))
LOW = Tree.undirected(Rank(0), (-1, 0, 0, 1, 1, 2, 2, 3, 3))
LEVELS = [1, 2, 2, 3, 3, 3, 3, 4, 4]


def wrong(rank):
    """Return a clock that is off, to either side; the scheduler's is right."""
    if rank < 0:
        return LocalClock()
    side = 1 if rank % 2 else -1
    return LocalClock(
        offset_s=1000.0 * rank, drift=50e-6 * side, sync_error_s=0.05 * side, sync_drift=50e-6 * side
    )


def errors(cluster):
    """Return by how much each node's idea of the cluster clock is off, in s."""
    return [node.process.synced_clock.cluster() - cluster.now for node in cluster.nodes]


def synchronised(source, tree=LOW, **options):
    policy = Policy(version=0, trees=(tree,), weights=(1,))
    cluster = SimulatedCluster(
        NODES, policy=policy, clocks=wrong, sync_clocks=True, clock_source=source, seed=2, **options
    ).join()
    cluster.run_for(300.0)
    return cluster


@pytest.mark.parametrize("source", ["scheduler", "trees"])
def test_clocks_that_are_off_and_drift_are_found_out(source):
    cluster = synchronised(source, delay_s=0.02)
    assert max(map(abs, errors(cluster))) < 1e-4
    views = [node.process.synced_clock for node in cluster.nodes]
    assert [view.sync.hops for view in views] == ([1] * NODES if source == "scheduler" else LEVELS)
    for rank, view in enumerate(views):
        assert view.sync.drift == pytest.approx(50e-6 if rank % 2 == 0 else -50e-6, rel=0.1)


@pytest.mark.parametrize("source", ["scheduler", "trees"])
def test_no_clock_is_off_by_more_than_it_says_whatever_queues_are_on_the_way(source):
    cluster = synchronised(source, delay_s=0.02, jitter_s=0.02)
    for node, error in zip(cluster.nodes, errors(cluster), strict=True):
        assert abs(error) < node.process.synced_clock.error_bound()


def test_along_a_chain_errors_add_up():
    last = {
        source: max(map(abs, errors(synchronised(source, CHAIN, delay_s=0.02, jitter_s=0.02))))
        for source in ("scheduler", "trees")
    }
    assert last["scheduler"] < last["trees"]


def test_the_scheduler_is_asked_where_parents_do_not_answer():
    cluster = synchronised("trees", delay_s=0.02)
    cluster.faults.crash(0, silent=True)
    datagrams = cluster.nodes[1].process.synced_clock._datagrams
    datagrams.serve("node0", lambda _: None)
    cluster.run_for(300.0)
    assert cluster.nodes[1].process.synced_clock.sync.hops == 1
    assert abs(errors(cluster)[1]) < 1e-4


@pytest.mark.slow
def test_what_estimators_make_of_clocks_with_and_without_synchronisation():
    def error(estimator, **options):
        return Reports("mesh", 1, clocks=wrong, estimator=estimator, **options).train(5, 4).median_error()

    assert error("busy") < 0.01
    assert error("busy", sync_clocks=True) < 0.01
    assert error("paper", sync_clocks=True) == pytest.approx(
        statistics.fmean(
            [Reports("mesh", 1, clocks=lambda _: LocalClock(), estimator="paper").train(5, 4).median_error()]
        ),
        abs=0.02,
    )
