"""Nodes come to an elastic job that has begun, or are out of it; policies follow its members."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.errors import NodeLost, NodeRemoved
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.protocol.frames import SCHEDULER
from netstorm.scheduler import rounds as consistency
from netstorm.scheduler.policies import tree_pairs
from netstorm.topology.network import Link, Network, Node, Rank
from tests.simulated.elastic.elastic_run import STEPS, ElasticRun
from tests.simulated.jobs import examples

AHEAD = 32


def test_ranks_that_have_not_come_yet_hold_no_round_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "ROUNDS_AHEAD", AHEAD)
    cluster = SimulatedCluster(2, elastic="1:3").join()
    for round in range(2 * AHEAD):
        sums = cluster.allreduce("w", [np.ones(1), np.full(1, float(round))])
        assert sums == [1.0 + round, 1.0 + round]


@pytest.mark.parametrize("states_differ", [False, True])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (7, 10))])
def test_each_of_two_newcomers_gets_the_state_in_the_middle_of_the_job(seed, states_differ):
    """The second has asked ranks 1 and 2; then the first has the state, and is the lowest rank that does."""
    chance = random.Random(f"newcomers {seed}")
    run = ElasticRun(seed, 4, steps=3 * STEPS, states_differ=states_differ)
    cluster = run.cluster
    for rank in (0, 3):
        cluster.faults.crash(rank)
    cluster.run_for(8.0)
    assert all(run.programs[rank].step > 5 for rank in (1, 2)), "they go on"
    start = cluster.now
    cluster.at(start, lambda: run.start_again(0))
    cluster.at(start + chance.uniform(0.0, 0.4), lambda: run.start_again(3))
    cluster.run_for(6.0)
    came = [run.programs[rank] for rank in (0, 3)]
    assert all(one.has_state for one in came), "none waits for the job's end"
    assert all(one.step < 3 * STEPS for one in run.programs.values()), "the job has ended: this shows nothing"
    run.run_to_the_end()


# ------------------------------ all die that contribute, while newcomers have all of the state, or part of it


def job_of(run) -> Any:
    """Return the job as its scheduler has it."""
    return run.cluster.scheduler.machine.job


def crash_contributors(run, *, silent=False):
    """End all processes that are no newcomers; return their ranks."""
    job = job_of(run)
    gone = sorted(set(job.members.present) - set(job.silent))
    for rank in gone:
        run.cluster.faults.crash(rank, silent=silent)
    return gone


@given(st.integers(0, 2**32), st.integers(2, 5), st.booleans())
@examples(4)
def test_newcomers_that_have_fetched_the_state_go_on_alone(seed, nodes, states_differ):
    check_newcomers_go_on(seed, nodes, states_differ=states_differ)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(st.integers(0, 2**32), st.integers(2, 5), st.booleans())
@settings(max_examples=100)
def test_newcomers_that_have_fetched_the_state_go_on_alone_many_seeds(seed, nodes, states_differ):
    check_newcomers_go_on(seed, nodes, states_differ=states_differ)


def check_newcomers_go_on(seed, nodes, *, states_differ=False):
    chance = random.Random(f"alone {seed}")
    run = ElasticRun(seed, nodes, states_differ=states_differ, keep_log=True)
    cluster, job = run.cluster, job_of(run)
    cluster.run_for(0.5)
    for rank in chance.sample(range(nodes), chance.randint(1, nodes - 1)):
        cluster.faults.crash(rank)
        cluster.at(cluster.now + 0.5 + chance.random(), functools.partial(run.start_again, rank))

    def newcomer_has_state():
        return any(run.programs[rank].running and run.programs[rank].has_state for rank in job.silent)

    cluster.run_until(newcomer_has_state, 30.0, "a newcomer with the state")
    gone = crash_contributors(run, silent=chance.random() < 0.3)
    if chance.random() < 0.3:
        cluster.faults.crash(SCHEDULER)
        cluster.at(cluster.now + chance.choice((0.01, 1.0)), lambda: cluster.start(SCHEDULER))
    for rank in gone:
        cluster.at(cluster.now + chance.choice((0.1, 1.0, 8.0)), functools.partial(run.start_again, rank))
    cluster.run_for(12.0)
    run.run_to_the_end()
    assert all(one.running and one.step == STEPS for one in run.programs.values())


def slowly(plan, seconds):
    """Return the plan of a program that rests before each step."""
    return dataclasses.replace(plan, pause_s=lambda _rank, _step: seconds)


def test_a_newcomer_without_the_state_begins_anew_with_that_of_one_that_is_further_behind():
    """Rank 1 has the state, and rests; rank 2 comes much later, and is told of later rounds alone."""
    run = ElasticRun(2, 3, steps=200, pause_s=0.05)
    cluster, job = run.cluster, job_of(run)
    for rank in (1, 2):
        cluster.faults.crash(rank)
    cluster.run_for(2.0)
    fast, run.plan = run.plan, slowly(run.plan, 5.0)
    run.start_again(1)
    cluster.run_until(lambda: run.programs[1].has_state, 10.0, "the state at rank 1")
    behind, run.plan = run.programs[1].step, fast
    cluster.run_until(lambda: run.programs[0].step >= behind + 20, 10.0, "steps of rank 0 alone")
    run.start_again(2)
    cluster.run_until(lambda: 2 in job.silent and not job.changing, 10.0, "a view with rank 2")
    assert (job.silent, run.programs[2].has_state) == ((1, 2), False)
    assert crash_contributors(run) == [0]
    setattr(run.programs[1], "_plan", fast)  # noqa: B010
    run.run_to_the_end()
    assert run.programs[2].fetched in (behind, behind + 1)
    assert [run.programs[rank].step for rank in (1, 2)] == [200, 200]


def test_the_job_ends_by_name_if_no_newcomer_has_all_of_the_state():
    run = ElasticRun(3, 2)
    cluster, job = run.cluster, job_of(run)
    cluster.faults.crash(1)
    cluster.run_for(2.0)
    run.start_again(1)
    cluster.run_until(lambda: 1 in job.silent and not job.changing, 10.0, "a view with rank 1")
    assert not run.programs[1].has_state
    crash_contributors(run)
    cluster.run_until(lambda: run.programs[1].error is not None, 10.0, "the end")
    error = run.programs[1].error
    assert isinstance(error, NodeLost)
    assert "rank 0 (node0:" in str(error)
    assert "no rank is left that has the job's state" in str(error)


# ------------------------------------ a node that was cut off for so long that its job has gone on without it


@pytest.mark.parametrize("stopped_s", [8.0, 30.0])
def test_it_hears_that_it_is_out_since_when_and_why(stopped_s):
    cluster = SimulatedCluster(3, seed=1, elastic="1:3", heartbeat_timeout_s=4.0, link_timeout_s=3.0).join()
    cluster.allreduce("w", [np.ones(10)] * 3)
    cluster.faults.suspend(1, stopped_s)
    for other in (SCHEDULER, 0, 2):  # a stopped process alone would be waited for
        cluster.faults.cut(1, other)
        cluster.at(cluster.now + stopped_s, functools.partial(cluster.faults.heal, 1, other))
    stopped = cluster.nodes[1]
    cluster.run_until(lambda: stopped.failure is not None, stopped_s + 20, "the end of rank 1")
    assert isinstance(stopped.failure, NodeRemoved)
    assert "rank 1 is out of the job since view 1" in str(stopped.failure)
    assert "no heartbeat for 4.0 s" in str(stopped.failure)
    pending = [node.push("w", np.ones(10)) for node in (cluster.nodes[0], cluster.nodes[2])]
    cluster.run_until_ended(pending)
    assert all((one.result() == 2).all() for one in pending)


@pytest.mark.parametrize("seed", [13, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (15, 18, 23))])
def test_others_may_call_otherwise_than_one_that_has_gone_on_alone(seed):
    """Rank 0 gives its group its values, which do not arrive, makes the next call and dies."""
    run = ElasticRun(seed, 3, steps=12, pause_s=0.0, group=(0, 2))
    cluster, programs = run.cluster, run.programs
    calls = 6 + 2 * (seed % 3)

    def both_share() -> bool:
        groups = [programs[rank]._some for rank in (0, 2)]
        return all(group is not None and group.called == calls for group in groups)

    cluster.run_until(both_share, 20.0, "the group's values on their way")
    for rank in (1, 2):
        cluster.faults.cut(0, rank, one_way=True)
    cluster.run_for(0.3)
    cluster.faults.crash(0)
    run.run_to_the_end()
    assert all(programs[rank].step == 12 for rank in (1, 2))


# ------------------------------------------------------- policies follow the network and the members together

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
