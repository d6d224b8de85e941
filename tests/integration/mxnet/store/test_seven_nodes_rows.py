"""Rows, fewer bits and no steps in common: what users expect of a distributed store, on seven nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import run_job
from tests.integration.mxnet.store.test_seven_nodes import NODES, PROLOGUE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

COMMON = (
    PROLOGUE
    + """
THRESHOLD = 0.5
SHAPES = {"small": (4, 3), "large": (600, 110), "irregular": (211, 1, 77), "flat": (9,)}

def descent(kv, **more):
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=-RATE, **more))  # the value grows by RATE times the sum

def settled(kv):
    mx.nd.waitall()
    kv._barrier()

def drawn(rank, step, shape):
    return np.random.RandomState([rank, step, len(shape)]).randint(-3, 4, shape).astype("float32")
"""
)

ROWS = """
def some_rows(rank, step, shape):
    chance = np.random.RandomState([rank, step, shape[0]])
    numbers = chance.randint(0, shape[0], chance.randint(0, 12))  # out of order, repeated, or none
    return numbers, drawn(rank, step, (len(numbers), *shape[1:]))

def check_rows(kv, names, asynchronous):
    for name in names:
        shape = SHAPES[name]
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
            if asynchronous:
                settled(kv)
            wanted = np.random.RandomState([RANK, step]).randint(0, shape[0], 10)
            outs = [mx.nd.sparse.zeros("row_sparse", shape) for _ in range(2)]
            kv.row_sparse_pull(name, out=outs, row_ids=mx.nd.array(wanted))
            for out in outs:
                assert out.indices.asnumpy().tolist() == sorted(set(wanted.tolist()))
                check(out.data, expected[sorted(set(wanted.tolist()))])
            if asynchronous:
                kv._barrier()
    out = mx.nd.sparse.zeros("row_sparse", shape)
    kv.row_sparse_pull(name, out=out, row_ids=mx.nd.arange(shape[0]))
    check(out, expected)

names = ["small", "large", "irregular"]
descent(kv)
check_rows(kv, names, asynchronous=False)
loose = mx.kv.create("dist_async")
descent(loose)
check_rows(loose, names, asynchronous=True)
"""

COMPRESSION = """
def quantised(gradient, residual):
    residual += gradient
    sent = np.where(residual >= THRESHOLD, THRESHOLD, np.where(residual <= -THRESHOLD, -THRESHOLD, 0))
    residual -= sent
    return sent

def check_compressed(kv, asynchronous):
    kv.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
    descent(kv)
    for name, shape in SHAPES.items():
        for begin in ("zeros", "random"):
            key = name + begin
            value = drawn(0, 0, shape) / 3 if begin == "random" else np.zeros(shape, "float32")
            kv.init(key, mx.nd.array(value if RANK == 0 else value + 1))
            out = mx.nd.zeros(shape)
            kv.pull(key, out=out)
            check(out, value)  # before the first push: exact
            residuals = [np.zeros(shape, "float32") for _ in range(NODES)]
            plain = [np.full(shape, number) for number in (0, 0.25, 0.25, 1)]
            pushes = [*plain, None, None, plain[0]]
            for step, pushed in enumerate(pushes):
                for rank in range(NODES):
                    gradient = drawn(rank, step, shape) / 8 if pushed is None else pushed.astype("float32")
                    value = value + np.float32(RATE) * quantised(gradient, residuals[rank]).astype("float32")
                    if rank == RANK:
                        kv.push(key, mx.nd.array(gradient))
                if asynchronous:
                    settled(kv)
                kv.pull(key, out=out)
                assert np.allclose(out.asnumpy(), value, atol=1e-4), (RANK, key, step)
                if asynchronous:
                    out.wait_to_read()
                    kv._barrier()

check_compressed(kv, asynchronous=False)
check_compressed(mx.kv.create("dist_async"), asynchronous=True)
"""

ASYNCHRONOUS = """
for multi in (False, True):
    kv = mx.kv.create("dist_async")
    descent(kv, multi_precision=multi)
    for name, shape in {"small": SMALL, "big": BIG, "irregular": IRREGULAR, "single": SINGLE}.items():
        for dtype in ("float32", "float16"):
            kv.init(name + dtype, full(shape, 1 if RANK == 0 else 99, dtype))
            out = full(shape, -1, dtype)
            for _ in range(2):
                kv.push(name + dtype, [full(shape, RANK + 1, dtype)] * 2)
                kv.pull(name + dtype, out=out)
                found = out.asnumpy()
                assert (found >= 1 + RATE * 2 * (RANK + 1)).all()
                assert (found <= 1 + RATE * 4 * EVERYBODY).all()
            settled(kv)
            kv.pull(name + dtype, out=out)
            check(out, 1 + RATE * 4 * EVERYBODY)
for kvstore in ("dist_async", "dist_async_device"):
    x = mx.gluon.Parameter("x", shape=(10,))
    x.initialize(init="zeros")
    trainer = mx.gluon.Trainer([x], "sgd", {"learning_rate": 0.5}, kvstore=kvstore)
    for _ in range(2):
        with mx.autograd.record():
            loss = x.data() + 1
        loss.backward()
        trainer.step(1)
    settled(trainer._kvstore)
    trainer._kvstore.pull(0, out=x.data())
    check(x.data(), -0.5 * 2 * NODES)
    y = mx.gluon.Parameter("y", shape=(10,))
    y.initialize(init="zeros")
    trainer = mx.gluon.Trainer([y], "sgd", kvstore=kvstore, update_on_kvstore=False)
    try:
        trainer._init_kvstore()
    except ValueError:
        pass
    else:
        raise AssertionError("an asynchronous store updates by itself")
"""

SPARSE_TRAINER = """
from mxnet import gluon

for kvstore in ("dist_sync", "dist_async"):
    for stype in ("row_sparse", "default"):
        x = gluon.Parameter("x", shape=(10, 1), stype=stype, grad_stype="row_sparse")
        x.initialize(init="zeros")
        trainer = gluon.Trainer([x], "sgd", {"learning_rate": 0.5}, kvstore=kvstore)
        ids = mx.nd.array([RANK, 9])
        for rate in (0.5, 0.25):
            trainer.set_learning_rate(rate)
            with mx.autograd.record():
                value = x.row_sparse_data(ids) if stype == "row_sparse" else x.data()
                loss = mx.nd.Embedding(ids, value, 10, 1, sparse_grad=True).sum()
            loss.backward()
            trainer.step(1)
        assert trainer._update_on_kvstore
        settled(trainer._kvstore)
        everything = mx.nd.arange(10)
        if stype == "row_sparse":
            found = x.row_sparse_data(everything)
        else:
            trainer._kvstore.pull(0, out=x.data())
            found = x.data()
        expected = [-0.75] * NODES + [0] * (9 - NODES) + [-0.75 * NODES]
        assert found.asnumpy().ravel().tolist() == expected, (kvstore, stype, found)
        trainer._kvstore._barrier()
x = gluon.Parameter("x", shape=(10, 1), stype="row_sparse", grad_stype="row_sparse")
x.initialize(init="zeros")
trainer = gluon.Trainer([x], "sgd", kvstore="dist_sync", update_on_kvstore=False)
try:
    trainer._init_kvstore()
except ValueError:
    pass
else:
    raise AssertionError("sparse weights are updated by the store")
"""


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(ROWS, id="rows"),
        pytest.param(COMPRESSION, id="compression"),
        pytest.param(ASYNCHRONOUS, id="dist_async"),
        pytest.param(SPARSE_TRAINER, id="sparse gluon.Trainer"),
    ],
)
def test_seven_nodes_do_what_a_distributed_store_is_expected_to_do_with_less(
    tmp_path: Path, body: str
) -> None:
    script = COMMON + body + '\nmx.nd.waitall()\nkv._barrier()\nprint("done")\n'
    ended = run_job(tmp_path, NODES, script, module=("-m", "netstorm.run"))
    assert [(end.code, end.out) for end in ended] == [(0, "done\n")] * NODES, ended
