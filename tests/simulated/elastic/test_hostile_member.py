"""A member of an elastic job that sends what no correct one would, while another one dies."""

from __future__ import annotations

import numpy as np
import pytest

from netstorm.errors import NetStormError
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.hostile_member import HostileMember
from tests.simulated.failures.test_hostile_member import ENDING, assert_named

NODES = 4
STEPS = 15
WAIT_S = 20.0


def values(number: int, rank: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return a contribution of which each result shows whether it is in it."""
    return np.full(300, (number + 1) * 2.0**rank, np.float32)


def run(seed: int, *, forges_parts: bool = False, impersonates: bool = False) -> None:
    cluster = SimulatedCluster(
        NODES,
        seed=seed,
        elastic=f"1:{NODES}",
        topology=("fapt", "packing")[seed % 2],
        wait_timeout_s=WAIT_S,
        chunk_size=64,
        heartbeat_interval_s=0.5,
        heartbeat_timeout_s=3.0,
        link_timeout_s=2.0,
        detect_s=1.0,
    )
    cluster.network.keyed = True
    cluster.join()
    hostile, dies = seed % NODES, (seed + 1) % NODES
    member = HostileMember(
        cluster,
        hostile,
        seed=seed,
        forges_parts=forges_parts,
        impersonates=impersonates,
        most=400,
        spares=ENDING if impersonates else (),
    )
    correct = [node for node in cluster.nodes if node.rank not in (hostile, dies)]
    for number in range(STEPS):
        pending = {
            node.rank: node.push(f"w{number % 3}", values(number, node.rank))
            for node in cluster.nodes
            if node.alive and node.failure is None
        }
        if number == STEPS // 3:
            cluster.started(dies).process.die()
        cluster.run_until_ended([pending[node.rank] for node in correct], 3 * WAIT_S)
        errors: list[NetStormError] = []
        results = []
        for node in correct:
            try:
                results.append(pending[node.rank].result() / (number + 1))
            except NetStormError as error:
                errors.append(error)
        assert_named(errors, hostile)
        if errors:
            return
        if not forges_parts:
            assert all((result == results[0]).all() for result in results), "the same at all ranks"
            assert set(results[0].tolist()) <= set(range(1, 2**NODES)), "each contribution at most once"
    assert member.sent


WAYS: tuple[dict[str, bool], ...] = ({}, {"forges_parts": True}, {"impersonates": True})


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_view_changes_beside_a_member_that_lies(way: dict[str, bool]) -> None:
    run(1, **way)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_many_views_change_beside_members_that_lie(seed: int, way: dict[str, bool]) -> None:
    run(seed, **way)
