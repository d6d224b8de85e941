"""Row-sparse values, fewer bits and saved states in asynchronous stores, on three ranks with real MXNet.

Gradients are small integers and learning rates powers of two, so that sums are exact in any order. Where
several ranks push, only what does not depend on the order is compared; where it matters, one rank pushes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.updates import digest_of
from tests.integration.mxnet.on_nodes import NODES, on_nodes, same_everywhere, settled, shared_folder

STORE = "dist_async_netstorm"

SETTINGS = {"CHUNK_SIZE": 40, "MXNET_STORAGE_FALLBACK_LOG_VERBOSE": 0}
"""Several blocks a key, with rows that are cut by chunks."""

SHAPE = (50, 6)


def rows(numbers: list[int], value: float = 1.0, shape: tuple[int, ...] = SHAPE) -> Any:
    if not numbers:
        return mx.nd.sparse.zeros("row_sparse", shape)
    data = np.full((len(numbers), *shape[1:]), value, np.float32)
    return mx.nd.sparse.row_sparse_array((data, numbers), shape=shape)


def pulled(kv: Any, key: Any, shape: tuple[int, ...] = SHAPE) -> Any:
    out = mx.nd.zeros(shape)
    kv.pull(key, out=out)
    return out.asnumpy()


def pulled_rows(kv: Any, key: Any, numbers: list[int]) -> Any:
    out = mx.nd.sparse.zeros("row_sparse", SHAPE)
    kv.row_sparse_pull(key, out=out, row_ids=mx.nd.array(numbers))
    assert out.indices.asnumpy().tolist() == sorted(set(numbers))
    return out.data.asnumpy()


@on_nodes
def test_rows_are_pushed_to_their_owners_and_some_are_pulled(kv: Any) -> None:
    kv.init("a", rows(list(range(50)), 64.0))
    assert (pulled_rows(kv, "a", [9, 3, 3]) == 64).all()
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
    kv.push("a", rows([49, kv.rank, 17, kv.rank], 2.0))
    mine = pulled_rows(kv, "a", [kv.rank])
    assert (mine <= 62).all()  # twice in one push: both count
    settled(kv)
    assert pulled_rows(kv, "a", [49, 0, 20, 17, 2])[:, 5].tolist() == [62, 62, 64 - NODES, 64, 64 - NODES]
    assert pulled(kv, "a")[[0, 3, 17, 49], 1].tolist() == [62, 64, 64 - NODES, 64 - NODES]
    kv._barrier()  # all have looked
    kv.push("a", [rows([], 0), rows([7], 2.0)])
    kv.push("a", mx.nd.ones(SHAPE) * 2)  # a dense array has all rows
    settled(kv)
    assert pulled_rows(kv, "a", [6, 7, 8])[:, 0].tolist() == [64 - NODES, 64 - 2 * NODES, 64 - NODES]
    out = rows([], 0)
    kv.pull("a", out=out, ignore_sparse=False)
    assert (out.asnumpy() == pulled(kv, "a")).all()


@on_nodes
def test_rows_may_be_pushed_to_dense_keys_whose_chunks_cut_them(kv: Any) -> None:
    kv.init("a", mx.nd.ones(SHAPE) * 64)
    kv.init("long", mx.nd.ones((3, 100)) * 64)  # longer than a chunk: travel as dense
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
    for _ in range(2):
        kv.push("a", rows([kv.rank, 6, 13, 49], 2.0))
        kv.push("a", mx.nd.ones(SHAPE) * 2)
        kv.push("long", rows([kv.rank], 2.0, (3, 100)))
    settled(kv)
    found = pulled(kv, "a")
    assert (found == found[:, :1]).all()
    lost = found[:, 0] - 64 + 2 * NODES
    assert lost[[0, 1, 2, 3, 6, 13, 49]].tolist() == [-2, -2, -2, 0, -2 * NODES, -2 * NODES, -2 * NODES]
    assert (pulled(kv, "long", (3, 100)) == 62).all()


OPTIMISERS = (
    ("sgd", "row_sparse"),
    ("sgd", "default"),
    ("adam", "row_sparse"),
    ("adagrad", "default"),
    ("ftrl", "row_sparse"),
    ("lamb", "default"),
)


@on_nodes
def test_optimisers_do_to_the_owners_rows_what_they_do_to_a_local_store(kv: Any) -> None:
    drawn = np.random.RandomState(3)
    start = drawn.randn(*SHAPE).astype("float32")
    for name, kind in OPTIMISERS:
        more = {"momentum": 0.9, "wd": 0.01} if name == "sgd" else {}
        store, local = mx.kv.create(kv.type), mx.kv.create("local")
        for one in (store, local):
            one.set_optimizer(mx.optimizer.create(name, **more))
            one.init("a", mx.nd.array(start).tostype(kind))
        for _ in range(3):
            numbers = np.unique(drawn.randint(0, 50, 12))
            values = drawn.randn(len(numbers), 6).astype("float32")
            gradient = mx.nd.sparse.row_sparse_array((values, numbers), shape=SHAPE)
            local.push("a", gradient)
            if kv.rank == 1:
                store.push("a", gradient)
        settled(store)
        if kind == "row_sparse":
            expected = rows([], 0)
            local.row_sparse_pull("a", out=expected, row_ids=mx.nd.arange(50))
        else:
            expected = mx.nd.zeros(SHAPE)
            local.pull("a", out=expected)
        assert np.allclose(pulled(store, "a"), expected.asnumpy(), rtol=1e-5, atol=1e-6), (name, kind)


@on_nodes
def test_only_the_rows_that_matter_travel(kv: Any) -> None:
    shape = (20_000, 32)
    settings = {}
    kv.set_optimizer(mx.optimizer.SGD())
    kv.init("big", mx.nd.zeros(shape).tostype("row_sparse"))
    settled(kv)
    out = mx.nd.sparse.zeros("row_sparse", shape)
    for count in (1, 1000):
        before = kv.statistics()["bytes_sent"]
        kv._barrier()  # what is sent for others counts, too
        numbers = list(range(kv.rank, 3 * count, 3))
        kv.push("big", rows(numbers, 1.0, shape))
        kv.row_sparse_pull("big", out=out, row_ids=mx.nd.array(numbers))
        settled(kv)
        settings[count] = kv.statistics()["bytes_sent"] - before
    everything = 1000 * (32 * 4 * 2 + 12)  # pushed; and pulled, with their numbers
    assert everything / 2 < settings[1000] - settings[1] < 1.5 * everything
    assert settings[1] < 20_000 * 32 * 4 / 50


@on_nodes
def test_row_numbers_that_no_row_has_are_an_error_of_whoever_reads_them(kv: Any) -> None:
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    kv.init("a", rows(list(range(50))))
    out = mx.nd.sparse.zeros("row_sparse", SHAPE)
    kv.row_sparse_pull("a", out=out, row_ids=mx.nd.array([0, 50]))
    with pytest.raises(UsageError, match="row 50 of an array with 50 rows"):
        out.asnumpy()
    assert (pulled_rows(kv, "a", [0]) == 1).all()


@on_nodes
def test_gluon_and_module_train_sparse_weights_and_gradients(kv: Any) -> None:
    for weights in ("default", "row_sparse"):
        parameter = mx.gluon.Parameter("w", shape=SHAPE, stype=weights, grad_stype="row_sparse")
        parameter.initialize(init=mx.init.One())
        trainer = mx.gluon.Trainer(
            [parameter], "sgd", {"learning_rate": 0.5}, kvstore=mx.kv.create("dist_async_netstorm")
        )
        ids = mx.nd.array([kv.rank, 40])
        for _ in range(2):
            with mx.autograd.record():
                value = parameter.row_sparse_data(ids) if weights == "row_sparse" else parameter.data()
                loss = mx.nd.Embedding(ids, value, 50, 6, sparse_grad=True).sum()
            loss.backward()
            trainer.step(1)
        settled(kv)
        everything = mx.nd.arange(50)
        if weights == "row_sparse":
            found = parameter.row_sparse_data(everything).asnumpy()
        else:
            trainer._kvstore.pull(0, out=parameter.data())
            found = parameter.data().asnumpy()
        assert found[[0, 1, 2, 3, 40], 3].tolist() == [0, 0, 0, 1, 1 - NODES]


@on_nodes
def test_compressed_pushes_are_restored_by_the_owners_and_each_rank_keeps_its_own_rest(kv: Any) -> None:
    from netstorm.compression.quantised import quantised

    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    shape = (37, 41)
    start = np.random.RandomState(1).randn(*shape).astype("float32")
    kv.init("a", mx.nd.array(start))
    assert pulled(kv, "a", shape).tobytes() == start.tobytes()  # exact, before the first push
    settled(kv)  # no rank pushes before all have pulled
    taken = np.zeros(shape, "float64")
    for rank in range(NODES):
        residual = np.zeros(shape[0] * shape[1], "float32")
        for step in range(4):
            gradient = np.random.RandomState([rank, step]).randn(*shape).astype("float32")
            signs = quantised(gradient.ravel(), residual, np.float32(0.5))
            bits = [
                np.unpackbits(one, bitorder="little")[: gradient.size]
                for one in (signs.positive, signs.negative)
            ]
            taken += 0.5 * (bits[0].astype(int) - bits[1]).reshape(shape)
            if rank == kv.rank:
                kv.push("a", mx.nd.array(gradient))
    settled(kv)
    found = pulled(kv, "a", shape)
    assert np.allclose(found, start - taken, atol=1e-5)
    assert same_everywhere(kv, mx.nd.array(found))


@on_nodes
def test_compressed_pushes_cost_a_sixteenth_and_nothing_at_all_if_they_are_small(kv: Any) -> None:
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    kv.init("a", mx.nd.zeros((300, 300)))
    settled(kv)
    sent = {0.125: math.inf, 0.75: math.inf}
    for value in (*3 * [0.125], *3 * [0.75]):  # what is late of one push may be counted with the next one
        kv._barrier()
        before = kv.statistics()["bytes_sent"]
        kv._barrier()
        kv.push("a", mx.nd.full((300, 300), value))
        settled(kv)
        sent[value] = min(sent[value], kv.statistics()["bytes_sent"] - before)
    others = (NODES - 1) / NODES * 300 * 300
    assert 0.5 * others / 4 < sent[0.75] - sent[0.125] < 1.5 * others / 4
    assert (pulled(kv, "a", (300, 300)) == 3 * -0.5 * NODES).all()
    with pytest.raises(UsageError, match="dense float32 only"):
        kv.init("half", mx.nd.zeros((3,), dtype="float16"))
    with pytest.raises(UsageError, match="row_sparse array"):
        kv.push("a", rows([1], 1.0, (300, 300)))


KEYS = {"flat": (7,), "a": SHAPE, "rows": SHAPE, "half": (33,)}


def value(name: str, step: int = 0) -> Any:
    """Return the initial value of a key, or what its gradients are made of."""
    drawn = np.random.RandomState([step, len(name)]).randn(*KEYS[name])
    array = mx.nd.array(drawn, dtype="float16" if name == "half" else "float32")
    return array.tostype("row_sparse") if name == "rows" else array


def train(push: Any, first: int, last: int, *, empty: bool = False) -> None:
    """Push all keys at each of these steps; `empty`: zeros."""
    for step in range(first, last):
        for name in KEYS:
            gradient = value(name, step) * (0 if empty else 1)
            if name == "rows":
                gradient = mx.nd.sparse.retain(gradient, mx.nd.array([1, 2, 30 + step]))
            push(name, gradient)


def weights_of(kv: Any) -> dict[str, Any]:
    found = {name: mx.nd.zeros(shape, dtype=value(name).dtype) for name, shape in KEYS.items()}
    for name, out in found.items():
        kv.pull(name, out=out)
    return found


def states_in(path: Path, optimizer: Any) -> Any:
    updater = mx.optimizer.get_updater(optimizer)
    updater.set_states(path.read_bytes())
    return updater


def as_dense(states: Any) -> Any:
    """Return states with row-sparse arrays as dense ones: how many zeros are written down is no matter."""
    if isinstance(states, dict):
        return {key: as_dense(state) for key, state in states.items()}
    if isinstance(states, (list, tuple)):
        return tuple(map(as_dense, states))
    return states.tostype("default") if isinstance(states, mx.nd.NDArray) else states


def check_states(kv: Any, folder: Path, optimiser: Any) -> None:
    """One rank pushes, so that the order is known: MXNet's own updater is the oracle."""

    def made() -> Any:
        return optimiser(learning_rate=0.125, multi_precision=True)

    updater, expected = mx.optimizer.get_updater(made()), {name: value(name) for name in KEYS}
    train(lambda name, gradient: updater(name, gradient, expected[name]), 1, 4)
    path = folder / optimiser.__name__
    first = mx.kv.create(kv.type)
    first.set_optimizer(made())
    for name in KEYS:
        first.init(name, value(name))
    first.init("frozen", mx.nd.ones((3,)))
    if kv.rank == 1:
        train(first.push, 1, 4)
        first.save_optimizer_states(str(path), dump_optimizer=True)
    settled(first)
    saved, weights = states_in(path, made()), weights_of(first)
    assert sorted(saved.states) == sorted(KEYS)
    assert saved.optimizer._index_update_count == updater.optimizer._index_update_count
    train(lambda name, gradient: updater(name, gradient, expected[name]), 4, 7)
    for kind in ("dist_async_netstorm", "dist_sync_netstorm"):
        second = mx.kv.create(kind)
        second.set_optimizer(made())
        for name, weight in weights.items():
            second.init(name, weight.tostype("row_sparse") if name == "rows" else weight)
        second.load_optimizer_states(str(path))
        again = folder / f"{path.name}.{kind}.{kv.rank}"
        second.save_optimizer_states(str(again))  # nothing has been pushed yet
        assert digest_of(as_dense(states_in(again, made()).states)) == digest_of(as_dense(saved.states)), kind
        kv._barrier()  # all have looked
        if kv.rank == 1 or kind == "dist_sync_netstorm":
            train(second.push, 4, 7, empty=kv.rank != 1)
        settled(second)
        for name, weight in weights_of(second).items():
            close = 2e-3 if name == "half" else 1e-4
            right = expected[name].asnumpy()
            assert np.allclose(weight.asnumpy(), right, rtol=close, atol=1e-5), (kind, name)


@on_nodes
def test_states_are_collected_from_their_owners_and_every_kind_of_store_goes_on_from_them(kv: Any) -> None:
    with shared_folder(kv) as folder:
        check_states(kv, folder, mx.optimizer.Adam)
        check_states(kv, folder, mx.optimizer.LAMB)  # of whole tensors
