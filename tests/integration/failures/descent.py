"""A node that descends a gradient without MXNet until a file says that it is enough."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.integration.jobs import Ended, Job

Array = npt.NDArray[Any]

SIZE = 60_000

SCRIPT = """
import hashlib, sys
from pathlib import Path
import numpy as np
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.process.runtime import Runtime
from netstorm.settings import Settings
from tests.integration.failures.descent import SIZE, gradient

runtime = Runtime(Settings.from_environment())
enough = Path(sys.argv[0]).with_name("enough")
key = runtime.register(runtime.open_namespace(), "w", (SIZE,), "float64")
weights, total, step = np.zeros(SIZE), np.zeros(SIZE), 0
while total[0] == 0:
    mine = gradient(weights, runtime.rank, step)
    mine[0] = runtime.rank == 0 and enough.exists()
    operation = Operation(
        key=key, round=key.take_round(), source=mine, destination=total, done=print, rule="descent"
    )
    runtime.allreduce(operation)
    weights -= total
    step += 1
    print("step", step, flush=True)
runtime.barrier()
print("weights", step, hashlib.sha256(weights.tobytes()).hexdigest(), flush=True)
runtime.finish()
runtime.close()
"""


def gradient(weights: Array, rank: int, step: int) -> Array:
    """Return whole numbers, so that their sums are exact in any order."""
    found: Array = np.round(weights / 8.0) + (np.arange(SIZE) * (rank + 3) + step) % 17 - 8.0
    return found


def right(nodes: int, steps: int) -> str:
    """Return the digest of the weights that all ranks must end with."""
    weights = np.zeros(SIZE)
    for step in range(steps):
        total = np.sum([gradient(weights, rank, step) for rank in range(nodes)], axis=0)
        total[0] = step == steps - 1
        weights -= total
    return hashlib.sha256(weights.tobytes()).hexdigest()


def steps(job: Job, rank: int) -> int:
    """Return how many steps a rank has made so far."""
    return job.said(rank).count("step ")


def wait_for_steps(job: Job, rank: int, more: int) -> None:
    """Wait until a rank has made so many more steps."""
    job.wait_until_said(rank, f"step {steps(job, rank) + more}\n", 90)


def end_with_the_right_weights(job: Job) -> list[Ended]:
    """Let the job end, and check what all ranks have."""
    (job.folder / "enough").touch()
    ended = job.end_all()
    digests = {end.out.split("weights ", 1)[1].split("\n")[0] for end in ended}
    assert [end.code for end in ended] == [0] * job.nodes, "\n".join(end.text[-2000:] for end in ended)
    (line,) = digests
    made, digest = line.split()
    assert digest == right(job.nodes, int(made))
    assert job.end(-1).code == 0
    return ended


__all__ = ["SCRIPT", "end_with_the_right_weights", "right", "steps", "wait_for_steps"]
