"""NETSTORM_REPRODUCIBLE: the same job gives the same bits, whatever its links and its ranks are like."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from netstorm.errors import SettingsError
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.faults import Reset

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
    assert len({tuple(sums_of(seed, dtype=dtype)) for seed in range(6)}) == 1


def test_without_it_they_do_not() -> None:
    assert len({tuple(sums_of(seed, reproducible=False)) for seed in range(6)}) > 1


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
