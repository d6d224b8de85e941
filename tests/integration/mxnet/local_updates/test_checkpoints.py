"""Jobs with local updates save checkpoints, are killed, and go on, also with another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.mxnet.saving import run_saving

STEPS, SAVED = 8, 4

SCRIPT = """
import hashlib, json, os, signal
import numpy as np
import netstorm.frontends.mxnet
from netstorm.checkpoint.jobs import wait_for_last_saving
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.local_updates import HFA, DiLoCo, ESync, LocalSGD, OuterSGD

STEPS, SAVED, SAVES = int(os.environ["STEPS"]), int(os.environ["SAVED"]), os.environ["SAVES"] == "1"

def trained(kv, path, shares):
    mx.random.seed(1 + kv.rank); np.random.seed(1 + kv.rank)
    net = mx.gluon.nn.Sequential()
    net.add(mx.gluon.nn.Dense(16, activation="relu", in_units=6), mx.gluon.nn.Dense(1, in_units=16))
    net.initialize(mx.init.Xavier())
    trainer = mx.gluon.Trainer(
        net.collect_params(), "adam", {"learning_rate": 0.1}, kvstore=kv,
        compression_params={"*bias": "none", "*": "int8"},
    )
    loaded = kv.load_checkpoint(path, trainer=trainer, missing_ok=True)
    first = 0 if loaded is None else loaded.extra["next"]
    found = {"first": first, "averages": kv.averages, "digests": []}  # averages: before the first step
    for step in range(first, STEPS):
        draw = np.random.RandomState(1000 * step + kv.rank)
        with mx.autograd.record():
            value = mx.gluon.loss.L2Loss()(net(mx.nd.array(draw.rand(8, 6))), mx.nd.array(draw.rand(8, 1)))
        value.backward()
        trainer.step(8)
        if step + 1 == SAVED and SAVES:
            assert kv.is_averaged
            kv.save_checkpoint(path, step=step, extra={"next": step + 1}, shares=shares)
        arrays = [one.data().asnumpy().tobytes() for one in net.collect_params().values()]
        found["digests"].append(hashlib.sha256(b"".join(arrays)).hexdigest())
    print(json.dumps(found), flush=True)
    wait_for_last_saving()

for name, make, shares in (
    ("local", lambda: LocalSGD(2), True),
    ("hfa", lambda: HFA(2, 2), True),
    ("diloco", lambda: DiLoCo([["*"]], OuterSGD(), 2), True),
    ("esync", lambda: ESync(4, 4), False),
):
    trained(make(), os.path.join(os.environ["SAVED_IN"], name), shares)
"""


def run(folder: Path, nodes: int, *, saves: bool) -> list[list[dict[str, Any]]]:
    """Run a job; return what each rank has found, by store."""
    by_rank = run_saving(folder, nodes, SCRIPT, saves=saves, STEPS=STEPS, SAVED=SAVED)
    return [list(of_store) for of_store in zip(*by_rank, strict=True)]


def test_killed_jobs_go_on_bit_for_bit_and_with_one_more_rank(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "killed", 2, saves=True)
    again = run(tmp_path / "again", 2, saves=False)
    for before, after in zip(undisturbed[:3], again[:3], strict=True):
        assert before[0]["digests"][-1] == before[1]["digests"][-1]
        assert before[0]["digests"][0] != before[1]["digests"][0]
        for one, other in zip(before, after, strict=True):
            assert other == {"first": SAVED, "averages": SAVED // 2, "digests": one["digests"][SAVED:]}
    # Rank 0 has written everything: all go on with the states of its optimizer.
    esync = again[3]
    assert [(one["first"], one["averages"]) for one in esync] == [(SAVED, 1)] * 2
    assert esync[0]["digests"][-1] == esync[1]["digests"][-1]

    local_sgd = run(tmp_path / "more", 3, saves=False)[0]
    assert len({one["digests"][-1] for one in local_sgd}) == 1
    assert len({one["digests"][0] for one in local_sgd}) == 3
    assert [(one["first"], one["averages"]) for one in local_sgd] == [(SAVED, SAVED // 2)] * 3
