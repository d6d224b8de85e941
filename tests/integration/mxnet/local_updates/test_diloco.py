"""DiLoCo on three real nodes: what is synchronised when, against all ranks in NumPy, and that it learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.local_updates import DiLoCo, OuterSGD
from tests.integration.mxnet.on_nodes import NODES, on_nodes, same_everywhere

KEYS = ("first", "second")
SHAPE = (40, 301)
"""More than one chunk."""


def gradient(rank: int, step: int, key: str) -> Any:
    return np.random.RandomState(100 * step + 10 * rank + KEYS.index(key)).randn(*SHAPE)


def pulled(kv: Any, key: str) -> Any:
    out = mx.nd.zeros(SHAPE, dtype="float64")
    kv.pull(key, out=out)
    return out.asnumpy()


def train(kv: Any, steps: range) -> None:
    for step in steps:
        for key in KEYS:
            kv.push(key, mx.nd.array(gradient(kv.rank, step, key), dtype="float64"))


def started(kv: Any) -> Any:
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
    kv.init(list(KEYS), [mx.nd.full(SHAPE, kv.rank + 1, dtype="float64") for _ in KEYS])  # rank 0's counts
    return kv


def simulated(steps: int, applied_at: dict[str, int], every: int, delay: int, alpha: float) -> Any:
    """Return all ranks' local values by key, and the global ones, computed by hand."""
    shared = {key: np.ones(SHAPE) for key in KEYS}
    local = {key: [np.ones(SHAPE) for _ in range(NODES)] for key in KEYS}
    velocity: dict[str, Any] = {}
    sums: dict[str, Any] = {}
    for step in range(1, steps + 1):
        for key in KEYS:
            local[key] = [one - 0.5 * gradient(rank, step, key) for rank, one in enumerate(local[key])]
            if (step + delay) % every == applied_at[key] % every:
                sums[key] = np.mean([shared[key] - one for one in local[key]], axis=0)
            if step % every == applied_at[key] % every and key in sums:
                outer = sums.pop(key)
                velocity[key] = outer + 0.9 * velocity.get(key, 0)
                shared[key] = shared[key] - 0.7 * (outer + 0.9 * velocity[key])
                local[key] = [(1 - alpha) * shared[key] + alpha * one for one in local[key]]
    return local, shared


@on_nodes
def test_fragments_equal_a_simulation_of_all_ranks(kv: Any) -> None:
    for delay, alpha in ((0, 0.0), (1, 0.0), (2, 0.25)):
        kv = DiLoCo(
            [["first"], ["sec*"]], OuterSGD(), 4, fragment_sync_delay=delay, fragment_update_alpha=alpha
        )
        train(started(kv), range(1, 12))
        local, shared = simulated(11, {"first": 2, "second": 4}, 4, delay, alpha)
        for key in KEYS:
            np.testing.assert_allclose(pulled(kv, key), local[key][kv.rank], rtol=1e-10, atol=1e-10)
        assert (kv.steps, kv.averages) == (11, 2)
        kv.load_global_parameters()
        for key in KEYS:
            assert same_everywhere(kv, mx.nd.array(pulled(kv, key), dtype="float64"))
            np.testing.assert_allclose(pulled(kv, key), shared[key], rtol=1e-10, atol=1e-10)


@on_nodes
def test_a_plain_outer_step_is_the_average_and_all_may_be_synchronised_at_once(kv: Any) -> None:
    kv = started(DiLoCo([list(KEYS)], OuterSGD(1.0, 0.0, nesterov=False), 5, fragment_sync_delay=1))
    train(kv, range(1, 5))
    with pytest.raises(UsageError, match="sums of outer gradients are under way"):
        kv.save_checkpoint("nowhere")
    kv.sync()
    kv._check_checkpoint("save_checkpoint")
    for key in KEYS:
        of_all = [gradient(rank, step, key) for rank in range(NODES) for step in range(1, 5)]
        np.testing.assert_allclose(pulled(kv, key), 1 - 0.5 * np.sum(of_all, axis=0) / NODES, rtol=1e-10)


@on_nodes
def test_what_cannot_be_is_refused_by_name(kv: Any) -> None:
    with pytest.raises(UsageError, match="fragment_update_alpha=2"):
        DiLoCo([["*"]], OuterSGD(), 4, fragment_update_alpha=2.0)
    with pytest.raises(UsageError, match="model_fragments is empty"):
        DiLoCo([], OuterSGD(), 4)
    with pytest.raises(
        UsageError, match=r"outer_optimizer is a SGD: expected one of netstorm.training.outer"
    ):
        DiLoCo([["*"]], mx.optimizer.SGD(), 4)
    store = DiLoCo([["first"], ["*"]], OuterSGD(), 4)
    with pytest.raises(UsageError, match="is in 2 of model_fragments"):
        store.init("first", mx.nd.zeros(SHAPE))


@on_nodes
def test_classes_are_learnt_with_few_exchanges(kv: Any) -> None:
    chance = np.random.RandomState(0)
    labels = chance.randint(10, size=1800)
    images = (chance.rand(10, 64)[labels] + 0.3 * chance.randn(1800, 64)).astype(np.float32)
    mine = slice(kv.rank, 1500, NODES)
    mx.random.seed(7)
    net = mx.gluon.nn.Sequential()
    net.add(mx.gluon.nn.Dense(32, activation="relu", in_units=64), mx.gluon.nn.Dense(10, in_units=32))
    net.initialize(mx.init.Xavier())
    kv = DiLoCo([net[:1], net[1:]], OuterSGD(), sync_every=10)
    kv.set_gradient_compression({"*bias": "none", "*": "int8"})
    trainer = mx.gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.005}, kvstore=kv)
    loss_of, draw = mx.gluon.loss.SoftmaxCrossEntropyLoss(), np.random.RandomState(kv.rank)
    while kv.averages < 12:
        chosen = draw.choice(500, 32)
        with mx.autograd.record():
            loss = loss_of(net(mx.nd.array(images[mine][chosen])), mx.nd.array(labels[mine][chosen]))
        loss.backward()
        trainer.step(32)
    kv.load_global_parameters()
    for name, parameter in net.collect_params().items():
        kv.pull(trainer._param2idx[name], out=parameter.data())
    assert same_everywhere(kv, *(parameter.data() for parameter in net.collect_params().values()))
    found = net(mx.nd.array(images[1500:])).asnumpy().argmax(axis=1)
    assert (found == labels[1500:]).mean() > 0.85
