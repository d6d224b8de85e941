"""MXNet jobs save checkpoints, are killed, and go on from them, also with another number of ranks."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from netstorm.checkpoint.files import find_checkpoint
from tests.integration.jobs import Job

STEPS, SAVED = 6, 2

COMMON = """
import hashlib, json, signal, sys
import numpy as np
import netstorm.frontends.mxnet
from netstorm.frontends.mxnet.compat import mx

PATH, STEPS, SAVED = {path!r}, {steps}, {saved}
kv = mx.kv.create("dist_sync_netstorm")
rank = kv.rank
mx.random.seed(1 + rank); np.random.seed(1 + rank)  # other initial values at every rank and in every job
digests = []

def note(arrays):
    digests.append(hashlib.sha256(b"".join(array.asnumpy().tobytes() for array in arrays)).hexdigest())

def batch(step):
    draw = np.random.RandomState(1000 * step + rank)
    return mx.nd.array(draw.rand(8, 6)), mx.nd.array(draw.rand(8, 1))

def end(**found):
    print(json.dumps({{"digests": digests, **found}}), flush=True)
    if SAVED >= 0:
        from netstorm.checkpoint.jobs import wait_for_last_saving
        wait_for_last_saving()
        print("to be killed", flush=True)
        signal.pause()
"""

GLUON = """
net = mx.gluon.nn.Sequential()
net.add(mx.gluon.nn.Dense(16, activation="relu", in_units=6), mx.gluon.nn.Dense(1, in_units=16))
net.initialize(mx.init.Xavier())
trainer = mx.gluon.Trainer(
    net.collect_params(), "adam",
    {"learning_rate": 0.1, "lr_scheduler": mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)}, kvstore=kv,
    compression_params={"type": "2bit", "threshold": 0.02},
)
loaded = kv.load_checkpoint(PATH, trainer=trainer, missing_ok=True)
first = 0 if loaded is None else loaded.extra["next"]
loss = mx.gluon.loss.L2Loss()
for step in range(first, STEPS):
    data, label = batch(step)
    with mx.autograd.record():
        value = loss(net(data), label)
    value.backward()
    trainer.step(8)
    if step == SAVED:
        kv.save_checkpoint(PATH, step=step, extra={"next": step + 1})
    note(parameter.data() for parameter in net.collect_params().values())
end(first=first, rate=trainer.learning_rate)
"""

MODULE = """
data, label = mx.sym.var("data"), mx.sym.var("label")
out = mx.sym.FullyConnected(mx.sym.FullyConnected(data, num_hidden=16), num_hidden=1)
module = mx.mod.Module(mx.sym.LinearRegressionOutput(out, label), label_names=["label"])
module.bind([("data", (8, 6))], [("label", (8, 1))])
module.init_params(mx.init.Xavier())
loaded = kv.load_checkpoint(PATH, missing_ok=True, broadcast=True)
module.init_optimizer(kvstore=kv, optimizer="sgd", optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
first = 0 if loaded is None else loaded.extra["next"]
for step in range(first, STEPS):
    data, label = batch(step)
    module.forward_backward(mx.io.DataBatch([data], [label]))
    module.update()
    if step == SAVED:
        kv.save_checkpoint(PATH, step=step, extra={"next": step + 1}, shares=False)
    values, _ = module.get_params()
    note(values[name] for name in sorted(values))
end(first=first)
"""


def run(folder: Path, script: str, nodes: int, path: Path, *, saves: bool) -> list[dict[str, Any]]:
    """Run a job to its end, which is SIGKILL if it saves; return what each rank has printed."""
    folder.mkdir()
    source = COMMON.format(path=str(path), steps=STEPS, saved=SAVED if saves else -1) + script
    with Job(folder, nodes) as job:
        for rank in range(nodes):
            job.start(rank, source)
        if saves:
            for rank in range(nodes):
                job.wait_until_said(rank, "to be killed")
            for rank in range(nodes):
                job.send(rank, signal.SIGKILL)
        ended = [job.end(rank) for rank in range(nodes)]
        assert [one.code for one in ended] == [-signal.SIGKILL if saves else 0] * nodes, ended[0].text
    return [json.loads(one.out.splitlines()[0]) for one in ended]


@pytest.mark.parametrize(
    "script", [pytest.param(GLUON, id="gluon"), pytest.param(MODULE, id="module", marks=pytest.mark.slow)]
)
def test_a_job_that_was_killed_goes_on_bit_for_bit_from_its_checkpoint(tmp_path: Path, script):
    path = tmp_path / "checkpoints"
    undisturbed = run(tmp_path / "killed", script, 2, path, saves=True)
    assert undisturbed[0] == undisturbed[1]
    assert len(set(undisturbed[0]["digests"])) == STEPS
    again = run(tmp_path / "again", script, 2, path, saves=False)
    expected = {**undisturbed[0], "first": SAVED + 1, "digests": undisturbed[0]["digests"][SAVED + 1 :]}
    assert again == [expected, expected]

    found = find_checkpoint(path)
    assert found is not None
    assert len(found.index.files) == (2 if script is GLUON else 1)
    assert set(found.index.rounds.values()) == {SAVED + 1}
    assert len(found.index.own) == (2 if script is GLUON else 0)  # what compression has not sent yet
    if script is MODULE:
        more = run(tmp_path / "more", script, 3, path, saves=False)
        assert more[0] == more[1] == more[2]
        assert more[0]["first"] == SAVED + 1
        assert len(more[0]["digests"]) == STEPS - SAVED - 1
