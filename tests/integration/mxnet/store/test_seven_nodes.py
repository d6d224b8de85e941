"""What users expect of a distributed store, on seven nodes, by a script that says `dist_sync`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NODES = 7

PROLOGUE = """
import numpy as np
import mxnet as mx

kv = mx.kv.create("dist_sync")
RANK, NODES, RATE = kv.rank, kv.num_workers, 2
SMALL, BIG, IRREGULAR, SINGLE = (3, 3), (1200, 1100), (1211, 1, 77), (1,)
EVERYBODY = NODES * (NODES + 1) // 2

def full(shape, value, dtype="float32"):
    return mx.nd.full(shape, value, dtype=dtype)

def check(array, value):
    found = array.asnumpy()
    assert (found == value).all(), (RANK, found.ravel()[:4], value)
"""

PUSHES_AND_PULLS = """
keys = {"small": SMALL, "big": BIG, "irregular": IRREGULAR, "single": SINGLE}
kv.set_optimizer(mx.optimizer.create("test", rescale_grad=RATE, multi_precision=MULTI))
for name, shape in keys.items():
    for dtype in ("float32", "float16"):
        kv.init(name + dtype, full(shape, 1 if RANK == 0 else 99, dtype))  # on all ranks: rank 0's counts
for name, shape in keys.items():
    for dtype in ("float32", "float16"):
        out = full(shape, -1, dtype)
        kv.pull(name + dtype, out=out)
        check(out, 1)
        for repeat in range(1, 4):
            kv.push(name + dtype, full(shape, RANK + 1, dtype))
            kv.pull(name + dtype, out=out)
            check(out, 1 + RATE * EVERYBODY * repeat)
        pushed = full(shape, RANK + 1, dtype)
        kv.pushpull(name + dtype, pushed, out=out)
        check(pushed, RANK + 1)  # a pull never changes what was pushed
        check(out, 1 + RATE * EVERYBODY * 4)
kv.push(["smallfloat32", "bigfloat32"], [[full(SMALL, 1)] * 3, [full(BIG, 1)] * 2])  # of several devices
outs = [[full(SMALL, 0), full(SMALL, 0)], [full(BIG, 0)]]
kv.pull(["smallfloat32", "bigfloat32"], out=outs)
for out in outs[0]:
    check(out, 1 + RATE * (EVERYBODY * 4 + 3 * NODES))
check(outs[1][0], 1 + RATE * (EVERYBODY * 4 + 2 * NODES))
"""

INVALID = """
kv.init("9", full(SMALL, 1))
def refused(call):
    try:
        call()
    except ValueError as error:
        assert isinstance(error, mx.MXNetError) and len(str(error)) > 20
    except mx.MXNetError as error:
        raise AssertionError(f"of MXNet's own: {error}")
    else:
        raise AssertionError("has not been refused")

refused(lambda: kv.init("9", full(SMALL, 1)))
refused(lambda: kv.init(9, full(SMALL, 1)))
refused(lambda: kv.push("8", full(SMALL, 1)))
refused(lambda: kv.pull("8", out=full(SMALL, 1)))
refused(lambda: kv.push("9", full(BIG, 1)))
refused(lambda: kv.push("9", full(SMALL, 1, "float16")))
refused(lambda: kv.push(["9", "9"], [full(SMALL, 1)]))
refused(lambda: kv.pull("9"))
refused(lambda: kv.set_optimizer("sgd"))
refused(lambda: kv.set_gradient_compression({"type": "3bit"}))
kv.push("9", full(SMALL, RANK + 1))  # none of all that has done harm
out = full(SMALL, 0)
kv.pull("9", out=out)
check(out, EVERYBODY)
"""

TRAINER = """
from mxnet import gluon

def trained(kvstore, update_on_kvstore, contexts):
    x = gluon.Parameter("x", shape=(10,))
    x.initialize(ctx=contexts, init="zeros")
    trainer = gluon.Trainer([x], "sgd", {"learning_rate": 0.5}, kvstore=kvstore,
                            update_on_kvstore=update_on_kvstore)
    for rate in (0.5, 0.25):
        trainer.set_learning_rate(rate)
        with mx.autograd.record():
            losses = [x.data(context) + 1 for context in contexts]
        mx.autograd.backward(losses)
        trainer.step(1)
    return x, trainer

for contexts in ([mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]):
    for kvstore in ("dist_sync", "dist_device_sync", "dist_sync_device", "an object"):
        for update_on_kvstore in (None, True, False):
            store = mx.kv.create("dist_sync") if kvstore == "an object" else kvstore
            x, trainer = trained(store, update_on_kvstore, contexts)
            assert trainer._distributed
            assert trainer._update_on_kvstore is (update_on_kvstore is not False)
            for context in contexts:
                check(x.data(context), -(0.5 + 0.25) * NODES * len(contexts))
    for kvstore in (None, "local", "device"):  # of each rank alone
        x, trainer = trained(kvstore, None, contexts)
        if kvstore is not None:
            check(x.data(contexts[0]), -(0.5 + 0.25) * len(contexts))

x, trainer = trained("dist_sync", False, [mx.cpu(0)])
with mx.autograd.record():
    loss = x.data() + 1
loss.backward()
trainer.allreduce_grads()
check(x.grad(), NODES)
trainer.update(1)
x, trainer = trained("dist_sync", True, [mx.cpu(0)])
for call in (trainer.allreduce_grads, lambda: trainer.update(1)):
    try:
        call()
    except AssertionError:
        pass
    else:
        raise RuntimeError("the store updates: there is nothing to do in two steps")
"""


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("MULTI = False\n" + PUSHES_AND_PULLS, id="pushes and pulls"),
        pytest.param("MULTI = True\n" + PUSHES_AND_PULLS, id="with multi-precision"),
        pytest.param(INVALID, id="invalid operations"),
        pytest.param(TRAINER, id="gluon.Trainer"),
    ],
)
def test_seven_nodes_do_what_a_distributed_store_is_expected_to_do(tmp_path: Path, body: str) -> None:
    script = PROLOGUE + body + '\nkv._barrier()\nprint("done")\n'
    ended = run_job(tmp_path, NODES, script, module=("-m", "netstorm.run"))
    assert [(end.code, end.out) for end in ended] == [(0, "done\n")] * NODES, ended
