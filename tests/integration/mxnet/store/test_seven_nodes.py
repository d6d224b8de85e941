"""What users expect of a distributed store, on seven nodes, by a script that knows MXNet's names alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import run_job

NODES = 7

PROLOGUE = """
import numpy as np
import mxnet as mx
from mxnet import gluon
from netstorm.frontends.mxnet import take_over_dist_types

take_over_dist_types()  # as `netstorm.run` does
kv = mx.kv.create("dist_sync")
RANK, NODES, RATE, THRESHOLD = kv.rank, kv.num_workers, 2, 0.5
SMALL, BIG, IRREGULAR, SINGLE = (3, 3), (1200, 1100), (1211, 1, 77), (1,)
EVERYBODY = NODES * (NODES + 1) // 2

def full(shape, value, dtype="float32"):
    return mx.nd.full(shape, value, dtype=dtype)

def check(array, value):
    found = array.asnumpy()
    assert (found == value).all(), (RANK, found.ravel()[:4], value)

def drawn(rank, step, shape):
    return np.random.RandomState([rank, step, len(shape)]).randint(-3, 4, shape).astype("float32")

def store(name, optimizer):
    kv = mx.kv.create(name)
    kv.set_optimizer(optimizer)
    return kv

def descent():
    return mx.optimizer.SGD(learning_rate=-RATE)  # the value grows by RATE times the sum
"""

PUSHES_AND_PULLS = """
for name in ("dist_async", "dist_device_async", "dist_async_device"):
    assert mx.kv.create(name).type == "dist_async_netstorm"
for dtype in ("float32", "float16"):
    multi = dtype == "float16"
    kv = store("dist_sync", mx.optimizer.create("test", rescale_grad=RATE, multi_precision=multi))
    keys = {"small": SMALL, "big": BIG, "irregular": IRREGULAR, "single": SINGLE}
    for name, shape in keys.items():
        kv.init(name, full(shape, 1 if RANK == 0 else 99, dtype))  # on all ranks: rank 0's counts
    for name, shape in keys.items():
        out, pushed = full(shape, -1, dtype), full(shape, RANK + 1, dtype)
        kv.pull(name, out=out)
        check(out, 1)
        kv.push(name, pushed)
        kv.pull(name, out=out)
        check(out, 1 + RATE * EVERYBODY)
        kv.pushpull(name, pushed, out=out)
        check(pushed, RANK + 1)  # a pull never changes what was pushed
        check(out, 1 + RATE * EVERYBODY * 2)
    kv.push(["small", "big"], [[full(SMALL, 1, dtype)] * 3, [full(BIG, 1, dtype)] * 2])  # of several devices
    outs = [[full(SMALL, 0, dtype), full(SMALL, 0, dtype)], [full(BIG, 0, dtype)]]
    kv.pull(["small", "big"], out=outs)
    for out in outs[0]:
        check(out, 1 + RATE * (EVERYBODY * 2 + 3 * NODES))
    check(outs[1][0], 1 + RATE * (EVERYBODY * 2 + 2 * NODES))
"""

TRAINER = """
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

for kvstore, update_on_kvstore, devices in (
    ("dist_sync", None, 1), ("dist_device_sync", True, 2), ("dist_sync_device", False, 2),
    (mx.kv.create("dist_sync"), False, 1),
):
    contexts = [mx.cpu(device) for device in range(devices)]
    x, trainer = trained(kvstore, update_on_kvstore, contexts)
    assert trainer._distributed
    assert trainer._update_on_kvstore is (update_on_kvstore is not False)
    for context in contexts:
        check(x.data(context), -(0.5 + 0.25) * NODES * devices)
with mx.autograd.record():
    loss = x.data() + 1
loss.backward()
trainer.allreduce_grads()  # the last one does not update on the store
check(x.grad(), NODES)
trainer.update(1)
"""

ROWS = """
def some_rows(rank, step, shape):
    chance = np.random.RandomState([rank, step, shape[0]])
    numbers = chance.randint(0, shape[0], chance.randint(0, 12))  # out of order, repeated, or none
    return numbers, drawn(rank, step, (len(numbers), *shape[1:]))

for kv in (store("dist_sync", descent()), store("dist_async", descent())):
    for name, shape in {"small": (4, 3), "large": (600, 110), "irregular": (211, 1, 77)}.items():
        expected = np.ones(shape, "float32")
        kv.init(name, mx.nd.array(expected if RANK == 0 else expected * 99).tostype("row_sparse"))
        for step in range(3):
            for rank in range(NODES):
                numbers, values = some_rows(rank, step, shape)
                np.add.at(expected, numbers, RATE * values)
                if rank == RANK:
                    if len(numbers):
                        pushed = mx.nd.sparse.row_sparse_array((values, numbers), shape=shape)
                    else:
                        pushed = mx.nd.sparse.zeros("row_sparse", shape)
                    kv.push(name, pushed)
            mx.nd.waitall()
            kv._barrier()  # for an asynchronous store: all have pushed
            wanted = np.random.RandomState([RANK, step]).randint(0, shape[0], 10)
            outs = [mx.nd.sparse.zeros("row_sparse", shape) for _ in range(2)]
            kv.row_sparse_pull(name, out=outs, row_ids=mx.nd.array(wanted))
            for out in outs:
                assert out.indices.asnumpy().tolist() == sorted(set(wanted.tolist()))
                check(out.data, expected[sorted(set(wanted.tolist()))])
            kv._barrier()
"""

COMPRESSION = """
kv = mx.kv.create("dist_sync")
kv.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
kv.set_optimizer(descent())
for key, shape in {"large": (600, 110), "flat": (9,)}.items():
    value = drawn(0, 0, shape) / 3
    kv.init(key, mx.nd.array(value if RANK == 0 else value + 1))
    out = mx.nd.zeros(shape)
    kv.pull(key, out=out)
    check(out, value)  # before the first push: exact
    residuals = [np.zeros(shape, "float32") for _ in range(NODES)]
    for step, pushed in enumerate((0, 0.25, 0.25, 1, None, None, 0)):
        for rank in range(NODES):
            gradient = drawn(rank, step, shape) / 8 if pushed is None else np.full(shape, pushed, "float32")
            residuals[rank] += gradient
            sent = THRESHOLD * ((residuals[rank] >= THRESHOLD) * 1.0 - (residuals[rank] <= -THRESHOLD))
            residuals[rank] -= sent.astype("float32")
            value = value + np.float32(RATE) * sent.astype("float32")
            if rank == RANK:
                kv.push(key, mx.nd.array(gradient))
        kv.pull(key, out=out)
        assert np.allclose(out.asnumpy(), value, atol=1e-4), (RANK, key, step)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_seven_nodes_do_what_a_distributed_store_is_expected_to_do(tmp_path: Path) -> None:
    bodies = (PUSHES_AND_PULLS, TRAINER, ROWS, COMPRESSION)
    ended = run_job(tmp_path, NODES, PROLOGUE + "\n".join(bodies) + '\nkv._barrier()\nprint("done")\n')
    assert [(end.code, end.out) for end in ended] == [(0, "done\n")] * NODES, ended
