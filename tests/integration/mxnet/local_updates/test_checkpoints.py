"""Jobs with local updates save a checkpoint, are killed, and go on, also with another number of ranks."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import Job

STEPS, SAVED = 8, 4

SCRIPT = """
import hashlib, json, os, signal
import numpy as np
import netstorm.frontends.mxnet
from netstorm.checkpoint.jobs import wait_for_last_saving
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.local_updates import HFA, DiLoCo, ESync, LocalSGD, OuterSGD

PATH, STEPS, SAVED = os.environ["SAVED_IN"], {steps}, {saved}
kv = eval(os.environ["STORE"])
mx.random.seed(1 + kv.rank); np.random.seed(1 + kv.rank)
net = mx.gluon.nn.Sequential()
net.add(mx.gluon.nn.Dense(16, activation="relu", in_units=6), mx.gluon.nn.Dense(1, in_units=16))
net.initialize(mx.init.Xavier())
trainer = mx.gluon.Trainer(
    net.collect_params(), "adam", {{"learning_rate": 0.1}}, kvstore=kv,
    compression_params={{"*bias": "none", "*": "int8"}},
)
loaded = kv.load_checkpoint(PATH, trainer=trainer, missing_ok=True)
first = 0 if loaded is None else loaded.extra["next"]
found = {{"first": first, "averages": kv.averages, "digests": []}}  # averages: before the first step
for step in range(first, STEPS):
    draw = np.random.RandomState(1000 * step + kv.rank)
    with mx.autograd.record():
        value = mx.gluon.loss.L2Loss()(net(mx.nd.array(draw.rand(8, 6))), mx.nd.array(draw.rand(8, 1)))
    value.backward()
    trainer.step(8)
    if step + 1 == SAVED and os.environ["SAVES"] == "1":
        assert kv.is_averaged
        kv.save_checkpoint(PATH, step=step, extra={{"next": step + 1}}, shares=os.environ["SHARES"] == "1")
    arrays = [one.data().asnumpy().tobytes() for one in net.collect_params().values()]
    found["digests"].append(hashlib.sha256(b"".join(arrays)).hexdigest())
print(json.dumps(found), flush=True)
if os.environ["SAVES"] == "1":
    wait_for_last_saving()
    print("to be killed", flush=True)
    signal.pause()
"""


def run(folder: Path, nodes: int, **variables: Any) -> list[dict[str, Any]]:
    """Run a job to its end, which is SIGKILL if it saves; return what each rank has printed."""
    folder.mkdir()
    script, saves = SCRIPT.format(steps=STEPS, saved=SAVED), variables["SAVES"] == 1
    with Job(folder, nodes, SAVED_IN=folder.parent / "checkpoints", **variables) as job:
        for rank in range(nodes):
            job.start(rank, script)
        if saves:
            for rank in range(nodes):
                job.wait_until_said(rank, "to be killed")
            for rank in range(nodes):
                job.send(rank, signal.SIGKILL)
        ended = [job.end(rank) for rank in range(nodes)]
        assert [one.code for one in ended] == [-signal.SIGKILL if saves else 0] * nodes, ended[0].text
    return [json.loads(one.out.splitlines()[0]) for one in ended]


def test_a_checkpoint_is_resumed_by_one_more_rank_and_all_are_equal(tmp_path: Path) -> None:
    run(tmp_path / "killed", 2, STORE="LocalSGD(2)", SAVES=1, SHARES=1)
    more = run(tmp_path / "more", 3, STORE="LocalSGD(2)", SAVES=0)
    assert len({one["digests"][-1] for one in more}) == 1
    assert len({one["digests"][0] for one in more}) == 3
    assert [(one["first"], one["averages"]) for one in more] == [(SAVED, SAVED // 2)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("store", ["LocalSGD(2)", "HFA(2, 2)", "DiLoCo([['*']], OuterSGD(), 2)"])
def test_a_killed_job_goes_on_bit_for_bit(tmp_path: Path, store: str) -> None:
    undisturbed = run(tmp_path / "killed", 2, STORE=store, SAVES=1, SHARES=1)
    assert undisturbed[0]["digests"][-1] == undisturbed[1]["digests"][-1]
    assert undisturbed[0]["digests"][0] != undisturbed[1]["digests"][0]
    again = run(tmp_path / "again", 2, STORE=store, SAVES=0)
    for before, after in zip(undisturbed, again, strict=True):
        assert after == {"first": SAVED, "averages": SAVED // 2, "digests": before["digests"][SAVED:]}


@pytest.mark.slow
def test_rank_0_may_write_everything_and_all_go_on_with_the_states_of_its_optimizer(tmp_path: Path) -> None:
    run(tmp_path / "killed", 2, STORE="ESync(4, 4)", SAVES=1, SHARES=0)
    again = run(tmp_path / "again", 2, STORE="ESync(4, 4)", SAVES=0)
    assert [one["averages"] for one in again] == [1, 1]
    assert again[0]["digests"][-1] == again[1]["digests"][-1]
    assert again[0]["first"] == SAVED
