"""A store of three real nodes saves what it has and takes it over: rows, scalars, misuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from netstorm.checkpoint.files import latest_step
from netstorm.cli.main import app
from netstorm.errors import CheckpointError, Disagreement, UsageError
from netstorm.frontends.mxnet.compat import mx
from tests.integration.mxnet.on_nodes import on_nodes, same_everywhere, shared_folder

FORMER = Path(__file__).parents[3] / "data" / "checkpoints-1" / "mxnet"


def filled(kv: Any) -> None:
    """Give a store a dense and a row-sparse key with an optimiser, and push both."""
    kv.set_optimizer(mx.optimizer.Adam(learning_rate=0.1, lazy_update=True))
    kv.init(["dense", "rows"], [mx.nd.ones((300, 7)), mx.nd.ones((9, 4)).tostype("row_sparse")])
    rows = mx.nd.sparse.row_sparse_array((mx.nd.ones((2, 4)), [kv.rank, 7]), shape=(9, 4))
    kv.push(["dense", "rows"], [mx.nd.full((300, 7), kv.rank + 1), rows])


def values(kv: Any) -> list[Any]:
    outs = [mx.nd.zeros((300, 7)), mx.nd.zeros((9, 4))]
    kv.pull(["dense", "rows"], out=outs, ignore_sparse=False)
    return [out.asnumpy() for out in outs]


@on_nodes
def test_dense_and_row_sparse_values_and_states_come_back_before_and_after_init(kv):
    with shared_folder(kv) as folder:
        filled(kv)
        kv.save_checkpoint(folder, extra={"epoch": 3}, keep=1).wait(60)
        saved = values(kv)
        filled_again = [mx.kv.create("dist_sync_netstorm") for _ in range(2)]
        before, after = filled_again
        loaded = before.load_checkpoint(folder)
        assert (loaded.extra, loaded.world_size, loaded.step) == ({"epoch": 3}, 3, 0)
        assert loaded.rounds == {"dense": 1, "rows": 1}
        for store in (before, after):
            store.set_optimizer(mx.optimizer.Adam(learning_rate=0.1, lazy_update=True))
            store.init(["dense", "rows"], [mx.nd.zeros((300, 7)), mx.nd.zeros((9, 4)).tostype("row_sparse")])
        after.load_checkpoint(folder, broadcast=True)
        for store in filled_again:
            assert all(np.array_equal(one, two) for one, two in zip(saved, values(store), strict=True))
            assert same_everywhere(kv, *map(mx.nd.array, values(store)))
        gradients = [mx.nd.full((300, 7), 0.25), mx.nd.ones((9, 4)).tostype("row_sparse")]
        for store in (kv, *filled_again):
            store.push(["dense", "rows"], gradients)
        expected = values(kv)
        for store in filled_again:
            assert all(np.array_equal(one, two) for one, two in zip(expected, values(store), strict=True))
        after.save_checkpoint(folder, keep=1).wait(60)
        kv._barrier()
        assert after.load_checkpoint(folder).rounds == {"dense": 2, "rows": 2}
        assert [path.name for path in folder.iterdir()] == ["step-000001"]


@on_nodes
def test_a_converted_checkpoint_that_two_ranks_of_netstorm_0_2_wrote_is_taken_over(kv):
    with shared_folder(kv) as folder:
        if kv.rank == 0:
            result = CliRunner().invoke(app, ["checkpoint", "convert", str(FORMER), str(folder)])
            assert result.exit_code == 0, result.output
        kv._barrier()
        loaded = kv.load_checkpoint(folder)
        assert (loaded.step, loaded.extra, loaded.world_size) == (3, {"next_epoch": 4}, 2)
        kv.set_optimizer(mx.optimizer.Adam(learning_rate=0.2, lazy_update=True))
        kv.init(["dense", "rows"], [mx.nd.zeros((3, 2)), mx.nd.zeros((9, 4)).tostype("row_sparse")])
        outs = [mx.nd.zeros((3, 2)), mx.nd.zeros((9, 4))]
        kv.pull(["dense", "rows"], out=outs, ignore_sparse=False)
        assert (outs[0].asnumpy() == 1).all()
        assert np.allclose(outs[1].asnumpy()[:, 0], [0.9, 0.9, 1, 1, 1, 1, 1, 0.9, 1])


@on_nodes
def test_what_does_not_fit_is_named(kv):
    with shared_folder(kv) as folder:
        with pytest.raises(UsageError, match="has no keys yet"):
            kv.save_checkpoint(folder)
        assert kv.load_checkpoint(folder, missing_ok=True) is None
        with pytest.raises(CheckpointError, match=r"has no checkpoint|rank 0 cannot read"):
            kv.load_checkpoint(folder)
        kv.set_optimizer(mx.optimizer.SGD(momentum=0.9))
        kv.init(1, mx.nd.ones((2, 3)))
        with pytest.raises(Disagreement, match="different numbers or texts"):
            kv.save_checkpoint(folder, extra=kv.rank)
        with pytest.raises(mx.MXNetError, match=r"extra is a builtins\.object"):
            kv.save_checkpoint(folder, extra=object())
        if kv.rank == 0:  # alone, with nobody's help
            kv.save_checkpoint(folder, shares=False).wait(60)
            assert latest_step(folder) == 0
        kv._barrier()
        other = mx.kv.create("dist_sync_netstorm")
        other.load_checkpoint(folder)
        with pytest.raises(CheckpointError, match=r"has no key 2; it has 1 keys, such as 1"):
            other.init(2, mx.nd.ones((2, 3)))
        with pytest.raises(
            CheckpointError, match=r"key 1 with shape \(2, 3\) and type float32.*has \(3, 2\)"
        ):
            other.init(1, mx.nd.ones((3, 2)))
        with pytest.raises(CheckpointError, match=r"an optimizer SGD, and this store has Adam.*states=False"):
            other.set_optimizer(mx.optimizer.Adam())
        net = mx.gluon.nn.Dense(1, in_units=1)
        net.initialize()
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=kv)
        with pytest.raises(UsageError, match="another store"):
            other.load_checkpoint(folder, trainer=trainer)
