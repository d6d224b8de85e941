"""A failure at the surviving ranks: an error that names rank and reason, in time, for every later call."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import (
    Closed,
    KeyMismatch,
    NodeFailed,
    NodeLost,
    SchedulerLost,
    Unavailable,
    WaitTimeout,
)
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.faults import Crash, Cut
from netstorm.lab.testing.strategies import fault_plans
from netstorm.protocol.frames import SCHEDULER
from tests.simulated.failures.workload import endless_rounds, some_rounds
from tests.simulated.jobs import examples

MARGIN_S = 3.0
"""Beyond the time-out: heartbeat intervals, round trips, the scheduler's decision."""


@given(st.integers(0, 2**32), st.integers(2, 6), st.data())
@examples(15)
def test_when_a_node_dies_all_others_are_told_who_in_time_and_for_good(seed, nodes, data):
    victim = data.draw(st.integers(0, nodes - 1))
    silent = data.draw(st.booleans())
    cluster = SimulatedCluster(nodes, seed=seed, chunk_size=50, delay_s=0.01).join()
    start = cluster.now
    pending = endless_rounds(cluster)
    death = start + data.draw(st.floats(0.0, 0.5))
    Crash(at=death, rank=victim, silent=silent).schedule(cluster.faults)
    cluster.run_for(death - cluster.now)
    survivors = [node for node in cluster.nodes if node.rank != victim]
    limit = cluster.settings.heartbeat_timeout_s + MARGIN_S
    cluster.run_until(lambda: all(node.failure for node in survivors), limit, "everybody's NodeLost")
    for node in survivors:
        assert isinstance(node.failure, NodeLost)
        assert re.search(rf"rank {victim} \(node{victim}:\d+\)", str(node.failure))
        assert "last heard" in str(node.failure)
        assert all(one.ended for owner, one in pending if owner is node)
        later = node.push("w", np.zeros(200, np.float32))
        cluster.run_for(0.0)
        with pytest.raises(NodeLost, match=f"rank {victim} "):
            later.result()


@given(st.integers(0, 2**32), st.integers(1, 5), st.booleans(), st.floats(0.0, 0.5))
@examples(8)
def test_when_the_scheduler_dies_all_nodes_say_so(seed, nodes, silent, after):
    cluster = SimulatedCluster(nodes, seed=seed, chunk_size=50, delay_s=0.01).join()
    endless_rounds(cluster)
    Crash(at=cluster.now + after, rank=SCHEDULER, silent=silent).schedule(cluster.faults)
    limit = after + cluster.settings.heartbeat_timeout_s + cluster.settings.link_timeout_s + MARGIN_S
    cluster.run_until(lambda: all(node.failure for node in cluster.nodes), limit, "SchedulerLost")
    for node in cluster.nodes:
        assert isinstance(node.failure, SchedulerLost)
        assert "scheduler" in str(node.failure)


def test_a_link_that_stays_cut_ends_a_job_that_has_no_other_and_names_both_its_ends():
    cluster = SimulatedCluster(2, seed=5, topology="star", hub=0).join()
    endless_rounds(cluster)
    Cut(at=cluster.now + 0.1, source=0, target=1).schedule(cluster.faults)
    limit = cluster.settings.link_timeout_s + cluster.settings.heartbeat_timeout_s + 2 * MARGIN_S
    cluster.run_until(lambda: all(node.failure for node in cluster.nodes), limit, "NodeLost")
    for node in cluster.nodes:
        assert isinstance(node.failure, NodeLost)
        assert "rank 0 (node0:" in str(node.failure)
        assert "rank 1 (node1:" in str(node.failure)


@given(st.integers(0, 2**32), st.integers(2, 6), st.data())
@examples(15)
def test_whatever_is_cut_and_however_long_everything_ends_well_or_with_an_error(seed, nodes, data):
    plan = data.draw(fault_plans(nodes, duration_s=0.5, longest_cut_s=40.0))
    cluster = SimulatedCluster(nodes, seed=seed, delay_s=0.01, chunk_size=30).join()
    for fault in plan:
        fault.schedule(cluster.faults)
    pending = some_rounds(cluster, rounds=12)
    cluster.run_until(
        lambda: all(node.has_left or node.failure for node in cluster.nodes),
        2 * (cluster.settings.link_timeout_s + cluster.settings.heartbeat_timeout_s + MARGIN_S),
        "an end at every node",
    )
    assert all(one.ended for one in pending)
    for node in cluster.nodes:
        assert node.has_left or isinstance(node.failure, Unavailable)


def test_a_program_that_fails_is_quoted_at_all_other_ranks():
    cluster = SimulatedCluster(3, seed=4).join()
    endless_rounds(cluster)
    cluster.run_for(0.1)
    cluster.nodes[2].fail("ValueError: no such file")
    cluster.run_until(lambda: all(node.failure for node in cluster.nodes), 1.0)
    for rank in (0, 1):
        assert isinstance(cluster.nodes[rank].failure, NodeFailed)
        assert "rank 2 (node2:" in str(cluster.nodes[rank].failure)
        assert "ValueError: no such file" in str(cluster.nodes[rank].failure)


def test_a_program_that_fails_right_after_a_push_leaves_a_node_that_is_quiet():
    cluster = SimulatedCluster(2, seed=1)
    cluster.allreduce("w", [np.ones(3)] * 2)
    pushed = cluster.nodes[0].push("w", np.ones(3))
    cluster.nodes[0].fail("interrupted")
    cluster.run_for(60.0)
    assert isinstance(pushed.error, Closed)
    assert cluster.nodes[0].process.stack.next_tick() == math.inf


def test_ranks_that_mean_different_things_by_a_key_are_both_told_both_meanings():
    cluster = SimulatedCluster(3, seed=1).join()
    pending = [node.push("w", np.ones((4, 2 + (node.rank == 1)), np.float32)) for node in cluster.nodes]
    cluster.run_until_ended(pending, 5.0)
    for one in pending:
        with pytest.raises(KeyMismatch, match=r"rank 1 has w.* as \(4, 3\)|rank \d has w.* as \(4, 2\)"):
            one.result()


@pytest.mark.parametrize("silent", [False, True])
def test_a_node_that_dies_right_after_asking_to_join_does_not_keep_its_rank_from_the_next(silent):
    cluster = SimulatedCluster(3, seed=1, start_at={2: 30.0})
    cluster.at(0.5, lambda: cluster.faults.crash(0, silent=silent))
    cluster.at(6.0, lambda: cluster.start(0))
    cluster.run_for(31.0)
    results = cluster.allreduce("w", [np.ones(3)] * 3)
    assert all((total == 3).all() for total in results)


@pytest.mark.parametrize("silent", [False, True])
def test_the_job_does_not_begin_with_a_node_that_died_while_it_waited(silent):
    cluster = SimulatedCluster(3, seed=1, start_at={2: 30.0})
    cluster.at(0.5, lambda: cluster.faults.crash(0, silent=silent))
    cluster.run_for(40.0)
    assert "not here: 0" in cluster.scheduler.machine.status_text()


def test_nodes_wait_for_a_scheduler_and_for_each_other():
    cluster = SimulatedCluster(3, seed=9, start_at={SCHEDULER: 20.0, 2: 40.0})
    cluster.run_for(39.0)
    assert not any(cluster.started(rank).joined.ended for rank in (0, 1))
    results = cluster.allreduce("w", [np.ones(3)] * 3)
    assert all((total == 3).all() for total in results)


def test_a_wait_that_is_in_vain_says_what_every_process_waits_for():
    cluster = SimulatedCluster(2, seed=1).join()
    one = cluster.nodes[0].push("w", np.ones(3))
    with pytest.raises(WaitTimeout) as error:
        cluster.run_until_ended([one], 2.0)
    assert "rank 0 is running, waits for round 0 of key 'w'" in str(error.value)
    assert "rank 1 is running, waits for nothing" in str(error.value)
    assert "scheduler: " in str(error.value)
    assert "Heartbeat" in str(error.value)
