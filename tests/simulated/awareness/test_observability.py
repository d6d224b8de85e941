"""The status of a simulated job at its scheduler."""

from __future__ import annotations

import numpy as np
import pytest

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.process import LocalClock
from netstorm.scheduler.build_status import build_status


def test_the_scheduler_sees_rounds_times_bytes_and_clocks_of_all_nodes():
    clocks = {
        -1: LocalClock(),
        0: LocalClock(),
        1: LocalClock(offset_s=-0.05, drift=-5e-5, sync_error_s=0.001),
    }
    cluster = SimulatedCluster(2, seed=5, delay_s=0.25, clocks=clocks.__getitem__).join()
    for _ in range(3):
        cluster.allreduce("w", [np.ones(1000, np.float32)] * 2)
    asked_at = cluster.now
    cluster.run_until(lambda: cluster.now > asked_at + 3.0, 10.0, "heartbeats")
    machine = cluster.scheduler.machine
    status = build_status(machine.snapshot(cluster.scheduler.now()), time=0.0)
    for node in status.nodes:
        assert (node.rounds, node.last_round) == (3, 2)
        assert node.round_s is not None
        assert node.round_s >= 0.25  # what it takes from the other rank
        assert node.waited_s is not None
        assert node.waited_s >= 3 * 0.25
        assert node.bytes_sent is not None
        assert node.bytes_sent >= 3 * 1000 * 4
    first, second = status.nodes
    assert first.clock_offset_s == 0.0
    assert second.clock_offset_s == pytest.approx(0.051, abs=0.005)
    assert second.clock_drift == pytest.approx(5e-5, rel=0.01)
    cluster.finish()
