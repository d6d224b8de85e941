"""A run is a function of its arguments."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.faults import random_plan

RUN = """
from tests.simulated.test_determinism import run
print(run(5))
"""


def run(seed, faults=4):
    plan = random_plan(4, seed, duration_s=0.2, faults=faults, longest_cut_s=2.0)
    cluster = SimulatedCluster(4, seed=seed, jitter_s=0.002, chunk_size=100, faults=plan).join()
    chance = random.Random(seed)
    for _ in range(3):
        values = np.arange(chance.randint(1, 2000), dtype=np.float32)
        cluster.allreduce(f"key{len(values)}", [values] * 4)
    cluster.finish()
    return cluster.digest()


def test_the_same_seed_gives_the_same_run():
    assert run(5) == run(5)


def test_another_seed_gives_another_run():
    assert run(5) != run(6)


def test_the_order_of_hashes_does_not_matter():
    digests = {
        subprocess.run(
            [sys.executable, "-c", RUN],
            env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("0", "1", "42")
    }
    assert digests == {run(5) + "\n"}
