"""The traps of MXNet's engine and of overlapping rounds: each is a silent hang or a wrong sum if walked into.

Rank r contributes r + 1 times something unless a test says otherwise, so that sums tell who is in them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from typing import Any

import numpy as np
import pytest

from netstorm.errors import Closed, UsageError
from netstorm.frontends.mxnet.arrays import memory_of
from netstorm.frontends.mxnet.compat import mx
from tests.integration.mxnet.on_nodes import NODES, everywhere, on_nodes, same_everywhere

EVERYBODY = sum(range(1, NODES + 1))
"""The sum of what the ranks contribute if each gives its rank + 1."""


def is_blocked(array: Any) -> bool:
    """Return whether an array is in oneDNN's blocked layout: only then has it no memory to share."""
    mx.nd.waitall()
    try:
        memory_of(array)
    except UsageError:
        return True
    return False


def convolution(channels: int = 16) -> Any:
    layer = mx.gluon.nn.Conv2D(32, 3, padding=1, in_channels=channels, use_bias=False)
    layer.initialize(mx.init.Uniform(1))
    return layer


def blocked_weight() -> Any:
    """Return a convolution's weight after a forward pass in predict mode."""
    layer = convolution()
    layer(mx.nd.random.uniform(shape=(2, 16, 8, 8))).wait_to_read()
    weight = layer.weight.data()
    assert is_blocked(weight)
    return weight


# -------------------------------------------------------------------------------------------- blocked layouts


@on_nodes
def test_a_weight_in_a_blocked_layout_is_initialised_and_pushed_with_its_values(kv: Any) -> None:
    weight = blocked_weight()
    expected = weight.copy().asnumpy()
    assert is_blocked(weight)
    kv.init("weight", weight)
    out = mx.nd.zeros(weight.shape)
    kv.pull("weight", out=out)
    assert same_everywhere(kv, out)
    if kv.rank == 0:
        assert (out.asnumpy() == expected).all()
    kv.push("weight", weight)
    kv.pull("weight", out=out)
    ones = mx.nd.ones(weight.shape)
    kv.pushpull("weight", [weight, ones], out=ones)
    assert np.allclose(ones.asnumpy(), out.asnumpy() + NODES, atol=1e-5)


@on_nodes
def test_a_weight_in_a_blocked_layout_is_pulled_to_and_broadcast_to(kv: Any) -> None:
    first, second = blocked_weight(), blocked_weight()
    values = mx.nd.arange(first.size).reshape(first.shape)
    kv.broadcast("weight", values * (kv.rank + 1), out=[first, second])
    assert (first.asnumpy() == values.asnumpy()).all()
    assert (second.asnumpy() == values.asnumpy()).all()
    third = blocked_weight()
    kv.pushpull("weight", values * (kv.rank + 1), out=third)
    assert (third.asnumpy() == EVERYBODY * values.asnumpy()).all()


@on_nodes
def test_a_convolutions_gradient_is_pushed_while_backward_still_computes_it(kv: Any) -> None:
    mx.random.seed(7)
    layer, image = convolution(), mx.nd.random.uniform(shape=(2, 16, 8, 8))
    alone = np.zeros(0)
    for step in range(3):
        with mx.autograd.record():
            loss = (layer(image) * (kv.rank + 1)).sum()
        loss.backward()
        gradient = layer.weight.grad()
        if step == 0:
            alone = gradient.asnumpy() / (kv.rank + 1)
            kv.init("gradient", mx.nd.zeros(gradient.shape))
        kv.pushpull("gradient", gradient, out=gradient)
        assert np.allclose(gradient.asnumpy(), EVERYBODY * alone, rtol=1e-4)
        layer(image)  # back to the blocked layout


# ----------------------------------------------------------------------------------------- one variable twice


@on_nodes
def test_an_array_may_be_pushed_and_pulled_in_place(kv: Any) -> None:
    kv.init("a", mx.nd.zeros((5000,)))
    x = mx.nd.ones((5000,)) * (kv.rank + 1)
    kv.pushpull("a", x, out=x)
    assert (x.asnumpy() == EVERYBODY).all()
    kv.pushpull("a", x)  # the same, by default
    assert (x.asnumpy() == EVERYBODY * NODES).all()
    kv.pushpull("a", [x, x], out=[x, x])
    assert (x.asnumpy() == EVERYBODY * NODES * NODES * 2).all()


@on_nodes
def test_views_of_one_array_may_be_pushed_and_pulled_together(kv: Any) -> None:
    whole = mx.nd.arange(12).reshape((4, 3)) * (kv.rank + 1)
    kv.init("a", mx.nd.zeros((2, 3)))
    kv.pushpull("a", [whole[:2], whole[2:]], out=[whole[2:], whole[:2]])
    total = EVERYBODY * (np.arange(6) + np.arange(6, 12)).reshape(2, 3)
    assert (whole.asnumpy() == np.concatenate([total, total])).all()


@on_nodes
def test_parameters_that_are_tied_may_have_a_key_each(kv: Any) -> None:
    weight = mx.nd.ones((40, 30)) * (kv.rank + 1)
    kv.init(["encoder", "decoder"], [weight, weight])
    assert (weight.asnumpy() == kv.rank + 1).all()
    kv.pushpull(["encoder", "decoder"], [weight, weight], out=[weight, weight])
    assert (weight.asnumpy() == EVERYBODY).all()


# ---------------------------------------------------------------------------------------------- round numbers


@on_nodes
def test_rounds_in_flight_never_swap_though_ranks_push_keys_in_different_orders(kv: Any) -> None:
    rounds, keys = 20, ["a", "b", "c", "d"]
    kv.init(keys, [mx.nd.zeros((25_000,))] * 4)
    order = keys[kv.rank :] + keys[: kv.rank]
    slow = mx.nd.ones((200, 200))
    outs: dict[str, list[Any]] = {key: [mx.nd.zeros((25_000,)) for _ in range(rounds)] for key in keys}
    for number in range(rounds):
        for position, key in enumerate(order):
            value = mx.nd.full((25_000,), 1000 * number + keys.index(key)) * (kv.rank + 1)
            if (number + position + kv.rank) % 5 == 0:  # ready long after what is pushed next
                for _ in range(8):
                    slow = mx.nd.dot(slow, slow) * 0 + 1
                value = value * slow[0, 0]
            kv.push(key, value, priority=-position)
            kv.pull(key, out=outs[key][number])
    for index, key in enumerate(keys):
        found = [out.asnumpy() for out in outs[key]]
        assert [array[0] for array in found] == [EVERYBODY * (1000 * n + index) for n in range(rounds)]
        assert all((array == array[0]).all() for array in found)


# ----------------------------------------------------------------------------------------------------- memory


@on_nodes
def test_what_was_pushed_may_be_overwritten_at_once(kv: Any) -> None:
    kv.init("a", mx.nd.zeros((100_000,)))
    x, outs = mx.nd.zeros((100_000,)), [mx.nd.zeros((100_000,)) for _ in range(6)]
    for number, out in enumerate(outs):
        x[:] = (kv.rank + 1) * (number + 1)
        kv.push("a", x)
        x[:] = -1e9
        kv.pull("a", out=out)
    for number, out in enumerate(outs):
        assert (out.asnumpy() == EVERYBODY * (number + 1)).all()


@on_nodes
def test_arrays_may_be_freed_while_the_network_still_sends_them(kv: Any) -> None:
    kv.init(["a", "b"], [mx.nd.zeros((100_000,))] * 2)
    outs = []
    for number in range(6):
        for key in ("a", "b"):
            x = mx.nd.full((100_000,), (kv.rank + 1) * (number + 1))
            kv.push(key, x)
            del x
            outs.append(mx.nd.zeros((100_000,)))
            kv.pull(key, out=outs[-1])
            kv.pull(key, out=mx.nd.zeros((100_000,)))  # its only reference is the engine's
            gc.collect()
            mx.nd.full((100_000,), -1e9)  # would be given the freed memory
    for index, out in enumerate(outs):
        assert (out.asnumpy() == EVERYBODY * (index // 2 + 1)).all()


@on_nodes
def test_pulled_values_may_be_overwritten_without_harm_to_the_stored_ones(kv: Any) -> None:
    kv.init("a", mx.nd.full((3000,), 5))
    out = mx.nd.zeros((3000,))
    for _ in range(3):
        kv.pull("a", out=out)
        out += 1
    assert (out.asnumpy() == 6).all()


# ---------------------------------------------------------------------------------------------------- forking


def square(number: int) -> int:
    return number * number


@on_nodes
def test_a_pool_may_be_forked_in_the_middle_of_training(kv: Any) -> None:
    kv.init("a", mx.nd.zeros((200_000,)))
    out = mx.nd.zeros((200_000,))
    for number in range(3):
        time.sleep(0.3 * (kv.rank == 1))  # keeps the others' operations outstanding while they fork
        kv.pushpull("a", mx.nd.full((200_000,), (kv.rank + 1) * (number + 1)), out=out)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            kv.push("a", mx.nd.ones((200_000,)))  # and one more while the pool is at work
            assert pool.map(square, range(10)) == [n * n for n in range(10)]
            pool.close()
            pool.join()
        assert (out.asnumpy() == EVERYBODY * (number + 1)).all()


@on_nodes
def test_gluons_data_loader_may_fork_its_workers_in_the_middle_of_training(kv: Any) -> None:
    kv.init("a", mx.nd.zeros((200_000,)))
    data = mx.gluon.data.ArrayDataset(np.arange(32, dtype="float32"))
    for epoch in range(2):
        pending = mx.nd.zeros((200_000,))
        kv.pushpull("a", mx.nd.full((200_000,), kv.rank + 1), out=pending)
        loader = mx.gluon.data.DataLoader(data, batch_size=8, num_workers=2)
        seen = []
        for batch in loader:
            total = mx.nd.zeros((200_000,))
            kv.pushpull("a", mx.nd.full((200_000,), (kv.rank + 1) * float(batch.sum().asscalar())), out=total)
            seen.append(total)
        del loader
        assert (pending.asnumpy() == EVERYBODY).all()
        sums = [EVERYBODY * sum(range(8 * n, 8 * n + 8)) for n in range(4)]
        assert [float(total[-1].asscalar()) for total in seen] == sums, epoch


@on_nodes
def test_a_forked_child_cannot_use_the_store_and_gets_an_error(kv: Any) -> None:
    kv.init("a", mx.nd.zeros((10,)))
    out = mx.nd.zeros((10,))
    kv.pushpull("a", mx.nd.ones((10,)), out=out)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        errors = []
        for call in (
            lambda: kv.push("a", mx.nd.ones((10,))),
            lambda: kv.pull("a", out=mx.nd.zeros((10,))),
            lambda: kv.init("b", mx.nd.ones((10,))),
            kv._barrier,
            lambda: mx.kv.create("dist_sync_netstorm"),
        ):
            try:
                call()
            except Closed as error:
                errors.append(str(error))
        os.write(write, "\n".join(errors).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as text:
        errors = text.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    assert len(errors) == 5
    assert all(f"forked from {os.getpid()}" in error or str(os.getpid()) in error for error in errors)
    assert (out.asnumpy() == NODES).all()  # and the parent's store is as good as before
    assert everywhere(kv, kv.rank) == list(range(NODES))


# ---------------------------------------------------------------------------- threads, and MXNet's own errors


@on_nodes
def test_an_error_of_the_scripts_own_is_not_mistaken_for_the_stores(kv: Any) -> None:
    with pytest.raises(mx.base.MXNetError, match="broadcast"):
        (mx.nd.ones((2, 3)) + mx.nd.ones((4, 5))).asnumpy()
    assert everywhere(kv, kv.rank) == list(range(NODES))
