"""Gradient compression and float16 on three ranks, with what MXNet 1.9.1 was seen to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from tests.integration.mxnet.on_nodes import NODES, on_nodes, same_everywhere

THRESHOLD = 0.5

SIZES = [(1,), (7, 3), (9_999,), (3, 50, 211), (65_537,)]


def pulled(kv: Any, key: Any, *shape: int) -> Any:
    out = mx.nd.zeros(shape)
    kv.pull(key, out=out)
    return out.asnumpy()


class Rest:
    """What one rank's compression of one key keeps back, as MXNet's documentation has it."""

    def __init__(self) -> None:
        self.kept: Any = np.float32(0)

    def sent(self, gradient: Any) -> Any:
        total = (self.kept + gradient).astype(np.float32)
        signs = np.where(total >= THRESHOLD, 1, np.where(total <= -THRESHOLD, -1, 0))
        self.kept = (total - signs.astype(np.float32) * np.float32(THRESHOLD)).astype(np.float32)
        return signs * THRESHOLD


# ----------------------------------------------------------------------------------------------- compression


@on_nodes
def test_compressed_pushes_send_plus_or_minus_the_threshold_and_keep_the_rest(kv: Any) -> None:
    kv.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
    kv.init(3, mx.nd.array([1, 2, 3, 4, 5]))
    assert pulled(kv, 3, 5).tolist() == [1, 2, 3, 4, 5]  # initial values are exact
    signs = [[0, 0, 1, -1, 1], [1, -1, 1, -1, 1], [1, -1, 1, -1, 1], [1, -1, 1, -1, 1]]
    for expected in signs:
        kv.push(3, mx.nd.array([0.4, -0.4, 0.5, -0.5, 7.0]))
        assert pulled(kv, 3, 5).tolist() == [THRESHOLD * NODES * sign for sign in expected]
    kv.push(3, mx.nd.zeros(5))
    assert pulled(kv, 3, 5).tolist() == [0, 0, 0, 0, THRESHOLD * NODES]


@on_nodes
def test_sums_of_random_gradients_are_exact_for_every_size_and_each_rank_keeps_its_own_rest(kv: Any) -> None:
    kv.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
    kv.init(list(range(len(SIZES))), [mx.nd.zeros(shape) for shape in SIZES])
    rests = [[Rest() for _ in SIZES] for _ in range(NODES)]
    chances = [np.random.RandomState(rank) for rank in range(NODES)]
    for _ in range(4):
        gradients = [[chance.standard_normal(shape).astype("f") for shape in SIZES] for chance in chances]
        kv.push(list(range(len(SIZES))), [mx.nd.array(gradient) for gradient in gradients[kv.rank]])
        for key, shape in enumerate(SIZES):
            expected = sum(rests[rank][key].sent(gradients[rank][key]) for rank in range(NODES))
            np.testing.assert_array_equal(pulled(kv, key, *shape), expected)


@on_nodes
def test_devices_are_summed_before_and_the_pushed_arrays_stay_as_they_were(kv: Any) -> None:
    kv.init("w", mx.nd.zeros(4))
    kv.set_gradient_compression({"type": "2bit", "threshold": "0.5"})  # text will do, as with MXNet
    values = [mx.nd.array([0.3, -0.3, 0.2, 9], ctx=mx.cpu(device)) for device in range(2)]
    kv.push("w", values)
    assert pulled(kv, "w", 4).tolist() == [1.5, -1.5, 0, 1.5]
    assert all(
        value.asnumpy().tolist() == [np.float32(0.3), np.float32(-0.3), np.float32(0.2), 9]
        for value in values
    )


@on_nodes
def test_compression_may_begin_and_change_between_pushes(kv: Any) -> None:
    kv.init("w", mx.nd.zeros(3))
    kv.push("w", mx.nd.array([0.125, 2, 0]))
    assert pulled(kv, "w", 3).tolist() == [0.375, 6, 0]
    kv.set_gradient_compression({"type": "2bit", "threshold": 1})
    kv.push("w", mx.nd.array([0.25, 2, 0]))
    assert pulled(kv, "w", 3).tolist() == [0, 3, 0]
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.25})
    kv.push("w", mx.nd.array([0, 0, -1]))
    assert pulled(kv, "w", 3).tolist() == [0.75, 0.75, -0.75]


@on_nodes
def test_compressed_pushes_cost_a_fraction_of_the_bytes(kv: Any) -> None:
    shape = (400_000,)
    value = mx.nd.random.normal(shape=shape)
    kv.init("w", mx.nd.zeros(shape))

    def bytes_of_a_push() -> float:
        kv._barrier()
        before = kv.statistics()["bytes_sent"]
        kv.push("w", value)
        pulled(kv, "w", *shape)
        return float(kv.statistics()["bytes_sent"] - before)

    plain = bytes_of_a_push()
    kv.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
    assert bytes_of_a_push() < plain / 8 + 30_000  # sums over 3 ranks have 3 bits; headers and heartbeats


@on_nodes
def test_what_mxnet_refuses_is_refused(kv: Any) -> None:
    wrong = [
        ({"type": "3bit"}, "Unknown type for gradient compression '3bit'"),
        ({"type": "int8", "block": 3}, "it takes rounding"),
        ({"type": "topk", "ratio": 2}, "expected more than 0, up to 1"),
        ({"w": 3}, "has no type"),
        ({"threshold": 0.5}, "has no type"),
        ("2bit", "takes a dictionary"),
        (None, "takes a dictionary"),
        *(
            ({"type": "2bit", "threshold": t}, "greater than 0")
            for t in (0, -1, "a lot", None, True, 1e-50, 1e50)
        ),
    ]
    for parameters, message in wrong:
        with pytest.raises(UsageError, match=message):
            kv.set_gradient_compression(parameters)
    kv.init("half", mx.nd.zeros(3, dtype="float16"))
    kv.set_gradient_compression({"type": "2bit", "what": "MXNet does not know either"})
    with pytest.raises(UsageError, match=r"'other', which is float64: .*dense float32 only"):
        kv.init("other", mx.nd.zeros(3, dtype="float64"))
    with pytest.raises(UsageError, match="push of key 'half', which is float16"):
        kv.push("half", mx.nd.zeros(3, dtype="float16"))
    kv.init("w", mx.nd.zeros(1))
    kv.push("w", mx.nd.array([0.5]))
    assert pulled(kv, "w", 1).tolist() == [THRESHOLD * NODES]


def mean_of(kv: Any, key: str, gradient: Any, pushes: int) -> Any:
    """Push the same gradient a few times; return the mean sum: error feedback brings it near the true one."""
    sums = []
    for _ in range(pushes):
        kv.push(key, mx.nd.array(gradient))
        sums.append(pulled(kv, key, *gradient.shape))
    assert same_everywhere(kv, mx.nd.array(np.stack(sums)))
    return np.mean(sums, axis=0)


@on_nodes
def test_every_codec_sums_right_on_the_average_and_gives_all_ranks_the_same_bits(kv: Any) -> None:
    shape = (45, 41)
    gradients = [np.random.RandomState(rank).standard_normal(shape).astype("f") for rank in range(NODES)]
    right = sum(gradients)
    codecs = ["fp16", "bf16", "int8", "1bit", "topk", "bsc", "mpq", "powersgd"]
    more: dict[str, dict[str, float]] = {
        "topk": {"ratio": 0.25},
        "bsc": {"ratio": 0.25, "momentum": 0, "size_lower_bound": 1},
        "powersgd": {"rank": 12},
    }
    for place, name in enumerate(codecs):
        parameters = {"type": name, **more.get(name, {})}
        if place % 2:  # half of the keys have been there before
            kv.init(name, mx.nd.ones(shape))
        kv.set_gradient_compression(parameters)
        if not place % 2:
            kv.init(name, mx.nd.ones(shape))
        assert pulled(kv, name, *shape).min() == 1  # initial values are exact
        mean = mean_of(kv, name, gradients[kv.rank], 12)
        assert np.linalg.norm(mean - right) < 0.4 * np.linalg.norm(right), name


@on_nodes
def test_rules_choose_a_codec_by_the_names_of_keys_and_exempt_other_types(kv: Any) -> None:
    kv.set_gradient_compression({"*bias": "none", "layer*": {"type": "2bit", "threshold": 1}, "*": "fp16"})
    kv.init("layer0_bias", mx.nd.zeros(3, dtype="float64"))
    kv.init(["layer0_weight", "other"], [mx.nd.zeros(3), mx.nd.zeros(3)])
    kv.push("layer0_bias", mx.nd.array([1e-9, 0, 0], dtype="float64"))
    kv.push(["layer0_weight", "other"], [mx.nd.array([0.7, 2, -1]), mx.nd.array([1.0001, 0, 1])])
    assert pulled(kv, "layer0_weight", 3).tolist() == [0, NODES, -NODES]
    assert pulled(kv, "other", 3).tolist() == [NODES, 0, NODES]
    out = mx.nd.zeros(3, dtype="float64")
    kv.pull("layer0_bias", out=out)
    assert 0 < out.asnumpy()[0] < 1e-8


@on_nodes
def test_gluon_and_module_train_with_compressed_gradients_and_stay_equal(kv: Any) -> None:
    for on_store in (True, False):
        net = mx.gluon.nn.Dense(3, in_units=4)
        net.initialize(mx.init.Zero())
        trainer = mx.gluon.Trainer(
            net.collect_params(), "sgd", {"learning_rate": 0.25}, kvstore="dist_sync_netstorm",
            compression_params={"type": "2bit", "threshold": THRESHOLD}, update_on_kvstore=on_store,
        )  # fmt: skip
        for step in range(5):
            with mx.autograd.record():
                loss = (net(mx.nd.ones((1, 4))) * 0.2).sum()
            loss.backward()  # of 0.2 each time: 0.2, 0.4, 0.6, 0.3, 0.5
            trainer.step(1)
            moved = 0.25 * THRESHOLD * NODES * [0, 0, 1, 1, 2][step]
            assert set(net.weight.data().asnumpy().ravel().tolist()) == {-moved or 0.0}, (on_store, step)

    dense = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="one")
    out = mx.sym.MakeLoss(mx.sym.sum(dense * mx.sym.var("label")))
    compression = {"type": "2bit", "threshold": THRESHOLD}
    module = mx.mod.Module(out, label_names=["label"], compression_params=compression)
    samples = np.random.RandomState(kv.rank).randint(-3, 4, size=(8, 4)) / 8
    batches = mx.io.NDArrayIter(mx.nd.array(samples), mx.nd.ones((8, 3)), batch_size=2, label_name="label")
    module.fit(
        batches, eval_metric=mx.metric.Loss(), kvstore=mx.kv.create("netstorm"), num_epoch=2,
        initializer=mx.init.Zero(), optimizer_params={"learning_rate": 1.0, "rescale_grad": 1.0},
    )  # fmt: skip
    weights, _ = module.get_params()
    assert all(set((value.asnumpy() % THRESHOLD).ravel().tolist()) == {0} for value in weights.values())
    assert any(value.asnumpy().any() for value in weights.values())
    assert same_everywhere(kv, *weights.values())


# ------------------------------------------------------------------------------------------------ float16


class Scaled(mx.gluon.Block):
    """A weight a value: MXNet has float16 layers only on GPUs."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(1, 2), init=mx.init.One(), dtype="float16")
        self.initialize()

    def forward(self, values: Any) -> Any:
        return values * self.weight.data()


@on_nodes
def test_with_multi_precision_steps_too_small_for_float16_add_up(kv: Any) -> None:
    for multi_precision, on_store in ((True, True), (True, False), (False, True)):
        net = Scaled()
        trainer = mx.gluon.Trainer(
            net.collect_params(), "sgd",
            {"learning_rate": 2.0**-13 / NODES, "multi_precision": multi_precision},
            kvstore="dist_sync_netstorm", update_on_kvstore=on_store,
        )  # fmt: skip
        for _ in range(8):  # just below 1 float16 has steps of 2**-11
            with mx.autograd.record():
                loss = net(mx.nd.ones((1, 2), dtype="float16")).sum()
            loss.backward()
            trainer.step(1)
        assert net.weight.data().dtype == np.float16
        expected = 1 - 8 * 2.0**-13 if multi_precision else 1
        assert set(net.weight.data().asnumpy().ravel().tolist()) == {expected}, (multi_precision, on_store)
