"""What the asynchronous store's methods mean, on three ranks with real MXNet.

Gradients are small integers and learning rates powers of two, so that sums are exact in any order.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from tests.integration.mxnet.on_nodes import NODES, everywhere, on_nodes, same_everywhere, settled

STORE = "dist_async_netstorm"

EVERYBODY = sum(range(1, NODES + 1))


def ones(*shape: int, times: float = 1, dtype: str = "float32", device: int = 0) -> Any:
    return mx.nd.full(shape, times, dtype=dtype, ctx=mx.cpu(device))


def pulled(kv: Any, key: Any, *shape: int, dtype: str = "float32") -> Any:
    out = mx.nd.zeros(shape, dtype=dtype)
    kv.pull(key, out=out)
    return out.asnumpy()


def descent(**more: Any) -> Any:
    return mx.optimizer.SGD(**{"learning_rate": 0.5, **more})


@on_nodes
def test_a_push_without_an_optimizer_is_refused_and_a_pull_gives_the_initial_value(kv: Any) -> None:
    assert kv.type == "dist_async_netstorm"  # without "_sync": Module would multiply the batch size
    kv.init("k", ones(3, times=kv.rank + 7))
    for refused in (lambda: kv.push("k", ones(3)), lambda: kv.pushpull("k", ones(3))):
        with pytest.raises(UsageError, match="set_optimizer"):
            refused()
    assert (pulled(kv, "k", 3) == 7).all()


@on_nodes
def test_a_pull_has_all_own_pushes_in_it_and_after_a_barrier_everybodys(kv: Any) -> None:
    kv.set_optimizer(descent())
    kv.init(["small", "large"], [ones(3, times=64), ones(123, 457, times=64)])
    steps = 4
    for step in range(1, steps + 1):
        for key, shape in (("large", (123, 457)), ("small", (3,))):
            kv.push(key, ones(*shape, times=2 * (kv.rank + 1)))
            value = pulled(kv, key, *shape)
            mine, everybodys = step * (kv.rank + 1), steps * EVERYBODY
            assert (value <= 64 - mine).all()
            assert (value >= 64 - everybodys - 0).all()
    settled(kv)
    for key, shape in (("large", (123, 457)), ("small", (3,))):
        assert (pulled(kv, key, *shape) == 64 - steps * EVERYBODY).all()


@on_nodes
def test_an_optimizer_may_come_after_the_keys_and_arrays_of_several_devices_are_added(kv: Any) -> None:
    kv.init([3, 5], [ones(4, times=9)] * 2)
    kv.set_optimizer(descent(learning_rate=1.0))
    values = [[ones(4, times=key, device=device) for device in range(2)] for key in (3, 5)]
    outs = [[mx.nd.zeros((4,), ctx=mx.cpu(device)) for device in range(2)] for _ in range(2)]
    kv.pushpull([3, 5], values, out=outs)
    assert all(
        (out.asnumpy() <= 9 - 2 * key).all() for key, row in zip((3, 5), outs, strict=True) for out in row
    )
    kv._barrier()
    kv.pull([3, 5], out=outs)
    for key, row in zip((3, 5), outs, strict=True):
        assert all((out.asnumpy() == 9 - 2 * NODES * key).all() for out in row)


@on_nodes
def test_each_push_goes_with_the_learning_rate_that_its_own_rank_has_set(kv: Any) -> None:
    optimizer = descent(learning_rate=1.0)
    kv.set_optimizer(optimizer)
    kv.init("k", ones(5, times=100))
    optimizer.set_learning_rate(2.0**kv.rank)
    optimizer.rescale_grad = 2.0
    kv.push("k", ones(5))
    mx.nd.waitall()
    assert optimizer.learning_rate == 2.0**kv.rank  # others' pushes have not spoiled it
    kv._barrier()
    assert (pulled(kv, "k", 5) == 100 - 2 * (2**NODES - 1)).all()


@on_nodes
def test_momentum_and_counts_are_of_each_block_and_a_scheduler_counts_everybodys_updates(kv: Any) -> None:
    """One rank pushes, so that the order is known: as MXNet's own updater does it."""
    shape, steps = (50, 601), 5

    def optimizer() -> Any:
        return mx.optimizer.Adam(
            learning_rate=0.5, lr_scheduler=mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.5)
        )

    kv.set_optimizer(optimizer())
    kv.init("k", ones(*shape, times=10))
    expected, updater = ones(*shape, times=10), mx.optimizer.get_updater(optimizer())
    for step in range(steps):
        gradient = mx.nd.array(np.random.RandomState(step).randn(*shape))
        updater("k", gradient, expected)
        if kv.rank == 1:
            kv.push("k", gradient)
    settled(kv)
    assert np.allclose(pulled(kv, "k", *shape), expected.asnumpy(), rtol=1e-6, atol=1e-6)


@on_nodes
def test_a_rule_that_takes_norms_gets_whole_tensors(kv: Any) -> None:
    shape = (50, 601)
    kv.set_optimizer(mx.optimizer.LAMB(learning_rate=0.25))
    kv.init("k", ones(*shape, times=2))
    gradient = mx.nd.array(np.random.RandomState(1).randn(*shape))
    expected = ones(*shape, times=2)
    mx.optimizer.get_updater(mx.optimizer.LAMB(learning_rate=0.25))("k", gradient, expected)
    if kv.rank == 2:
        kv.push("k", gradient)
    settled(kv)
    assert np.allclose(pulled(kv, "k", *shape), expected.asnumpy(), rtol=1e-6, atol=1e-6)


@on_nodes
def test_a_users_own_updater_works_on_a_thread_that_is_not_the_scripts(kv: Any) -> None:
    import threading

    threads = set()

    def updater(key: Any, gradient: Any, stored: Any) -> None:
        threads.add(threading.current_thread().name)
        stored += gradient * 2

    kv._set_updater(updater)
    kv.init("k", ones(4))
    kv.push("k", ones(4))
    settled(kv)
    assert (pulled(kv, "k", 4) == 1 + 2 * NODES).all()
    assert threads <= {"netstorm-owner"}
    assert sum(everywhere(kv, len(threads))) == 1  # one key has one owner


@on_nodes
def test_other_types_are_updated_as_well_and_scalars_and_empty_arrays_do_no_harm(kv: Any) -> None:
    kv.set_optimizer(descent(learning_rate=1.0, multi_precision=True))
    for dtype in ("float64", "float16"):
        kv.init(dtype, ones(7, times=50, dtype=dtype))
        kv.push(dtype, ones(7, times=2, dtype=dtype))
    settled(kv)
    for dtype in ("float64", "float16"):
        value = pulled(kv, dtype, 7, dtype=dtype)
        assert value.dtype == dtype
        assert (value == 50 - 2 * NODES).all()
    with mx.util.np_shape(True):
        kv.init("empty", mx.nd.zeros((0, 3)))
        kv.push("empty", mx.nd.zeros((0, 3)))
        kv.pull("empty", out=mx.nd.zeros((0, 3)))
        kv.init("scalar", mx.nd.ones(()))
        kv.push("scalar", mx.nd.ones(()))
        settled(kv)
        out = mx.nd.zeros(())
        kv.pull("scalar", out=out)
        assert float(out.asnumpy()) == 1 - NODES


@on_nodes
def test_another_optimizer_begins_where_the_first_one_ended(kv: Any) -> None:
    kv.set_optimizer(descent(learning_rate=1.0))
    kv.init("k", ones(4, times=20))
    kv.push("k", ones(4))
    kv.set_optimizer(mx.optimizer.NAG(learning_rate=2.0))
    kv.push("k", ones(4))
    settled(kv)
    assert (pulled(kv, "k", 4) == 20 - NODES - 2 * NODES).all()
    with pytest.raises(UsageError, match="whole tensors"):
        kv.set_optimizer(mx.optimizer.LAMB())


@on_nodes
def test_staleness_is_in_the_statistics(kv: Any) -> None:
    kv.set_optimizer(descent(learning_rate=1.0))
    kv.init("k", ones(4, times=20))
    before = kv.statistics()
    settled(kv)
    kv.push("k", ones(4))  # on the initial value: each but the first to be applied is behind
    settled(kv)
    now = kv.statistics()
    behind = now["staleness_total"] - before.get("staleness_total", 0)
    assert sorted(everywhere(kv, behind)) == list(range(NODES))
    assert now["staleness_max"] >= behind
    assert 0 <= now["staleness_mean"] <= now["staleness_max"]


@on_nodes
def test_gluon_trains_and_refuses_to_update_outside_of_the_store(kv: Any) -> None:
    net = mx.gluon.nn.Dense(3, in_units=4)
    net.initialize(mx.init.One())
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 2.0**-4}, kvstore=kv)
    for step in range(3):
        with mx.autograd.record():
            loss = net(ones(2, 4)).sum()
        loss.backward()
        trainer.step(1)
        if step == 0:
            trainer.set_learning_rate(2.0**-5)
    settled(kv)
    kv.pull([0, 1], out=[net.bias.data(), net.weight.data()])  # Trainer numbers them by name
    assert (net.weight.data().asnumpy() == 1 - NODES * 2 * (2.0**-4 + 2 * 2.0**-5)).all()
    assert same_everywhere(kv, net.weight.data(), net.bias.data())
    elsewhere = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=kv, update_on_kvstore=False)
    with pytest.raises(ValueError, match="update_on_kvstore=True"):
        elsewhere._init_kvstore()


@on_nodes
def test_module_trains(kv: Any) -> None:
    data, label = mx.sym.var("data"), mx.sym.var("label")
    out = mx.sym.MakeLoss(mx.sym.sum(mx.sym.FullyConnected(data, num_hidden=3, name="one") * label))
    module = mx.mod.Module(out, data_names=["data"], label_names=["label"])
    batches = mx.io.NDArrayIter(ones(8, 4), ones(8, 3), batch_size=2, label_name="label")
    weights = {"one_weight": ones(3, 4, times=5), "one_bias": ones(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.fit(
            batches,
            eval_metric=mx.metric.Loss(),
            kvstore=kv,
            num_epoch=2,
            arg_params=weights,
            optimizer="sgd",
            optimizer_params={"learning_rate": 2.0**-6, "rescale_grad": 1.0},
        )
    settled(kv)
    weight = pulled(kv, "one_weight", 3, 4)
    assert (weight == 5 - NODES * 8 * 2 * 2.0**-6).all()


@on_nodes
def test_what_it_cannot_do_is_refused_with_a_word_on_why(kv: Any) -> None:
    kv.init("k", ones(3))
    kv.init("wide", ones(3, 2))
    for call in (kv.save_optimizer_states, kv.load_optimizer_states):
        with pytest.raises(UsageError, match="call set_optimizer first"):
            call("states")
    kv.set_optimizer(descent())
    sparse = ones(3, 2).tostype("row_sparse")
    for refused, words in (
        (lambda: kv.row_sparse_pull("wide", out=sparse, row_ids=ones(1)), "initialised as a dense one"),
        (lambda: kv.set_gradient_compression({"type": "int8"}), "knows '2bit' only"),
        (lambda: kv.set_gradient_compression({"type": "3bit"}), "NetStorm knows 'auto', 'none'"),
        (lambda: kv.set_optimizer("sgd"), "mxnet Optimizer"),
        (lambda: kv.push("other", ones(3)), "not been initialised"),
        (lambda: kv.pull("k"), "needs out"),
    ):
        with pytest.raises(UsageError, match=words):
            refused()
    kv.push("k", ones(3))
    kv.push("k", ones(3))
    with pytest.raises(UsageError, match="first time after 2 pushes"):
        kv.clock()


# DCASGD on owners: corrected by what each rank itself has pulled.

SHAPE = (41, 301)
"""Several blocks, of several owners."""

RATE, LAMDA = 0.25, 0.5

PLAN = ("0>", "1>", "1<", "0>", "2>", "0<", "1>", "2>", "2<", "2>", "0>", "1<", "1>")
"""Ranks that push (>) and pull (<), one after the other."""


def gradient(rank: int, step: int) -> Any:
    return np.random.RandomState(100 * rank + step).uniform(-2, 2, SHAPE).astype(np.float32)


class DelayCompensated:
    """Algorithm 2 of the paper, with a momentum."""

    def __init__(self, value: Any, momentum: float = 0.0, decay: float = 0.0) -> None:
        self.value = value.astype(np.float64)
        self.backups = [self.value.copy() for _ in range(NODES)]
        self._momentum, self._decay = momentum, decay
        self._velocity = np.zeros(SHAPE)

    def push(self, rank: int, step: int) -> None:
        found = gradient(rank, step).astype(np.float64)
        found += LAMDA * found * found * (self.value - self.backups[rank]) + self._decay * self.value
        self._velocity = self._momentum * self._velocity - RATE * found
        self.value = self.value + self._velocity

    def pull(self, rank: int) -> None:
        self.backups[rank] = self.value.copy()


def check_compensation(kv: Any, **options: float) -> None:
    kv.set_optimizer(
        mx.optimizer.DCASGD(
            learning_rate=RATE,
            lamda=LAMDA,
            momentum=options.get("momentum", 0.0),
            wd=options.get("decay", 0.0),
        )
    )
    start = np.random.RandomState(1).uniform(-1, 1, SHAPE).astype(np.float32)
    kv.init("w", mx.nd.array(start))
    reference = DelayCompensated(start, **options)
    for step, turn in enumerate(PLAN):
        rank = int(turn[0])
        if turn[1] == ">":
            if kv.rank == rank:
                kv.push("w", mx.nd.array(gradient(rank, step)))
            reference.push(rank, step)
        else:
            if kv.rank == rank:
                pulled(kv, "w", *SHAPE)
            reference.pull(rank)
        settled(kv)
    np.testing.assert_allclose(pulled(kv, "w", *SHAPE), reference.value, rtol=2e-5, atol=2e-5)
    kv._barrier()


@on_nodes
def test_with_dcasgd_a_gradient_is_corrected_by_what_its_own_rank_has_pulled(kv: Any) -> None:
    check_compensation(kv)
    check_compensation(mx.kv.create(STORE), momentum=0.5, decay=0.01)  # over corrected gradients


@on_nodes
def test_with_dcasgd_a_rank_that_trains_alone_is_not_corrected(kv: Any) -> None:
    kv.set_optimizer(mx.optimizer.DCASGD(learning_rate=RATE, lamda=1000.0))
    kv.init("w", mx.nd.zeros(SHAPE))
    expected = np.zeros(SHAPE)
    for step in range(4):
        expected -= RATE * gradient(0, step)
        if kv.rank == 0:
            kv.push("w", mx.nd.array(gradient(0, step)))
            np.testing.assert_allclose(pulled(kv, "w", *SHAPE), expected, rtol=1e-5, atol=1e-6)
    kv._barrier()


@on_nodes
def test_states_of_dcasgd_can_be_saved_and_loaded(kv: Any) -> None:
    kv.set_optimizer(mx.optimizer.DCASGD(learning_rate=RATE, lamda=LAMDA, momentum=0.5))
    kv.init("w", mx.nd.ones(SHAPE))
    kv.push("w", mx.nd.ones(SHAPE))
    pulled(kv, "w", *SHAPE)
    kv._barrier()
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "states")
        kv.save_optimizer_states(file)
        kv._barrier()
        kv.load_optimizer_states(file)
    before = pulled(kv, "w", *SHAPE)
    kv._barrier()
    if kv.rank == 0:
        kv.push("w", mx.nd.zeros(SHAPE))
        momentum = pulled(kv, "w", *SHAPE) - before
        assert (momentum < -0.1).all()
    kv._barrier()
