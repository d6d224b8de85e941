"""Row-sparse values on three ranks: pushes, pulls of some rows, optimisers, Trainer and Module.

What is expected was seen with MXNet 1.9.1's own `dist_sync`, but for what its servers die of.
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from tests.integration.mxnet.on_nodes import NODES, on_nodes, same_everywhere

EVERYBODY = sum(range(1, NODES + 1))

SHAPE = (6, 2)

ALL = list(range(SHAPE[0]))


def rows(numbers: list[int], value: float, shape: tuple[int, ...] = SHAPE, device: int = 0) -> Any:
    """Return a row-sparse array with these rows."""
    context = mx.cpu(device)
    if not numbers:
        return mx.nd.sparse.zeros("row_sparse", shape, ctx=context)
    data = np.full((len(numbers), *shape[1:]), value, np.float32)
    return mx.nd.sparse.row_sparse_array((data, numbers), shape=shape, ctx=context)


def ones() -> Any:
    return mx.nd.ones(SHAPE).tostype("row_sparse")


def pulled(kv: Any, key: Any, numbers: list[int] = ALL) -> list[float]:
    """Return the first value of these rows of a key."""
    out = mx.nd.sparse.zeros("row_sparse", SHAPE)
    kv.row_sparse_pull(key, out=out, row_ids=mx.nd.array(numbers))
    assert out.indices.asnumpy().tolist() == sorted(set(numbers))
    assert (out.asnumpy()[:, 0] == out.asnumpy()[:, 1]).all()
    return [float(value) for value in out.data.asnumpy()[:, 0]]


def sgd(kv: Any, **options: Any) -> None:
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, **options))


@on_nodes
def test_rows_are_pulled_in_order_and_once_however_they_are_asked_for(kv: Any) -> None:
    kv.init("a", rows(ALL, kv.rank + 7.0))
    assert pulled(kv, "a", [5, 0, 0, 3]) == [7, 7, 7]
    outs = [mx.nd.sparse.zeros("row_sparse", SHAPE, ctx=mx.cpu(device)) for device in (0, 1)]
    kv.row_sparse_pull("a", out=outs, row_ids=mx.nd.array([2, 1], dtype="int64"))
    assert [out.indices.asnumpy().tolist() for out in outs] == [[1, 2]] * 2
    kv.row_sparse_pull("a", out=outs, row_ids=[mx.nd.array([4]), mx.nd.array([[1, 2], [3, 1]])])
    assert [out.indices.asnumpy().tolist() for out in outs] == [[4], [1, 2, 3]]
    kv.row_sparse_pull(["a"], out=[outs[0]], row_ids=[mx.nd.array([1.7])])
    assert outs[0].indices.asnumpy().tolist() == [1]
    with mx.util.np_shape(True):
        kv.row_sparse_pull("a", out=outs[0], row_ids=mx.nd.zeros((0,), dtype="int64"))
    assert outs[0].indices.shape == (0,)


@on_nodes
def test_a_key_may_be_named_again_behind_another_one_and_each_out_gets_its_own_rows(kv: Any) -> None:
    kv.init(["a", "b"], [rows(ALL, 1.0), rows(ALL, 2.0)])
    outs = [rows([], 0) for _ in range(4)]
    ids = [mx.nd.array(numbers) for numbers in ([0], [1, 2], [3], [4, 5])]
    kv.row_sparse_pull(["a", "b", "a", "b"], out=outs, row_ids=ids)
    assert [out.indices.asnumpy().tolist() for out in outs] == [[0], [1, 2], [3], [4, 5]]
    assert [float(out.data.asnumpy()[0, 0]) for out in outs] == [1, 2, 1, 2]
    kv.row_sparse_pull(
        ["a", "b", "a"], out=[outs[:2], [outs[2]], [outs[3]]], row_ids=[ids[:2], ids[2:3], ids[3:]]
    )
    assert [out.indices.asnumpy().tolist() for out in outs] == [[0], [1, 2], [3], [4, 5]]
    assert [float(out.data.asnumpy()[0, 0]) for out in outs] == [1, 1, 2, 1]
    kv.row_sparse_pull(["a", "b", "a"], out=outs[:3], row_ids=ids[3])
    assert [out.indices.asnumpy().tolist() for out in outs[:3]] == [[4, 5]] * 3


@on_nodes
def test_the_sum_has_the_rows_of_all_ranks_and_a_lazy_optimiser_changes_only_those(kv: Any) -> None:
    sgd(kv, wd=0.5)
    kv.init("a", ones())
    kv.push("a", rows([kv.rank, 3], 10.0**kv.rank))
    # half of a row's own value goes with its gradient, which is the weight decay
    assert pulled(kv, "a") == [-0.5, -9.5, -99.5, -110.5, 1, 1]
    assert pulled(kv, "a", [5, 3]) == [-110.5, 1]


@on_nodes
def test_some_ranks_or_all_may_have_no_rows_and_devices_are_summed_first(kv: Any) -> None:
    sgd(kv)
    kv.init("a", ones())
    kv.push("a", rows([4] if kv.rank == 1 else [], 10.0))
    assert pulled(kv, "a") == [1, 1, 1, 1, -9, 1]
    kv.push("a", rows([], 0))
    assert pulled(kv, "a") == [1, 1, 1, 1, -9, 1]
    kv.push("a", [rows([1], 1.0), rows([1, 5], 2.0, device=1), rows([], 0)])
    assert pulled(kv, "a") == [1, 1 - 3 * NODES, 1, 1, -9, 1 - 2 * NODES]


@on_nodes
def test_without_an_optimiser_the_sum_replaces_the_value(kv: Any) -> None:
    kv.init("a", ones())
    kv.push("a", rows([0, 2], kv.rank + 1.0))
    assert pulled(kv, "a") == [EVERYBODY, 0, EVERYBODY, 0, 0, 0]
    kv.push("a", rows([5], kv.rank + 1.0))
    assert pulled(kv, "a") == [0, 0, 0, 0, 0, EVERYBODY]
    sgd(kv)
    kv.push("a", rows([1], 1.0))
    assert pulled(kv, "a") == [0, -NODES, 0, 0, 0, EVERYBODY]


@on_nodes
def test_rows_out_of_order_and_repeated_are_added_as_they_are_meant(kv: Any) -> None:
    sgd(kv)
    kv.init("a", ones())
    data = np.array([[1, 1], [2, 2], [4, 4]], np.float32)
    kv.push("a", mx.nd.sparse.row_sparse_array((data, [4, 1, 4]), shape=SHAPE))
    assert pulled(kv, "a") == [1, 1 - 2 * NODES, 1, 1, 1 - 5 * NODES, 1]


@on_nodes
def test_initial_values_may_lack_rows_and_these_are_zeros_that_can_be_updated(kv: Any) -> None:
    sgd(kv)
    kv.init(["some", "none"], [rows([1, 3], 5.0), rows([], 0)])
    assert pulled(kv, "some") == [0, 5, 0, 5, 0, 0]
    assert pulled(kv, "none") == [0] * 6
    kv.push(["some", "none"], [rows([0, 1], 1.0)] * 2)
    assert pulled(kv, "some") == [-NODES, 5 - NODES, 0, 5, 0, 0]
    assert pulled(kv, "none") == [-NODES, -NODES, 0, 0, 0, 0]


@on_nodes
def test_dense_pushes_to_a_row_sparse_key_have_all_rows(kv: Any) -> None:
    sgd(kv)
    kv.init("a", ones())
    kv.push("a", mx.nd.ones(SHAPE) * (kv.rank + 1))
    assert pulled(kv, "a") == [1 - EVERYBODY] * 6
    kv.push("a", [rows([1], 1.0), mx.nd.ones(SHAPE)])
    assert pulled(kv, "a") == [1 - EVERYBODY - NODES - (NODES if row == 1 else 0) for row in ALL]


@on_nodes
def test_row_sparse_pushes_to_a_dense_key_update_its_rows_or_replace_it(kv: Any) -> None:
    kv.init("a", mx.nd.ones(SHAPE))
    out = mx.nd.zeros(SHAPE)
    kv.push("a", rows([kv.rank, 3], 1.0))
    kv.pull("a", out=out)
    assert out.asnumpy()[:, 1].tolist() == [1, 1, 1, NODES, 0, 0]
    sgd(kv, wd=1.0)
    kv.push("a", rows([5, 0], 1.0))
    kv.pull("a", out=out)
    assert out.asnumpy()[:, 1].tolist() == [-NODES, 1, 1, NODES, 0, -NODES]
    kv.push("a", mx.nd.ones(SHAPE))
    kv.push("a", [rows([1], 1.0), mx.nd.ones(SHAPE)])
    kv.pull("a", out=out)
    assert out.asnumpy()[:, 1].tolist() == [-NODES, -2 * NODES, -NODES, -NODES, -NODES, -NODES]
    sparse = rows([], 0)
    kv.pull("a", out=sparse, ignore_sparse=False)
    assert (sparse.asnumpy() == out.asnumpy()).all()


@on_nodes
def test_a_pull_skips_row_sparse_arrays_unless_asked_for_them_and_fills_dense_ones(kv: Any) -> None:
    kv.init("a", rows([1, 4], 3.0))
    sparse, dense = rows([2], 9.0), [mx.nd.zeros(SHAPE), mx.nd.zeros(SHAPE, ctx=mx.cpu(1))]
    kv.pull("a", out=sparse)
    assert sparse.indices.asnumpy().tolist() == [2]
    kv.pull("a", out=dense)
    kv.pull("a", out=sparse, ignore_sparse=False)
    for out in (*dense, sparse):
        assert out.asnumpy()[:, 0].tolist() == [0, 3, 0, 0, 3, 0]
    kv.pushpull("a", rows([0], 1.0), out=sparse)
    assert sparse.asnumpy()[:, 0].tolist() == [NODES, 0, 0, 0, 0, 0]


@on_nodes
def test_a_pull_never_changes_the_rows_that_were_pushed_nor_what_was_pulled_before(kv: Any) -> None:
    kv.init("a", ones())
    value, before = rows([1, 2], kv.rank + 1.0), rows([], 0)
    kv.push("a", value)
    kv.row_sparse_pull("a", out=before, row_ids=mx.nd.array([1]))
    kv.push("a", value)
    out = rows([], 0)
    kv.row_sparse_pull("a", out=out, row_ids=mx.nd.array(ALL))
    mx.nd.waitall()
    assert value.indices.asnumpy().tolist() == [1, 2]
    assert (value.data.asnumpy() == kv.rank + 1).all()
    assert (before.indices.asnumpy().tolist(), before.data.asnumpy().tolist()) == ([1], [[EVERYBODY] * 2])


@on_nodes
def test_any_number_of_dimensions_and_every_type_will_do(kv: Any) -> None:
    for dtype in ("float16", "float32", "float64"):
        for shape in ((7,), (7, 3), (7, 2, 3, 2, 2)):
            key = f"{dtype} {shape}"
            value = mx.nd.full(shape, 2, dtype=dtype).tostype("row_sparse")
            kv.init(key, value)
            kv.push(key, mx.nd.sparse.retain(value, mx.nd.array([1, kv.rank + 2], dtype=dtype)))
            out = mx.nd.sparse.zeros("row_sparse", shape, dtype=dtype)
            kv.row_sparse_pull(key, out=out, row_ids=mx.nd.array([1, 3, 6]))
            assert out.dtype == np.dtype(dtype)
            found = out.data.asnumpy().reshape(3, -1)
            assert (found == np.array([[2 * NODES], [2], [0]])).all(), key


@on_nodes
def test_what_does_not_fit_is_refused_by_name(kv: Any) -> None:
    kv.init(["a", "dense"], [ones(), mx.nd.ones(SHAPE)])
    out, ids = mx.nd.sparse.zeros("row_sparse", SHAPE), mx.nd.array([1])
    with pytest.raises(UsageError, match="key 'a' to a default array"):
        kv.row_sparse_pull("a", out=mx.nd.zeros(SHAPE), row_ids=ids)
    with pytest.raises(UsageError, match="3 row_ids for 1 outs"):
        kv.row_sparse_pull("a", out=out, row_ids=[ids] * 3)
    with pytest.raises(UsageError, match="needs out"):
        kv.row_sparse_pull("a", row_ids=ids)
    with pytest.raises(UsageError, match="'dense', which was initialised as a dense one"):
        kv.row_sparse_pull("dense", out=out, row_ids=ids)
    with pytest.raises(UsageError, match="has not been initialised"):
        kv.row_sparse_pull("b", out=out, row_ids=ids)
    with pytest.raises(UsageError, match="csr array"):
        kv.push("a", mx.nd.sparse.zeros("csr", SHAPE))
    packed = mx.kv.create(kv.type)
    packed.set_gradient_compression({"type": "2bit"})
    packed.init(["a", "dense"], [ones(), mx.nd.ones(SHAPE)])
    for key, message in {
        "a": "for dense float32 only",
        "dense": "'dense', with a row_sparse array",
    }.items():
        with pytest.raises(UsageError, match=message):
            packed.push(key, ones())
    kv.row_sparse_pull("a", out=out, row_ids=mx.nd.array([0, 7]))
    with pytest.raises(UsageError, match="row 7 of an array with 6 rows"):
        out.asnumpy()
    assert pulled(kv, "a") == [1] * 6


OPTIMISERS = {
    "sgd": {"momentum": 0.9, "wd": 0.01},
    "adam": {},
    "adagrad": {},
    "ftrl": {},
}


@on_nodes
def test_optimisers_do_to_rows_what_they_do_to_a_local_store(kv: Any) -> None:
    drawn = np.random.RandomState(7)
    for name, options in OPTIMISERS.items():
        store, local = mx.kv.create(kv.type), mx.kv.create("local")
        for one in (store, local):
            one.set_optimizer(mx.optimizer.create(name, learning_rate=0.5, **options))
            one.init(0, mx.nd.array(np.arange(40.0).reshape(10, 4)).tostype("row_sparse"))
        for _ in range(3):
            numbers = [sorted(set(drawn.randint(0, 10, 4).tolist())) for _ in range(NODES)]
            gradients = [rows(mine, 2.0**-place, (10, 4)) for place, mine in enumerate(numbers)]
            store.push(0, gradients[kv.rank])
            local.push(0, gradients)
        found, right = (mx.nd.sparse.zeros("row_sparse", (10, 4)) for _ in range(2))
        for one, out in ((store, found), (local, right)):
            one.row_sparse_pull(0, out=out, row_ids=mx.nd.arange(10))
        assert np.allclose(found.asnumpy(), right.asnumpy(), rtol=1e-6, atol=1e-6), name
        assert same_everywhere(kv, found), name


@on_nodes
def test_states_of_rows_are_saved_and_loaded(kv: Any) -> None:
    again = mx.kv.create(kv.type)
    for store in (kv, again):
        sgd(store, momentum=0.5)
    kv.init("a", ones())
    kv.push("a", rows([1, 4], 1.0))
    between = rows([], 0)
    kv.pull("a", out=between, ignore_sparse=False)
    again.init("a", between)
    with tempfile.TemporaryDirectory() as folder:
        kv.save_optimizer_states(f"{folder}/states")
        again.load_optimizer_states(f"{folder}/states")
    for store in (kv, again):
        store.push("a", rows([4, 5], 1.0))
    assert pulled(kv, "a") == pulled(again, "a") == [1, 1 - NODES, 1, 1, 1 - 2.5 * NODES, 1 - NODES]


@on_nodes
def test_an_embedding_with_sparse_gradients_trains_alike_everywhere(kv: Any) -> None:
    net = mx.gluon.nn.Embedding(20, 3, sparse_grad=True)
    net.initialize(mx.init.One())
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore=kv)
    for _ in range(2):
        with mx.autograd.record():
            total = net(mx.nd.array([kv.rank, 10, 10])).sum()
        total.backward()
        trainer.step(1)
    weights = net.weight.data().asnumpy()
    expected = np.ones(20)
    expected[:NODES] -= 2
    expected[10] -= 4 * NODES
    assert weights[:, 0].tolist() == expected.tolist()
    assert same_everywhere(kv, net.weight.data())


@on_nodes
def test_a_parameter_of_sparse_weights_and_gradients_trains_alike_everywhere(kv: Any) -> None:
    x = mx.gluon.Parameter("x", shape=(20, 3), stype="row_sparse", grad_stype="row_sparse")
    x.initialize(init="ones")
    trainer = mx.gluon.Trainer([x], "sgd", {"learning_rate": 1.0}, kvstore=kv)
    mine = mx.nd.array([kv.rank, 10])
    for _ in range(2):
        with mx.autograd.record():
            weights = x.row_sparse_data(mine)
            total = mx.nd.Embedding(mine, weights, input_dim=20, output_dim=3, sparse_grad=True).sum()
        total.backward()
        trainer.step(1)
    found = x.row_sparse_data(mx.nd.arange(20))
    expected = np.ones(20)
    expected[:NODES] -= 2
    expected[10] -= 2 * NODES
    assert found.asnumpy()[:, 2].tolist() == expected.tolist()
    assert same_everywhere(kv, found)


@on_nodes
def test_a_module_of_sparse_weights_trains_alike_everywhere(kv: Any) -> None:
    weight = mx.sym.var("weight", stype="row_sparse", shape=(50, 2), init=mx.init.One())
    data = mx.sym.var("data", stype="csr")
    out = mx.sym.MakeLoss(mx.sym.sum(mx.sym.sparse.dot(data, weight)))
    drawn = np.random.RandomState(kv.rank)
    values = (drawn.rand(8, 50) < 0.05) * drawn.randint(1, 4, (8, 50))
    batches = [mx.io.DataBatch([mx.nd.array(half).tostype("csr")]) for half in (values[:4], values[4:])]
    module = mx.mod.Module(out, data_names=["data"], label_names=None)
    module.bind([("data", (4, 50))])
    module.init_params()
    module.init_optimizer(
        kvstore=kv, optimizer="sgd", optimizer_params={"learning_rate": 1.0, "rescale_grad": 1}
    )

    def ids(batch: Any) -> dict[str, Any]:
        return {"weight": batch.data[0].indices}

    for _ in range(2):
        for batch in batches:
            module.prepare(batch, sparse_row_id_fn=ids)
            module.forward_backward(batch)
            module.update()
    everything = mx.nd.arange(50)
    module.prepare(mx.io.DataBatch([mx.nd.zeros((4, 50)).tostype("csr")]), lambda _: {"weight": everything})
    found = module._exec_group.param_arrays[0][0]
    sums = np.zeros(50)
    for rank in range(NODES):
        other = np.random.RandomState(rank)
        sums += ((other.rand(8, 50) < 0.05) * other.randint(1, 4, (8, 50))).sum(axis=0)
    assert found.asnumpy()[:, 0].tolist() == (1 - 2 * sums).tolist()
    assert same_everywhere(kv, found)


@on_nodes
def test_only_the_rows_that_were_pushed_travel(kv: Any) -> None:
    shape = (20_000, 32)
    net = mx.nd.zeros(shape)
    kv.init("big", net)
    out = mx.nd.zeros(shape)
    kv.pull("big", out=out)
    sgd(kv)
    sent = {}
    for count in (1, 100, 1000):
        out.wait_to_read()
        kv._barrier()
        before = kv.statistics()["bytes_sent"]
        kv.push("big", rows(list(range(kv.rank, 3 * count, 3)), 1.0, shape))
        kv.pull("big", out=out)
        out.wait_to_read()
        kv._barrier()
        sent[count] = kv.statistics()["bytes_sent"] - before
    row = 32 * 4 + 4
    everything = 3 * 1000 * row  # what one rank needs of the others, and they of it, with room to spare
    assert sent[1000] < 3 * everything
    assert sent[1] < 20_000 * row / 40
    assert sent[1000] - sent[1] > 5 * (sent[100] - sent[1]) > 0
    assert (
        out.asnumpy()[:, 0]
        == [-3 if r < 3 else -2 if r < 300 else -1 if r < 3000 else 0 for r in range(shape[0])]
    ).all()
