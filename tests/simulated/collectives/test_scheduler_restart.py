"""Groups go on calling while the scheduler dies and is started again from its log."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.protocol.codecs import Element
from netstorm.protocol.frames import SCHEDULER
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.simulated.collectives.exchanges import all_reduce, groups_of, make_calls


def star(version: int, root: int, nodes: int) -> Policy:
    parents = tuple(-1 if rank == root else root for rank in range(nodes))
    return Policy(version=version, trees=(Tree.undirected(Rank(root), parents),), weights=(1,))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("begun_before", [0, 1, 40])
def test_calls_that_were_granted_before_a_restart_run_under_the_same_policies_after_it(
    seed: int, begun_before: int
) -> None:
    quick: dict[str, Any] = {
        "link_timeout_s": 2.0,
        "heartbeat_timeout_s": 6.0,
        "scheduler_timeout_s": 60.0,
    }
    cluster = SimulatedCluster(4, seed=seed, chunk_size=300, keep_log=True, jitter_s=0.01, **quick).join()
    everybody = groups_of(cluster, "all", (0, 1, 2, 3))
    pair = groups_of(cluster, "pair", (1, 3))
    expected: list[tuple[Any, int]] = []

    def call(count: int) -> None:
        for _ in range(count):
            size = (2, 900)[len(expected) % 2]
            for groups in (everybody, pair):
                exchanges = {
                    rank: all_reduce(np.full(size, rank, np.int64), Element.INT64) for rank in groups
                }
                calls = make_calls(cluster, groups, exchanges)
                expected.extend((one, sum(groups)) for one in calls.values())

    call(begun_before)
    cluster.run_for(0.02 * seed)
    cluster.faults.crash(SCHEDULER)
    call(50)
    cluster.run_for(3.0)
    cluster.start(SCHEDULER)
    cluster.run_for(1.0)
    call(50)
    cluster.run_until_ended([one for one, _ in expected], 120.0)
    version = cluster.scheduler.machine.policy.version
    cluster.install_policy(star(version + 1, seed % 4, 4))
    call(70)
    cluster.run_until_ended([one for one, _ in expected], 120.0)
    assert all((one.result() == total).all() for one, total in expected)
    cluster.finish()
