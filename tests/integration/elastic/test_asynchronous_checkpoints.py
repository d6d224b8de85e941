"""Checkpoints of MXNet's asynchronous stores in elastic jobs: one rank writes them while all go on.

With a momentum of 1 and gradients of -1 the n-th push adds n to a value: after n of them it is n(n + 1)/2,
and its momentum n. So values tell whether the states next to them are of the same moment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from netstorm.checkpoint.files import latest_step
from tests.integration.elastic.asynchronous_scripts import PROLOGUE
from tests.integration.elastic.scripts import TIMEOUTS, ask_for_the_end, kill, start
from tests.integration.jobs import Job

BEGIN = (
    PROLOGUE
    + """
FOLDER = Path(os.environ["FOLDER"])
loaded = kv.load_checkpoint(FOLDER, missing_ok=True)
show("loaded:", loaded and loaded.step, loaded and sorted(loaded.extra))
kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, momentum=1.0))
SHAPES = {"small": (1, 4), "large": (2000, 4), "rows": (300, 4)}
gradients, outs = {}, {}
for key, shape in SHAPES.items():
    stype = "row_sparse" if key == "rows" else "default"
    gradients[key] = mx.nd.full(shape, -1, dtype="float64").tostype(stype)
    outs[key] = mx.nd.zeros(shape, dtype="float64", stype=stype)
    kv.init(key, mx.nd.zeros(shape, dtype="float64").tostype(stype))
    kv.pull(key, out=outs[key], ignore_sparse=False)

def pulled():
    for key, out in outs.items():
        kv.pull(key, out=out, ignore_sparse=False)
    return {key: out.asnumpy() for key, out in outs.items()}
"""
)

TRAINS = (
    BEGIN
    + """
steps = 0
while not STOP.exists():
    steps += 1
    for key, gradient in gradients.items():
        kv.push(key, gradient)
    pulled()
    if steps % 5 == 0:
        saving = kv.save_checkpoint(FOLDER, step=steps, extra={"steps": steps}, keep=2)
        if saving.wait(60).name != FOLDER.name:
            show("wrote", saving.step, "after", steps, kv.live_ranks)
mx.nd.waitall()
kv._barrier()
"""
)

CHECKS = (
    BEGIN
    + """
before = pulled()
show("least", min(found.min() for found in before.values()))
if NUMBER:  # it joins when the other one of those that have loaded has died, and nobody has pushed
    kv.push("small", mx.nd.zeros(SHAPES["small"], dtype="float64"))  # which adds its momentum once
    while kv._runtime.node.live.contributors != (0, 1):
        time.sleep(0.01)
    for key in ("large", "rows"):
        kv.push(key, gradients[key])
    after = pulled()
    for key in ("large", "rows"):
        counts = after[key] - before[key] - 1
        assert (before[key] == counts * (counts + 1) / 2).all(), (key, before[key][:2], after[key][:2])
        assert counts.min() > 0
    assert (after["small"] - before["small"] == np.sqrt(2 * before["small"] + 0.25) - 0.5).all()
    show("momenta are right")
else:
    show("has loaded")
while not STOP.exists():
    time.sleep(0.02)
kv._barrier()
"""
)


def train(folder: Path, checkpoints: Path) -> None:
    """Train with three ranks. The first writer dies, the next one writes on, and then one that has joined."""
    folder.mkdir()
    with Job(folder, 3, NETSTORM_ELASTIC="1:4", CHUNK_SIZE=1000, FOLDER=checkpoints, **TIMEOUTS) as job:
        for rank in range(3):
            start(job, rank, TRAINS, NUMBER=rank)
        job.wait_until_said(0, "wrote")
        kill(job, 0)
        job.wait_until_said(1, "wrote")
        start(job, 0, TRAINS, NUMBER=3)
        job.wait_until_said(0, "wrote")
        ask_for_the_end(folder)
        ended = [job.end(rank) for rank in range(3)]
    assert [one.code for one in ended] == [0, 0, 0], [one.text for one in ended]
    assert "loaded: None None" in ended[0].out
    assert "wrote" not in ended[2].out
    steps = [[int(line.split()[1]) for line in one.out.splitlines() if "wrote" in line] for one in ended]
    assert sorted(steps[1] + steps[0]) == steps[1] + steps[0], steps
    assert len(list(checkpoints.glob("step-*"))) <= 2
    assert latest_step(checkpoints) == steps[0][-1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkpoint_of_a_job_that_goes_on_has_values_and_states_of_the_same_moment(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    train(tmp_path / "first", checkpoints)
    folder = tmp_path / "second"
    folder.mkdir()
    settings: dict[str, Any] = {"NETSTORM_ELASTIC": "1:2", "CHUNK_SIZE": 700, **TIMEOUTS}
    with Job(folder, 2, FOLDER=checkpoints, **settings) as job:
        for rank in range(2):
            start(job, rank, CHECKS, NUMBER=0)
        for rank in range(2):
            job.wait_until_said(rank, "has loaded")
        kill(job, 0)
        start(job, 0, CHECKS, NUMBER=1)
        job.wait_until_said(0, "momenta are right")
        ask_for_the_end(folder)
        ended = [job.end(rank) for rank in range(2)]
    assert [one.code for one in ended] == [0, 0], [one.text for one in ended]
    step = latest_step(checkpoints)
    assert f"loaded: {step} ['steps']" in ended[1].out
    assert "loaded: None None" in ended[0].out
    assert "nothing is loaded, since the owners have newer values" in ended[0].err
    least = [float(line.split()[1]) for line in ended[1].out.splitlines() if line.startswith("least")]
    assert np.sqrt(2 * least[0] + 0.25) - 0.5 >= 5
