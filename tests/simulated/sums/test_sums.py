"""Every rank ends each round with the same bytes, and they are the right sum."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import SettingsError
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.faults import Breaks, Corrupt, Reset
from netstorm.lab.testing.strategies import fault_plans, networks
from netstorm.protocol.codecs import ITEM_BYTES
from tests.simulated.jobs import examples, jobs, usable


@given(jobs(policies=(1, 4)))
@examples(15)
def test_sums_are_right_for_all_shapes_types_orders_trees_and_delays(job):
    cluster = job.cluster().join()
    pending = job.push_all(cluster)
    cluster.run_until_ended(pending.values(), 600.0)  # a look-ahead may mean one chunk at a time
    job.check(pending)
    cluster.finish()


@given(st.data(), jobs(nodes=(2, 6), policies=(1, 3)))
@examples(15)
def test_sums_are_right_whatever_breaks_as_long_as_nobody_dies(data, job):
    plan = data.draw(fault_plans(job.nodes, duration_s=max(0.05, job.spread_s), longest_cut_s=4.0))
    cluster = job.cluster(faults=plan).join()
    pending = job.push_all(cluster)
    cluster.run_until_ended(pending.values(), 600.0)  # a look-ahead may mean one chunk at a time
    job.check(pending)
    cluster.finish()


@given(jobs(nodes=(2, 5)), st.floats(0.0, 0.05))
@examples(10)
def test_corrupted_payloads_are_sent_again(job, probability):
    cluster = job.cluster(faults=[Corrupt(probability=probability)]).join()
    pending = job.push_all(cluster)
    cluster.run_until_ended(pending.values(), 600.0)  # a look-ahead may mean one chunk at a time
    job.check(pending)


def test_corruption_does_occur_in_these_tests():
    cluster = SimulatedCluster(3, seed=1, faults=[Corrupt(probability=0.3)], chunk_size=10)
    results = cluster.allreduce("w", [np.arange(1000.0) for _ in range(3)])
    assert cluster.network.corrupted > 50
    assert all((total == 3 * np.arange(1000.0)).all() for total in results)


def test_a_job_goes_on_over_connections_that_break_all_the_time():
    cluster = SimulatedCluster(4, seed=3, faults=[Breaks(probability=0.02)], chunk_size=50)
    cluster.join()
    for _ in range(20):
        results = cluster.allreduce("w", [np.full(1000, rank, np.float32) for rank in range(4)])
        assert all((total == 6).all() for total in results)


@given(networks(2, 7, changing=True, capped=True, routing=None).map(usable), st.integers(0, 2**32))
@examples(10)
def test_sums_are_right_on_any_network(network, seed):
    cluster = SimulatedCluster(network.size, seed=seed, network=network, chunk_size=500)
    values = [np.arange(4000) % 100 + rank for rank in range(network.size)]
    results = cluster.allreduce("w", values, limit_s=3600)
    assert all((total == sum(values)).all() for total in results)


@pytest.mark.parametrize("dtype", [name for name in ITEM_BYTES if name.startswith("float")])
@given(st.integers(0, 2**32), st.integers(1, 9))
@examples(5)
def test_fractions_are_summed_to_rounding_and_alike_on_all_ranks(dtype, seed, nodes):
    drawn = np.random.default_rng(seed)
    values = [drawn.standard_normal(500).astype(dtype) for _ in range(nodes)]
    cluster = SimulatedCluster(nodes, seed=seed, chunk_size=64)
    results = cluster.allreduce("w", values)
    assert len({total.tobytes() for total in results}) == 1
    exact = sum(value.astype(np.float64) for value in values)
    size = sum(abs(value.astype(np.float64)) for value in values)
    # each of at most `nodes` roundings is off by half a unit in the last place of a partial sum
    assert (abs(results[0] - exact) <= nodes * size * np.finfo(dtype).eps).all()


# -------------------------------------------------------------------------------------- NETSTORM_REPRODUCIBLE

NODES = 5
SIZES = {"weights": 3000, "bias": 7, "embedding": 900}


def values_of(key: str, rank: int, dtype: str = "float32") -> npt.NDArray[Any]:
    """Return values of many magnitudes, so that the order of additions shows in the sums."""
    random = np.random.default_rng([rank, SIZES[key]])
    return (random.standard_normal(SIZES[key]) * 10.0 ** random.integers(-4, 4, SIZES[key])).astype(dtype)


def sums_of(
    seed: int, *, reproducible: bool = True, dtype: str = "float32", **cluster: object
) -> list[bytes]:
    """Return the bits of some rounds' sums, in a job whose messages take other times for each seed."""
    job = SimulatedCluster(
        NODES,
        seed=seed,
        jitter_s=0.05,
        chunk_size=100,
        reproducible=reproducible,
        topology="packing",
        **cluster,  # type: ignore[arg-type] # settings and arguments of the cluster
    ).join()
    found = []
    for _ in range(2):
        for key in SIZES:
            sums = job.allreduce(key, [values_of(key, rank, dtype) for rank in range(NODES)])
            assert len({one.tobytes() for one in sums}) == 1
            np.testing.assert_allclose(
                sums[0].astype(np.float64),
                sum(values_of(key, rank, dtype).astype(np.float64) for rank in range(NODES)),
                rtol=1e-2 if dtype == "float16" else 1e-4,
                atol=20 if dtype == "float16" else 1e-1,
            )
            found.append(sums[0].tobytes())
    job.finish()
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_other_delays_give_the_same_bits(dtype: str) -> None:
    assert len({tuple(sums_of(seed, dtype=dtype)) for seed in range(3)}) == 1


def test_without_it_they_do_not() -> None:
    assert len({tuple(sums_of(seed, reproducible=False)) for seed in range(3)}) > 1


def test_late_ranks_broken_connections_and_awareness_change_no_bit() -> None:
    expected = sums_of(0)
    assert sums_of(1, start_at={3: 2.0, 0: 5.0}) == expected
    assert sums_of(2, faults=[Reset(at=0.3, source=0, target=1)]) == expected
    assert sums_of(3, awareness=True, update_time_s=0.05) == expected


def test_what_depends_on_the_time_is_refused() -> None:
    for other in ({"elastic": "2:5"}, {"loss_bound": 0.1}, {"dgt": 1}):
        with pytest.raises(SettingsError, match="NETSTORM_REPRODUCIBLE=1 with"):
            SimulatedCluster(NODES, reproducible=True, **other)


def test_a_policy_that_replaces_the_first_one_is_said(caplog: pytest.LogCaptureFixture) -> None:
    job = SimulatedCluster(3, reproducible=True).join()
    job.install_policy(msgspec.structs.replace(job.policy, version=7, reason="a link has failed"))
    assert "policy version 7 (a link has failed): sums are rounded otherwise from here on" in caplog.text
    job.finish()
