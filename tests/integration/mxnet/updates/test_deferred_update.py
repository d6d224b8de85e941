"""Updates that another thread queues: whoever reads a value waits for them, and nothing else does.

A store's second push of a key is the first whose update is queued by the other thread. Rank r contributes
r + 1 times something, so that sums tell who is in them.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.updates import CalledUpdater
from tests.integration.mxnet.on_nodes import NODES, on_nodes, same_everywhere

EVERYBODY = sum(range(1, NODES + 1))


@contextmanager
def held_up() -> Iterator[None]:
    """Let the other thread wait with updates."""
    go_on, apply = threading.Event(), CalledUpdater.apply

    def wait_and_apply(rule: CalledUpdater, *arguments: Any) -> None:
        go_on.wait(60)
        apply(rule, *arguments)

    with patch.object(CalledUpdater, "apply", wait_and_apply):
        try:
            yield
        finally:
            go_on.set()


def begun(kv: Any, key: str, optimizer: Any, *shape: int) -> Any:
    """Make a key of zeros that has been pushed once, with a sum of nothing."""
    kv.set_optimizer(optimizer)
    value = mx.nd.zeros(shape)
    kv.init(key, value)
    kv.push(key, value)
    return value


@on_nodes
def test_a_value_is_there_when_its_deferred_update_is_and_not_before(kv: Any) -> None:
    out = begun(kv, "w", mx.optimizer.SGD(learning_rate=1.0, wd=0.0), 1000)
    read: queue.SimpleQueue[float] = queue.SimpleQueue()
    with held_up():
        kv.push("w", mx.nd.ones((1000,)) * (kv.rank + 1))
        kv.pull("w", out=out)
        threading.Thread(target=lambda: read.put(out.asnumpy()[-1])).start()
        other = mx.nd.zeros((3,))  # of a key without an update, which waits for nobody
        kv.init("other", other)
        kv.pull("other", out=other)
        assert other.asnumpy().tolist() == [0, 0, 0]
        with pytest.raises(queue.Empty):
            read.get(timeout=0.5)
    assert read.get(timeout=60) == -EVERYBODY


@on_nodes
def test_rounds_of_many_pushes_are_updated_with_what_the_optimiser_had_at_each(kv: Any) -> None:
    optimizer = mx.optimizer.SGD(learning_rate=1.0, wd=0.0)
    begun(kv, "w", optimizer, 7)
    outs = [mx.nd.zeros((7,)) for _ in range(8)]
    with held_up():
        for number, out in enumerate(outs):
            optimizer.set_learning_rate(0.5**number)
            kv.pushpull("w", mx.nd.ones((7,)) * (kv.rank + 1), out=out)
        optimizer.set_learning_rate(1000.0)
    sums = [sum(0.5**step for step in range(number + 1)) for number in range(8)]
    assert [out.asnumpy()[0] for out in outs] == [-EVERYBODY * one for one in sums]
    assert optimizer.num_update == 9
    assert same_everywhere(kv, *outs)


@on_nodes
def test_states_are_saved_with_all_updates_that_were_pushed(kv: Any) -> None:
    path = str(Path(tempfile.mkdtemp()) / "states")
    begun(kv, "w", mx.optimizer.SGD(learning_rate=1.0, momentum=1.0, wd=0.0), 2)
    for _ in range(3):
        kv.push("w", mx.nd.ones((2,)) * (kv.rank + 1))
    assert kv._updater.states["w"].asnumpy().tolist() == [-3 * EVERYBODY] * 2
    kv.push("w", mx.nd.zeros((2,)))
    kv.save_optimizer_states(path)
    kv.load_optimizer_states(path)
    assert kv._updater.states["w"].asnumpy().tolist() == [-3 * EVERYBODY] * 2
    out = mx.nd.zeros((2,))
    kv.pushpull("w", mx.nd.zeros((2,)), out=out)
    assert out.asnumpy().tolist() == [-(1 + 2 + 3 + 3 + 3) * EVERYBODY] * 2


@on_nodes
def test_row_sparse_pushes_between_dense_ones_are_updated_in_order(kv: Any) -> None:
    out = begun(kv, "w", mx.optimizer.SGD(learning_rate=1.0, momentum=0.5, wd=0.0, lazy_update=False), 4, 2)
    dense = mx.nd.ones((4, 2)) * (kv.rank + 1)
    rows = dense.tostype("row_sparse")
    for pushed in (dense, rows, rows, dense, dense, rows):
        kv.push("w", pushed)
    kv.pull("w", out=out)
    momentum = value = 0.0
    for _ in range(6):
        momentum = 0.5 * momentum - EVERYBODY
        value += momentum
    assert (out.asnumpy() == value).all()


@on_nodes
def test_values_of_several_devices_and_of_all_types_have_deferred_updates_too(kv: Any) -> None:
    optimizer = mx.optimizer.SGD(learning_rate=1.0, wd=0.0, multi_precision=True)
    kv.set_optimizer(optimizer)
    for dtype in ("float16", "float32", "float64"):
        kv.init(dtype, mx.nd.zeros((3, 2), dtype=dtype))
        out = mx.nd.zeros((3, 2), dtype=dtype)
        for _ in range(3):
            kv.pushpull(
                dtype, [mx.nd.ones((3, 2), dtype=dtype, ctx=mx.cpu(device)) for device in range(2)], out=out
            )
        assert (out.asnumpy() == -3 * 2 * NODES).all()


@on_nodes
def test_scalars_and_empty_values_are_updated_at_once(kv: Any) -> None:
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, wd=0.0))
    with mx.util.np_shape(True):
        for shape in ((), (0, 3)):
            value = mx.nd.zeros(shape)
            kv.init(str(shape), value)
            for _ in range(2):
                kv.pushpull(str(shape), mx.nd.ones(shape), out=value)
            assert value.asnumpy().sum() == (-2 * NODES if shape == () else 0)
