"""Reports of local steps, and their answers, between real nodes and the real scheduler on virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from netstorm.kvstore.membership import StepsRequest
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.node import Pending
from netstorm.lab.testing.faults import Breaks
from netstorm.protocol.frames import SCHEDULER
from netstorm.protocol.messages import StepTimes

STEP_S = (1.0, 2.0, 4.0)


def report(cluster: SimulatedCluster, rank: int, round: int) -> Pending:
    node = cluster.nodes[rank]
    pending = Pending(cluster.timeline, f"rank {rank}: steps of round {round}")
    times = StepTimes(training=0, round=round, step_s=STEP_S[rank], least=1, most=9)
    request = StepsRequest(report=times, done=pending.done)
    pending.collect_with(lambda: request.steps)  # type: ignore[arg-type, return-value]
    node.process.call(lambda _: node.machine.local_steps.report(request))
    return pending


@pytest.mark.parametrize("faults", [[], [Breaks(probability=0.1)]], ids=["", "broken connections"])
def test_each_node_hears_how_many_steps_to_take(faults: list[Any]):
    cluster = SimulatedCluster(nodes=3, seed=3, faults=faults).join()
    for round in range(5):
        pending = [report(cluster, rank, round) for rank in range(3)]
        cluster.run_until_ended(pending, 60.0)
        assert [one.result() for one in pending] == [4, 2, 1]


def test_who_finishes_is_waited_for_no_more():
    cluster = SimulatedCluster(nodes=3, seed=3).join()
    pending = [report(cluster, rank, 0) for rank in range(2)]
    cluster.nodes[2].finish()
    cluster.run_until_ended(pending, 60.0)
    assert [one.result() for one in pending] == [2, 1]


def test_a_restarted_scheduler_hears_the_last_reports_again():
    cluster = SimulatedCluster(
        3, seed=3, keep_log=True, link_timeout_s=2.0, heartbeat_timeout_s=6.0, scheduler_timeout_s=60.0
    ).join()
    cluster.run_until_ended([report(cluster, rank, 0) for rank in range(3)], 60.0)
    waiting = [report(cluster, rank, 1) for rank in range(2)]
    cluster.run_for(1.0)
    assert not any(one.ended for one in waiting)
    cluster.faults.crash(SCHEDULER)
    cluster.run_for(3.0)
    cluster.start(SCHEDULER)
    last = report(cluster, 2, 1)
    cluster.run_until_ended([*waiting, last], 60.0)
    assert [one.result() for one in (*waiting, last)] == [4, 2, 1]
