"""The machine of the scheduler dies, and another one is started elsewhere; nodes may not leave the job."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.faults import Reset
from netstorm.protocol.frames import SCHEDULER
from netstorm.protocol.messages import Resume
from tests.simulated.failures.test_scheduler_restart import QUICK, versions_of_rounds
from tests.simulated.failures.workload import some_rounds
from tests.simulated.jobs import examples, jobs, on_messages

LOST_BY_ALL_S = 8.0


@given(jobs(nodes=(1, 6), policies=(1, 4)))
@examples(3)
def test_sums_are_exact_and_no_round_has_two_policies(job):
    check_with_recoveries(job)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(jobs(nodes=(2, 9), policies=(1, 8)))
@settings(max_examples=20)
def test_sums_are_exact_and_no_round_has_two_policies_many_seeds(job):
    check_with_recoveries(job)


def check_with_recoveries(job):
    """The scheduler ends, and so does the first one that takes over; policies change all the time."""
    chance = random.Random(f"recoveries {job.seed}")
    cluster = job.cluster(recoverable=True, **QUICK)
    cluster.network.keyed = True
    cluster.join()
    versions = versions_of_rounds(cluster)
    at = begin = cluster.now
    running: list[Any] = [cluster.scheduler]

    def end():
        running[-1].die(silent=chance.random() < 0.3)

    def recover(host):
        running.append(cluster.start_standby(host, [chance.randrange(job.nodes)]))

    for host in ("second", "third"):
        at += chance.random() * (job.spread_s + 0.1)
        cluster.at(at, end)
        at += chance.choice((0.01, 3.0, 12.0))
        cluster.at(at, lambda host=host: recover(host))
        at += LOST_BY_ALL_S
        cut = Reset(at=at + chance.random(), source=SCHEDULER, target=chance.randrange(job.nodes))
        cut.schedule(cluster.faults)
    taking_over: set[int] = set()

    def install(number):
        machine = running[-1].machine
        serving = machine if running[-1] is cluster.scheduler else machine.job
        if running[-1].alive and serving is not None:
            version = serving.policy.version + 1
            policy = job.policy(random.Random(f"{job.seed} {number}"), version)
            running[-1].call(lambda now: serving.install(policy, now))
            if policy.takes_over:
                taking_over.add(version)

    pending = job.push_all(cluster, policies=False)
    for number in range(1, 4 * job.policies):
        cluster.at(begin + chance.random() * (at - begin), lambda number=number: install(number))
    cluster.run_until_ended(pending.values(), 600.0)
    job.check(pending)
    assert all(len(seen - taking_over) <= 1 for seen in versions.values())
    cluster.run_until(
        lambda: len(running) == 3 and running[-1].machine.job is not None, 200.0, "the last one"
    )
    ends = [node.finish() for node in cluster.nodes]
    cluster.run_until_ended(ends, 120.0)
    assert all(one.ended_well for one in ends)
    cluster.run_until(lambda: running[-1].machine.outcome is not None, 60.0, "the scheduler's end")
    assert running[-1].machine.outcome.exit_code == 0


@given(st.integers(0, 2**32), st.integers(1, 5), st.floats(0.0, 0.15))
@examples(4)
def test_barriers_and_the_job_s_end_survive_a_scheduler_that_ends_at_any_moment(seed, nodes, after):
    cluster = SimulatedCluster(nodes, seed=seed, delay_s=0.01, recoverable=True, **QUICK).join()
    pending = some_rounds(cluster, rounds=20)
    barriers = [node.barrier() for node in cluster.nodes]
    cluster.run_for(after)
    cluster.faults.crash(SCHEDULER)
    scheduler = cluster.start_standby("elsewhere", range(nodes))
    cluster.run_until_ended(barriers, 60.0)
    assert all(one.ended_well for one in barriers)
    cluster.run_until(lambda: all(node.has_left for node in cluster.nodes), 60.0, "everybody's end")
    assert all(one.ended_well for one in pending)
    cluster.run_until(lambda: scheduler.machine.outcome is not None, 60.0, "the scheduler's end")


def test_all_nodes_must_come_and_the_error_names_those_that_do_not():
    cluster = SimulatedCluster(3, seed=1, recoverable=True, join_timeout_s=30.0, **QUICK)
    cluster.allreduce("w", [np.ones(10)] * 3)
    for rank in (SCHEDULER, 1):
        cluster.faults.crash(rank)
    scheduler = cluster.start_standby("elsewhere", [0, 2])
    cluster.run_until(lambda: scheduler.machine.outcome is not None, 40.0, "the end")
    outcome = scheduler.machine.outcome
    assert outcome is not None
    assert outcome.exit_code == 2
    text = outcome.text
    assert "2 of 3 nodes have come, without rank 1 (node1:" in text
    assert "expected all, since nodes may not leave this job" in text


def test_a_node_that_has_come_does_not_go_back_to_a_scheduler_that_others_still_follow():
    """In this job nobody goes on without the others, so that no two schedulers can bind rounds."""
    cluster = SimulatedCluster(3, seed=1, recoverable=True, keep_log=True, **QUICK)
    cluster.allreduce("w", [np.ones(10)] * 3)
    cluster.faults.cut(SCHEDULER, 0)
    scheduler = cluster.start_standby("elsewhere", [0])
    resumed: list[str] = []
    on_messages(cluster, Resume, lambda _, target, __: resumed.append(target))
    cluster.run_until(lambda: "elsewhere" in resumed, 30.0, "the one that has lost its scheduler")
    cluster.faults.heal(SCHEDULER, 0)
    cluster.run_until(lambda: cluster.nodes[1].failure is not None, 60.0, "the end")
    assert "rank 0" in str(cluster.nodes[1].failure)
    assert scheduler.machine.job is None
