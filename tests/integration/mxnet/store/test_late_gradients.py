"""Steps go on without late gradients, which count later; and before all results of the step before are there.

One rank is late as it waits in a barrier: nothing here depends on speed.
"""

from __future__ import annotations

from typing import Any

from netstorm.frontends.mxnet.compat import mx
from tests.integration.mxnet.on_nodes import NODES, on_nodes, same_everywhere

SETTINGS = {"NETSTORM_LOSS_BOUND": 0.7, "NETSTORM_DEADLINE": 1.5}

LATE = NODES - 1
VALUES = 25_000


def step(kv: Any, key: Any, gradient: Any, *, late: bool = False) -> Any:
    """Return the sum of a step, in which one rank may be late: it pushes once the others have their sum."""
    out = mx.nd.zeros(gradient.shape, dtype=gradient.dtype)
    if late and kv.rank == LATE:
        kv._barrier()
    kv.pushpull(key, gradient, out=out)
    found = out.asnumpy()
    if late and kv.rank != LATE:
        kv._barrier()
    return found


@on_nodes
def test_what_came_too_late_is_added_to_the_next_gradient(kv: Any) -> None:
    kv.init("w", mx.nd.zeros(VALUES))
    mine = mx.nd.full(VALUES, 10.0**kv.rank)
    assert set(step(kv, "w", mine)) == {111}
    assert set(step(kv, "w", mine, late=True)) == {11}
    assert set(step(kv, "w", mine)) == {211}
    assert set(step(kv, "w", mine)) == {111}


@on_nodes
def test_the_optimiser_of_the_store_sees_the_same_sums_at_all_ranks(kv: Any) -> None:
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, rescale_grad=1.0))
    kv.init("w", mx.nd.zeros(VALUES))
    values = [
        step(kv, "w", mx.nd.full(VALUES, 10.0**kv.rank), late=late) for late in (False, True, True, False)
    ]
    assert [value[0] for value in values] == [-111, -122, -133, -444]
    assert same_everywhere(kv, mx.nd.array(values[-1]))


@on_nodes
def test_whole_numbers_rows_and_compressed_gradients_are_waited_for(kv: Any) -> None:
    kv.init("n", mx.nd.zeros(5, dtype="int32"))
    assert set(step(kv, "n", mx.nd.ones(5, dtype="int32"))) == {NODES}
    assert kv._keys.entries()[0].residual is None
    compressed = mx.kv.create(kv.type)
    compressed.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    compressed.init("w", mx.nd.zeros(VALUES))
    assert set(step(compressed, "w", mx.nd.full(VALUES, 0.5))) == {0.5 * NODES}


@on_nodes
def test_the_next_forward_pass_begins_before_the_last_layers_sum_is_there(kv: Any) -> None:
    net = mx.gluon.nn.Sequential()
    net.add(mx.gluon.nn.Dense(4, in_units=4), mx.gluon.nn.Dense(4, in_units=4))
    net.initialize(mx.init.One())
    weights = [net[0].weight.data(), net[1].weight.data()]
    counts = ["first", "second"]  # whole numbers are waited for
    kv.init(counts, [mx.nd.zeros((4, 4), dtype="int32") for _ in counts])

    def pushpull(layer: int) -> None:
        total = mx.nd.zeros((4, 4), dtype="int32")
        kv.pushpull(counts[layer], mx.nd.ones((4, 4), dtype="int32"), out=total, priority=-layer)
        weights[layer][:] = total.astype("float32")

    if kv.rank == LATE:
        pushpull(0)
        kv._barrier()
        pushpull(1)
        expected = net(mx.nd.ones((1, 4)))
    else:
        pushpull(1)  # the backward pass ends with the first layer
        pushpull(0)
        hidden = net[0](mx.nd.ones((1, 4)))
        assert (hidden.asnumpy() == 4 * NODES).all()  # the forward pass of the first layer is over
        kv._barrier()  # and only now the last rank pushes the second layer
        expected = net[1](hidden)
    assert (expected.asnumpy() == 4 * NODES * 4 * NODES).all()
