"""Gluon and Module train on the store: all ranks alike, and as one process would on all ranks' samples."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from netstorm.frontends.mxnet.compat import mx
from tests.integration.mxnet.on_nodes import NODES, everywhere, on_nodes, same_everywhere

BATCH = 8

OPTIMISERS = {
    *("adadelta", "adagrad", "adam", "adamax", "dcasgd", "ftml", "ftrl", "lamb", "lars", "lbsgd"),
    *("nadam", "nag", "rmsprop", "sgd", "sgld", "signum"),
}


def small_net(seed: int = 3) -> Any:
    mx.random.seed(seed)
    net = mx.gluon.nn.HybridSequential()
    net.add(
        mx.gluon.nn.Conv2D(8, 3, padding=1, activation="relu"),
        mx.gluon.nn.BatchNorm(),
        mx.gluon.nn.Flatten(),
        mx.gluon.nn.Dense(10),
    )
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((1, 3, 6, 6)))
    return net


def train(
    net: Any, trainer: Any, rank: int, *, steps: int = 4, contexts: tuple[Any, ...] = (mx.cpu(),)
) -> None:
    """Train on samples that differ from rank to rank."""
    samples = np.random.RandomState(100 + rank)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for _ in range(steps):
        images = [mx.nd.array(samples.rand(BATCH, 3, 6, 6), ctx=context) for context in contexts]
        labels = [mx.nd.array(samples.randint(10, size=BATCH), ctx=context) for context in contexts]
        with mx.autograd.record():
            losses = [loss_of(net(one), of_one) for one, of_one in zip(images, labels, strict=True)]
        mx.autograd.backward(losses)
        trainer.step(BATCH * NODES * len(contexts))
        net(images[0])  # predict mode: leaves weights in blocked layouts
        # Without any store, too, MXNet crashes or returns garbage when a script reads a weight while a queued
        # prediction changes its layout.
        mx.nd.waitall()


def trainable(net: Any) -> list[Any]:
    """Return the weights that gradients train (a batch norm's running means are each rank's own)."""
    return [parameter.data() for parameter in net.collect_params().values() if parameter.grad_req != "null"]


# ------------------------------------------------------------------------------------------------------ Gluon


@on_nodes
def test_gluon_keeps_all_ranks_weights_equal_wherever_it_updates(kv: Any) -> None:
    for optimizer, on_store in (("sgd", True), ("adam", False), ("adam", None)):
        net = small_net(seed=3 + kv.rank)  # only rank 0's weights count
        trainer = mx.gluon.Trainer(
            net.collect_params(),
            optimizer,
            {"learning_rate": 0.05},
            kvstore="netstorm",
            update_on_kvstore=on_store,
        )
        before = [weight.copy() for weight in trainable(net)]
        train(net, trainer, kv.rank)
        assert same_everywhere(kv, *trainable(net)), (optimizer, on_store)
        moved = [abs(a - b).max().asscalar() for a, b in zip(before, trainable(net), strict=True)]
        assert min(moved) > 0, (optimizer, on_store)


@on_nodes
def test_gluon_trains_on_several_devices_of_each_rank(kv: Any) -> None:
    contexts = (mx.cpu(0), mx.cpu(1))
    for on_store in (True, False):
        net = small_net()
        net.collect_params().reset_ctx(list(contexts))
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=kv.type, update_on_kvstore=on_store)
        train(net, trainer, kv.rank, contexts=contexts)
        for parameter in net.collect_params().values():
            if parameter.grad_req != "null":
                first, second = parameter.list_data()
                assert (first.asnumpy() == second.asnumpy()).all()
        assert same_everywhere(kv, *[one.list_data()[0] for one in net.collect_params("dense|conv").values()])


@on_nodes
def test_a_learning_rate_may_change_between_steps_and_by_a_schedule(kv: Any) -> None:
    net = small_net()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kv.type)
    for rate in (0.1, 0.01):
        trainer.set_learning_rate(rate)
        train(net, trainer, kv.rank, steps=1)
    before = [weight.copy() for weight in trainable(net)]
    trainer.set_learning_rate(0.0)
    train(net, trainer, kv.rank, steps=1)
    assert all((a == b).asnumpy().all() for a, b in zip(before, trainable(net), strict=True))
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.1)
    trainer = mx.gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1, "lr_scheduler": schedule}, kvstore=kv.type
    )
    train(net, trainer, kv.rank, steps=5)
    assert trainer.learning_rate < 0.1
    assert same_everywhere(kv, *trainable(net))


@on_nodes
def test_a_trainers_states_are_saved_and_loaded(kv: Any) -> None:
    file = Path(tempfile.mkdtemp()) / "states"
    net, options = small_net(), {"learning_rate": 0.05, "momentum": 0.9}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kv.type)
    train(net, trainer, kv.rank)
    trainer.save_states(str(file))
    weights = [weight.copy() for weight in trainable(net)]
    train(net, trainer, kv.rank, steps=1)
    expected = [weight.copy() for weight in trainable(net)]

    for weight, value in zip(trainable(net), weights, strict=True):
        weight[:] = value
    other = mx.gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kv.type)
    other.load_states(str(file))
    train(net, other, kv.rank, steps=1)
    for one, again in zip(expected, trainable(net), strict=True):  # but for oneDNN's choice of an algorithm
        assert np.allclose(one.asnumpy(), again.asnumpy(), rtol=1e-4, atol=1e-6)
    other.set_learning_rate(0.5)  # of the optimiser that was loaded
    train(net, other, kv.rank, steps=1)
    assert same_everywhere(kv, *trainable(net))


@on_nodes
def test_every_optimiser_of_mxnet_keeps_replicas_equal(kv: Any) -> None:
    known = set(mx.optimizer.Optimizer.opt_registry)
    assert known - OPTIMISERS <= {"ccsgd", "groupadagrad", "test"}  # one is another name, one is sparse
    for name in sorted(OPTIMISERS):
        store = mx.kv.create(kv.type)
        store.set_optimizer(mx.optimizer.create(name))
        mx.random.seed(50 + kv.rank)
        weights = [mx.nd.random.normal(shape=shape) for shape in ((4, 3), (7,))]
        store.broadcast([0, 1], weights, out=weights)
        for _ in range(3):
            gradients = [mx.nd.random.normal(shape=weight.shape) for weight in weights]
            store.pushpull([0, 1], gradients, out=weights)
        assert same_everywhere(kv, *weights), name
        assert all(np.isfinite(weight.asnumpy()).all() for weight in weights), name
    assert (
        len(set(everywhere(kv, float(mx.nd.random.normal().asscalar())))) == NODES
    )  # but not the scripts' own


# ------------------------------------------------------------------------------------------- exact arithmetic


def integers(seed: int, *shape: int) -> Any:
    return mx.nd.array(np.random.RandomState(seed).randint(-3, 4, size=shape))


def integer_net() -> Any:
    net = mx.gluon.nn.Sequential()
    net.add(mx.gluon.nn.Dense(5, in_units=4, activation="relu"), mx.gluon.nn.Dense(3, in_units=5))
    net.initialize()
    for number, parameter in enumerate(net.collect_params().values()):
        parameter.set_data(integers(number, *parameter.shape))
    return net


def exact_steps(net: Any, trainer: Any, ranks: list[int]) -> list[Any]:
    """Train on the samples of `ranks` with gradients that float32 holds exactly."""
    for step in range(3):
        samples = mx.nd.concat(*[integers(1000 * step + rank, 2, 4) for rank in ranks], dim=0)
        with mx.autograd.record():
            loss = net(samples).sum()
        loss.backward()
        trainer.step(1)
    return [weight.asnumpy() for weight in trainable(net)]


@on_nodes
def test_with_integer_gradients_gluon_equals_one_process_bit_for_bit(kv: Any) -> None:
    alone = integer_net()
    rate = {"learning_rate": 2.0**-4}
    trainer = mx.gluon.Trainer(alone.collect_params(), "sgd", rate, kvstore=None)
    expected = exact_steps(alone, trainer, list(range(NODES)))
    for on_store in (True, False):
        net = integer_net()
        trainer = mx.gluon.Trainer(
            net.collect_params(), "sgd", rate, kvstore=kv.type, update_on_kvstore=on_store
        )
        found = exact_steps(net, trainer, [kv.rank])
        assert [array.tobytes() for array in found] == [array.tobytes() for array in expected]


# ----------------------------------------------------------------------------------------------------- Module


def regression() -> Any:
    data, label = mx.sym.var("data"), mx.sym.var("label")
    hidden = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=5, name="one"), act_type="relu")
    out = mx.sym.FullyConnected(hidden, num_hidden=3, name="two")
    return mx.sym.MakeLoss(mx.sym.sum(out * label))


def fit(kvstore: Any, ranks: list[int], *, contexts: int = 1, epochs: int = 2, **optimizer: Any) -> Any:
    """Fit the samples of `ranks`, in batches of the same steps whoever has them; return the weights."""
    samples, labels = (
        np.concatenate(
            [
                np.concatenate([integers(100 * step + rank + seed, 2, width).asnumpy() for rank in ranks])
                for step in range(3)
            ]
        )
        for seed, width in ((0, 4), (50, 3))
    )
    batches = mx.io.NDArrayIter(samples, labels, batch_size=2 * len(ranks), label_name="label")
    module = mx.mod.Module(
        regression(), data_names=["data"], label_names=["label"], context=[mx.cpu(n) for n in range(contexts)]
    )
    shapes = {"one_weight": (5, 4), "one_bias": (5,), "two_weight": (3, 5), "two_bias": (3,)}
    begin = {name: integers(number, *shape) for number, (name, shape) in enumerate(shapes.items())}
    module.fit(
        batches,
        eval_metric=mx.metric.Loss(),
        kvstore=kvstore,
        arg_params=begin,
        num_epoch=epochs,
        optimizer=optimizer.pop("name"),
        optimizer_params=optimizer,
    )
    return [value for _, value in sorted(module.get_params()[0].items())]


@on_nodes
def test_module_fit_keeps_all_ranks_weights_equal(kv: Any) -> None:
    for name, kvstore, contexts in (("adam", kv.type, 1), ("sgd", kv.type, 2), ("sgd", kv, 1)):
        weights = fit(kvstore, [kv.rank], contexts=contexts, name=name, learning_rate=0.01)
        assert same_everywhere(kv, *weights), (name, contexts)


@on_nodes
def test_with_integer_gradients_module_equals_one_process_bit_for_bit(kv: Any) -> None:
    expected = fit(None, list(range(NODES)), epochs=1, name="sgd", learning_rate=2.0**-4, rescale_grad=1.0)
    found = fit(kv.type, [kv.rank], epochs=1, name="sgd", learning_rate=2.0**-4, rescale_grad=1.0)
    assert [array.asnumpy().tobytes() for array in found] == [array.asnumpy().tobytes() for array in expected]


@on_nodes
def test_module_multiplies_the_batch_size_by_the_number_of_ranks(kv: Any) -> None:
    alone = fit(None, list(range(NODES)), epochs=1, name="sgd", learning_rate=2.0**-3)
    found = fit(kv.type, [kv.rank], epochs=1, name="sgd", learning_rate=2.0**-3)
    for one, other in zip(found, alone, strict=True):
        assert np.allclose(one.asnumpy(), other.asnumpy(), rtol=1e-5, atol=1e-6)
