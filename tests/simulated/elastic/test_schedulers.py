"""The scheduler of an elastic job ends: it is started again, or a standby takes the job over."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.lab.simulation.process import host_of
from netstorm.protocol.frames import SCHEDULER
from tests.simulated.elastic.elastic_run import STEPS, ElasticRun
from tests.simulated.jobs import examples


@given(st.integers(0, 2**32), st.integers(2, 5))
@examples(2)
def test_results_are_exact_while_nodes_and_the_scheduler_die_and_come_back(seed, nodes):
    check_with_restarts(seed, nodes, deaths=2)


@pytest.mark.parametrize(
    ("seed", "nodes"),
    [
        pytest.param(2193, 2, id="a newcomer with the state is at a barrier when the last other rank dies"),
        pytest.param(5109, 2, id="a restarted scheduler must know which barrier a newcomer comes to next"),
        pytest.param(7179, 2, id="a rank misses a view in which another process gets a rank"),
        pytest.param(5034, 3, id="two others die that a newcomer with the state would have summed with"),
    ],
)
def test_jobs_whose_schedulers_died_and_that_have_failed_once(seed, nodes):
    check_with_restarts(seed, nodes, deaths=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(st.integers(0, 2**32), st.integers(2, 5))
@settings(max_examples=25)
def test_results_are_exact_whatever_dies_with_the_scheduler_many_seeds(seed, nodes):
    check_with_restarts(seed, nodes, deaths=4)


def check_with_restarts(seed, nodes, *, deaths):
    chance = random.Random(f"restarts {seed}")
    run = ElasticRun(seed, nodes, keep_log=True, keyed=True)
    cluster, at = run.cluster, run.cluster.now

    def end_scheduler():
        if cluster.scheduler.alive:
            cluster.faults.crash(SCHEDULER)

    def begin_scheduler():
        if not cluster.scheduler.alive:
            cluster.start(SCHEDULER)

    def end_node(rank):
        others = [one for other, one in run.programs.items() if other != rank]
        if run.programs[rank].running and any(one.running and one.has_state for one in others):
            cluster.faults.crash(rank, silent=chance.random() < 0.3)

    def begin_node(rank):
        if not run.programs[rank].running:
            run.start_again(rank)

    for _ in range(deaths):
        at += chance.random() * 2
        cluster.at(at, end_scheduler)
        cluster.at(at + chance.choice((0.01, 0.5, 3.0)), begin_scheduler)
        rank, moment = chance.randrange(nodes), at + chance.random() - 0.3
        cluster.at(moment, functools.partial(end_node, rank))
        cluster.at(moment + chance.choice((0.1, 8.0)), functools.partial(begin_node, rank))
    cluster.run_until(lambda: cluster.now > at + 9.0, 60.0, "all deaths")
    run.run_to_the_end()
    assert run.checks.checked > 0


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("dies_after_s", "away_s"), [(0.1, 1.0), (1.01, 1.0), (0.1, 8.0)])
def test_who_has_died_while_the_scheduler_was_away_holds_the_others_up_for_less_than_a_second(
    seed, dies_after_s, away_s
):
    """After 8 s its neighbours have given it up, and say nothing more of it."""
    run = ElasticRun(seed, 4, steps=400, pause_s=0.1, keep_log=True)
    cluster, victim = run.cluster, run.programs[2]
    cluster.run_for(2.0)
    begin = cluster.now
    cluster.faults.crash(SCHEDULER)
    cluster.at(begin + away_s, functools.partial(cluster.start, int(SCHEDULER)))
    cluster.at(begin + dies_after_s, functools.partial(cluster.faults.crash, 2))
    cluster.run_for(away_s + 0.1)
    step = max(one.step for one in run.programs.values()) + 2
    others = [one for one in run.programs.values() if one is not victim]
    cluster.run_until(lambda: all(one.step >= step for one in others), 0.8, "steps of all others")


@pytest.mark.parametrize("stopped_s", [0.5, 2.0, 4.0])
def test_who_is_stopped_while_the_scheduler_is_restarted_is_still_in_the_job(stopped_s):
    run = ElasticRun(3, 3, steps=400, pause_s=0.1, keep_log=True)
    cluster = run.cluster
    cluster.run_for(2.0)
    begin = cluster.now
    cluster.faults.suspend(1, stopped_s)
    cluster.faults.crash(SCHEDULER)
    cluster.at(begin + 0.2, functools.partial(cluster.start, int(SCHEDULER)))
    cluster.run_for(stopped_s + 3.0)
    assert run.programs[1].running
    assert cluster.is_member(run.programs[1].node)
    step = run.programs[1].step + 5
    cluster.run_until(lambda: all(one.step >= step for one in run.programs.values()), 5.0, "five steps")


@given(st.integers(0, 2**32), st.integers(3, 5), st.booleans(), st.booleans())
@examples(2)
def test_a_standby_takes_over_whether_or_not_a_node_dies_with_the_scheduler(seed, nodes, silent, dies):
    chance = random.Random(f"standby {seed}")
    run = ElasticRun(seed, nodes, standbys="standby:9091", keyed=True)
    cluster = run.cluster
    standby = cluster.start_standby("standby")
    end = cluster.now + chance.random()
    cluster.at(end, lambda: cluster.faults.crash(SCHEDULER, silent=silent))
    if dies:
        rank = chance.randrange(nodes)
        cluster.at(end + 8 * chance.random(), lambda: cluster.faults.crash(rank))
        cluster.at(end + 20.0, lambda: run.start_again(rank))
        cluster.run_until(lambda: cluster.now > end + 21.0, 60.0, "the return of the rank")
    run.run_to_the_end()
    assert standby.machine.job is not None
    assert all(program.running and program.step == STEPS for program in run.programs.values())


@given(st.integers(0, 2**32), st.integers(3, 6))
@examples(2)
def test_of_two_sides_of_a_partition_only_one_with_a_majority_goes_on(seed, nodes):
    """Both sides have a scheduler. Results of both would differ, which `ResultChecks` sees."""
    chance = random.Random(f"partition {seed}")
    run = ElasticRun(seed, nodes, steps=500, pause_s=0.6, standbys="standby:9091")
    cluster = run.cluster
    standby = cluster.start_standby("standby")
    there = chance.sample(range(nodes), chance.randint(1, nodes - 1))
    here = [rank for rank in range(nodes) if rank not in there]
    sides = (
        [host_of(SCHEDULER), *map(host_of, here)],
        ["standby", *map(host_of, there)],
    )

    def part():
        for one, other in itertools.product(*sides):
            cluster.network.cut(one, other)

    cluster.at(cluster.now + 1.0, part)
    cluster.run_until(lambda: cluster.now > 30.0, 60.0, "the decision")
    before = {rank: one.step for rank, one in run.programs.items()}
    cluster.run_until(lambda: cluster.now > 40.0, 60.0, "more steps")
    goes_on = [rank for rank, one in run.programs.items() if one.running and one.step > before[rank]]
    majority = next((side for side in (here, there) if 2 * len(side) > nodes), [])
    assert goes_on == sorted(majority)
    assert (standby.machine.job is not None) == (majority is there)
    assert (cluster.scheduler.machine.outcome is None) == (majority is here)
