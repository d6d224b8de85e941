"""A scheduler that keeps a log may end and restart at any moment: the job continues."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.errors import NodeLost, SchedulerLost
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.faults import Reset
from netstorm.protocol.frames import SCHEDULER
from netstorm.protocol.messages import Part
from netstorm.scheduler.replay_log import MAGIC, encode, read
from tests.simulated.failures.workload import failing_links, some_rounds
from tests.simulated.jobs import Job, KeyUse, examples, jobs, on_messages

QUICK: dict[str, Any] = {"link_timeout_s": 2.0, "heartbeat_timeout_s": 6.0, "scheduler_timeout_s": 60.0}


def crash_and_restart(cluster, at, after, *, silent=False, torn=0):
    """Let the scheduler end at a time, with the last bytes of its log missing, and begin again `after` s."""

    def end():
        if cluster.scheduler.alive:
            cluster.faults.crash(SCHEDULER, silent=silent)
            cluster.log.extend(encode(read(bytes(cluster.log), "")[0][-1:])[:torn])

    def begin():
        if not cluster.scheduler.alive:
            cluster.start(SCHEDULER)

    cluster.at(at, end)
    cluster.at(at + after, begin)


def versions_of_rounds(cluster):
    """Take note of the policies that each round of each key is seen to run under."""
    found: dict[tuple[int, int], set[int]] = {}

    def record(_source, _target, part):
        found.setdefault((part.key, part.round), set()).add(part.version)

    on_messages(cluster, Part, record)
    return found


def check_with_restarts(job, crashes=3, *, dying=False):
    chance = random.Random(f"restarts {job.seed}")
    cluster = job.cluster(keep_log=True, link_retry_s=3.0, **QUICK)
    for cut in failing_links(job.seed, job.nodes, 5.0) if dying else ():
        cut.schedule(cluster.faults)
    cluster.join()
    versions = versions_of_rounds(cluster)
    at = cluster.now
    for _ in range(crashes):
        at += chance.random() * (job.spread_s + 0.1)
        after = chance.choice((0.01, 0.5, 3.0, 12.0))
        # A host that is back answers what belongs to connections from before with a reset; this network does
        # not, so it has to be away until they are given up.
        silent = after > 10.0
        crash_and_restart(cluster, at, after, silent=silent, torn=chance.randrange(12))
        at += after
        Reset(at=at + chance.random(), source=SCHEDULER, target=chance.randrange(job.nodes)).schedule(
            cluster.faults
        )
    begin = cluster.now
    pending = job.push_all(cluster, policies=False)
    taking_over: set[int] = set()
    for number in range(1, job.policies):
        time = begin + chance.random() * (at - begin)

        def install(number=number):
            if cluster.scheduler.alive:
                version = cluster.scheduler.machine.policy.version + 1
                policy = job.policy(random.Random(f"{job.seed} {number}"), version)
                cluster.install_policy(policy)
                if policy.takes_over:
                    taking_over.add(version)

        cluster.at(time, install)
    cluster.run_until_ended(pending.values(), 600.0)
    job.check(pending)
    assert all(len(seen - taking_over) <= 1 for seen in versions.values())
    cluster.run_until(lambda: cluster.scheduler.alive and cluster.now > at, 200.0, "the last restart")
    cluster.finish(120.0)


@given(jobs(nodes=(1, 6), policies=(1, 4)))
@examples(8)
def test_sums_are_exact_and_no_round_has_two_policies_whenever_the_scheduler_ends_and_is_back(job):
    check_with_restarts(job)


@given(jobs(nodes=(3, 5), policies=(1, 4)))
@examples(4)
def test_links_may_die_meanwhile(job):
    check_with_restarts(job, dying=True)


def test_a_node_that_comes_back_after_the_others_hears_what_has_moved():
    key = KeyUse(name="key0", shape=(), dtype="float16")
    job = Job(
        nodes=9, seed=158432, keys=(key,), rounds=1, chunk_size=1, jitter_s=0.1, spread_s=0.01, policies=4
    )
    check_with_restarts(job, crashes=6, dying=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(jobs(nodes=(3, 9), policies=(1, 8)), st.booleans())
@settings(max_examples=250)
def test_sums_are_exact_whenever_the_scheduler_ends_many_seeds(job, dying):
    check_with_restarts(job, crashes=6, dying=dying)


@given(st.integers(0, 2**32), st.integers(1, 5), st.floats(0.0, 0.6), st.booleans())
@examples(8)
def test_a_job_with_barriers_and_its_end_survive_a_scheduler_that_ends_at_any_moment(
    seed, nodes, after, silent
):
    cluster = SimulatedCluster(nodes, seed=seed, delay_s=0.01, keep_log=True, **QUICK).join()
    pending = some_rounds(cluster, rounds=4)
    barriers = [node.barrier() for node in cluster.nodes]
    crash_and_restart(cluster, cluster.now + after, 4.0, silent=silent)
    cluster.run_until_ended(barriers, 60.0)
    assert all(one.ended_well for one in barriers)
    cluster.run_until(lambda: all(node.has_left for node in cluster.nodes), 60.0, "everybody's end")
    assert all(one.ended_well for one in pending)
    cluster.run_until(lambda: cluster.scheduler.machine.outcome is not None, 60.0, "the scheduler's end")


def test_nodes_go_on_as_far_as_they_have_been_granted_while_the_scheduler_is_away():
    cluster = SimulatedCluster(3, seed=1, keep_log=True, **QUICK)
    for _ in range(2):
        cluster.allreduce("w", [np.ones(10)] * 3)
    cluster.faults.crash(SCHEDULER)
    again = [node.push("w", np.ones(10)) for node in cluster.nodes]
    cluster.run_until_ended(again, 1.0)
    assert all((one.result() == 3).all() for one in again)
    waiting = [node.push("w", np.ones(10)) for node in cluster.nodes]
    cluster.run_for(20.0)
    assert not any(one.ended for one in waiting)
    node = cluster.nodes[0]
    assert "the scheduler, away for" in node.machine.waiting_text(node.process.now())
    cluster.start(SCHEDULER)
    cluster.run_until_ended(waiting, 5.0)
    assert all((one.result() == 3).all() for one in waiting)
    cluster.finish()


def test_short_rounds_go_on_for_two_seconds_without_a_scheduler():
    cluster = SimulatedCluster(3, seed=1, keep_log=True, delay_s=0.01, **QUICK)

    def rounds_take(count):
        begin = cluster.now
        for _ in range(count):
            sums = cluster.allreduce("w", [np.ones(10)] * 3)
            assert all((one == 3).all() for one in sums)
        return cluster.now - begin

    of_one = rounds_take(40) / 40
    cluster.faults.crash(SCHEDULER)
    assert rounds_take(int(1.8 / of_one)) < 2.0
    cluster.start(SCHEDULER)
    rounds_take(40)
    cluster.finish(60.0)


def test_a_scheduler_that_is_not_back_in_time_ends_the_job_and_the_error_names_the_limit():
    cluster = SimulatedCluster(2, seed=1, keep_log=True, **{**QUICK, "scheduler_timeout_s": 20.0})
    cluster.allreduce("w", [np.ones(10)] * 2)
    cluster.faults.crash(SCHEDULER)
    cluster.run_for(18.0)
    assert not any(node.failure for node in cluster.nodes)
    cluster.run_for(6.0)
    for node in cluster.nodes:
        assert isinstance(node.failure, SchedulerLost)
        assert "20 s (NETSTORM_SCHEDULER_TIMEOUT)" in str(node.failure)


def test_without_a_log_another_scheduler_is_a_stranger_as_before():
    cluster = SimulatedCluster(2, seed=1, **QUICK)
    cluster.allreduce("w", [np.ones(10)] * 2)
    cluster.faults.crash(SCHEDULER)
    cluster.run_for(0.5)
    cluster.start(SCHEDULER)
    cluster.run_until(lambda: all(node.failure for node in cluster.nodes), 5.0, "SchedulerLost")
    assert isinstance(cluster.nodes[0].failure, SchedulerLost)
    assert "does not know this rank 0" in str(cluster.nodes[0].failure)


def test_a_scheduler_with_an_empty_log_is_a_stranger_to_the_nodes_of_a_job_and_they_say_so_at_once():
    cluster = SimulatedCluster(2, seed=1, keep_log=True, **QUICK)
    cluster.allreduce("w", [np.ones(10)] * 2)
    cluster.faults.crash(SCHEDULER)
    assert cluster.log is not None
    del cluster.log[len(MAGIC) :]
    cluster.run_for(0.5)
    cluster.start(SCHEDULER)
    cluster.run_until(lambda: all(node.failure for node in cluster.nodes), 5.0, "SchedulerLost")
    assert "does not know this rank 1" in str(cluster.nodes[1].failure)


def test_a_process_that_was_never_in_the_job_is_a_stranger_to_the_scheduler_that_took_over():
    cluster = SimulatedCluster(2, seed=1, keep_log=True, **QUICK)
    cluster.allreduce("w", [np.ones(10)] * 2)
    cluster.faults.crash(SCHEDULER)
    cluster.start(SCHEDULER)
    newcomer = cluster.start_another(1, "other")
    cluster.run_until(lambda: newcomer.failure is not None, 10.0)
    assert "has all its 2 nodes" in str(newcomer.failure)
    results = cluster.allreduce("w", [np.ones(10)] * 2)
    assert all((one == 2).all() for one in results)


def test_a_node_that_dies_while_the_scheduler_is_away_is_lost_once_that_is_back():
    cluster = SimulatedCluster(3, seed=1, keep_log=True, **QUICK)
    cluster.allreduce("w", [np.ones(10)] * 3)
    cluster.faults.crash(SCHEDULER)
    cluster.faults.crash(2)
    cluster.run_for(5.0)
    cluster.start(SCHEDULER)
    cluster.run_until(lambda: all(node.failure for node in cluster.nodes[:2]), 20.0, "NodeLost")
    assert all(isinstance(node.failure, NodeLost) for node in cluster.nodes[:2])
    assert "rank 2 (node2:" in str(cluster.nodes[0].failure)


def test_a_link_that_fails_while_the_scheduler_is_away_is_gone_around_once_that_is_back():
    cluster = SimulatedCluster(3, seed=1, keep_log=True, **QUICK)
    cluster.allreduce("w", [np.ones(10)] * 3)
    cluster.faults.crash(SCHEDULER)
    cluster.faults.cut(0, 1)
    waiting = [node.push("w", np.ones(10)) for node in cluster.nodes]
    cluster.run_for(20.0)
    cluster.start(SCHEDULER)
    waiting += [node.push("w", np.ones(10)) for node in cluster.nodes]
    cluster.run_until_ended(waiting, 60.0)
    assert all((one.result() == 3).all() for one in waiting)
    cluster.finish()


def test_a_log_whose_job_is_over_tells_of_none():
    cluster = SimulatedCluster(2, seed=1, keep_log=True, **QUICK)
    cluster.allreduce("w", [np.ones(10)] * 2)
    cluster.finish()
    cluster.faults.crash(SCHEDULER)
    cluster.start(SCHEDULER)
    assert "waiting for 2 of 2 nodes" in cluster.scheduler.machine.status_text()
