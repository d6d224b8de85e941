"""Reports of steps: their numbers and words; and whom a sum waits for."""

from __future__ import annotations

import numpy as np

from netstorm.kvstore.process.step_report import StepReport
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree

REPORT = StepReport(
    seconds=2.0,
    network_s=1.5,
    ranks={3: 1.25, 4: 0.0},
    links={(2, 5): 0.25},
    bytes_sent=1_000_000,
    bytes_received=10,
    policy=4,
    view=0,
)


def test_scalars_are_flat_names_and_numbers():
    assert REPORT.scalars("n/") == {
        "n/seconds": 2.0,
        "n/network_s": 1.5,
        "n/compute_s": 0.5,
        "n/bytes_sent": 1e6,
        "n/bytes_received": 10.0,
        "n/policy": 4.0,
        "n/view": 0.0,
        "n/waiting_s/rank_3": 1.25,
        "n/waiting_s/rank_4": 0.0,
        "n/waiting_s/link_2_to_5": 0.25,
    }


def test_in_words_the_longest_waits_come_first_and_none_are_left_out():
    assert str(REPORT) == (
        "2s: sums under way for 1.5s, 1MB sent; waited for rank 3 (1.25s); for what comes over 2→5 (250ms)"
    )


def chain():
    """Return a policy of one tree, 2→1→0."""
    tree = Tree(root=Rank(0), reduce_parent=(-1, 0, 1), broadcast_parent=(-1, 0, 1))
    return Policy(version=1, trees=(tree,), weights=(1,), reason="test")


def test_who_has_not_contributed_and_what_is_to_come_from_whom():
    cluster = SimulatedCluster(3, seed=1, policy=chain()).join()
    for rank in (0, 1):
        cluster.nodes[rank].push("w", np.ones(10, np.float32))
    cluster.run_for(1.0)
    awaited = [node.machine.awaited() for node in cluster.nodes]
    assert awaited[0] == ({1, 2}, {1}), "rank 1 sends its sum once rank 2 has contributed"
    assert awaited[1] == ({2}, {2})
    assert awaited[2] == (set(), set())
    late = cluster.nodes[2].push("w", np.ones(10, np.float32))
    cluster.run_until_ended([late], 5.0)
    cluster.run_for(1.0)
    assert all(node.machine.awaited() == (set(), set()) for node in cluster.nodes)
