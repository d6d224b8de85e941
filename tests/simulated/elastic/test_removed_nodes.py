"""A node that was cut off for so long that its elastic job has gone on without it."""

import functools

import numpy as np
import pytest

from netstorm.errors import NodeRemoved
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.protocol.frames import SCHEDULER
from tests.simulated.elastic.elastic_run import ElasticRun


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


@pytest.mark.parametrize("seed", [13, 15, 18, 23])
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
