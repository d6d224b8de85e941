"""MXNet jobs save checkpoints, are killed, and go on from them, also with another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from netstorm.checkpoint.files import find_checkpoint
from tests.integration.mxnet.saving import run_saving

STEPS, SAVED = 6, 2

SCRIPT = """
import hashlib, json, os, signal
import numpy as np
import netstorm.frontends.mxnet
from netstorm.checkpoint.jobs import wait_for_last_saving
from netstorm.frontends.mxnet.compat import mx

STEPS, SAVED = int(os.environ["STEPS"]), int(os.environ["SAVED"])
PATH, SAVES = os.environ["SAVED_IN"], os.environ["SAVES"] == "1"
RANK = mx.kv.create("dist_sync_netstorm").rank
mx.random.seed(1 + RANK); np.random.seed(1 + RANK)  # other initial values at every rank

def digest(arrays):
    return hashlib.sha256(b"".join(array.asnumpy().tobytes() for array in arrays)).hexdigest()

def batch(step):
    draw = np.random.RandomState(1000 * step + RANK)
    return mx.nd.array(draw.rand(8, 6)), mx.nd.array(draw.rand(8, 1))

def steps(loaded):
    return range(0 if loaded is None else loaded.extra["next"], STEPS)

def gluon(kv, path):
    net = mx.gluon.nn.Sequential()
    net.add(mx.gluon.nn.Dense(16, activation="relu", in_units=6), mx.gluon.nn.Dense(1, in_units=16))
    net.initialize(mx.init.Xavier())
    schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
    trainer = mx.gluon.Trainer(
        net.collect_params(), "adam", {"learning_rate": 0.1, "lr_scheduler": schedule}, kvstore=kv,
        compression_params={"type": "2bit", "threshold": 0.02},
    )
    loss, digests = mx.gluon.loss.L2Loss(), []
    for step in steps(kv.load_checkpoint(path, trainer=trainer, missing_ok=True)):
        data, label = batch(step)
        with mx.autograd.record():
            value = loss(net(data), label)
        value.backward()
        trainer.step(8)
        if step == SAVED and SAVES:
            kv.save_checkpoint(path, step=step, extra={"next": step + 1})
        digests.append(digest(parameter.data() for parameter in net.collect_params().values()))
    return {"digests": digests, "rate": trainer.learning_rate}

def module(kv, path):
    data, label = mx.sym.var("data"), mx.sym.var("label")
    out = mx.sym.FullyConnected(mx.sym.FullyConnected(data, num_hidden=16), num_hidden=1)
    module = mx.mod.Module(mx.sym.LinearRegressionOutput(out, label), label_names=["label"])
    module.bind([("data", (8, 6))], [("label", (8, 1))])
    module.init_params(mx.init.Xavier())
    loaded, digests = kv.load_checkpoint(path, missing_ok=True, broadcast=True), []
    sgd = {"learning_rate": 0.1, "momentum": 0.9}
    module.init_optimizer(kvstore=kv, optimizer="sgd", optimizer_params=sgd)
    for step in steps(loaded):
        data, label = batch(step)
        module.forward_backward(mx.io.DataBatch([data], [label]))
        module.update()
        if step == SAVED and SAVES:
            kv.save_checkpoint(path, step=step, extra={"next": step + 1}, shares=False)
        values, _ = module.get_params()
        digests.append(digest(values[name] for name in sorted(values)))
    return {"digests": digests}

for train in (gluon, module):
    found = train(mx.kv.create("dist_sync_netstorm"), os.path.join(PATH, train.__name__))
    print(json.dumps(found), flush=True)
    wait_for_last_saving()
"""


def run(folder: Path, nodes: int, *, saves: bool) -> list[list[dict[str, Any]]]:
    """Run a job; return what Gluon and Module have found, by rank."""
    return run_saving(folder, nodes, SCRIPT, saves=saves, STEPS=STEPS, SAVED=SAVED)


def test_a_job_that_was_killed_goes_on_bit_for_bit_and_with_another_number_of_ranks(tmp_path: Path) -> None:
    undisturbed, *others = run(tmp_path / "killed", 2, saves=True)
    assert others == [undisturbed]
    assert [len(set(found["digests"])) for found in undisturbed] == [STEPS] * 2
    expected = [{**found, "digests": found["digests"][SAVED + 1 :]} for found in undisturbed]
    assert run(tmp_path / "again", 2, saves=False) == [expected] * 2
    more = run(tmp_path / "more", 3, saves=False)
    assert more[0] == more[1] == more[2]
    assert [len(found["digests"]) for found in more[0]] == [STEPS - SAVED - 1] * 2
    for script, files in (("gluon", 2), ("module", 1)):
        found = find_checkpoint(tmp_path / "checkpoints" / script)
        assert found is not None
        assert len(found.index.files) == files  # rank 0 has written all of Module's
        assert set(found.index.rounds.values()) == {SAVED + 1}
        assert len(found.index.own) == (2 if script == "gluon" else 0)  # what compression has not sent yet
