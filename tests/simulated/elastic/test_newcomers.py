"""Nodes come to an elastic job that has begun: into new places, or into those of the dead."""

from __future__ import annotations

import random

import numpy as np
import pytest

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.scheduler import rounds as consistency
from tests.simulated.elastic.elastic_run import STEPS, ElasticRun

AHEAD = 32


def test_ranks_that_have_not_come_yet_hold_no_round_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "ROUNDS_AHEAD", AHEAD)
    cluster = SimulatedCluster(2, elastic="1:3").join()
    for round in range(2 * AHEAD):
        sums = cluster.allreduce("w", [np.ones(1), np.full(1, float(round))])
        assert sums == [1.0 + round, 1.0 + round]


@pytest.mark.parametrize("states_differ", [False, True])
@pytest.mark.parametrize("seed", [1, 7, 10])
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
