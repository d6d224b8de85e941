"""Checkpoints of asynchronous stores: owners' values and states, for jobs of any size and kind of store.

Ranks push in turn, so that there is one order of updates, and an optimiser of this process is the oracle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from tests.integration.jobs import Job
from tests.integration.mxnet.on_nodes import NODES, on_nodes, settled, shared_folder

STORE = "dist_async_netstorm"

SHAPES: dict[str, tuple[int, ...]] = {"small": (3,), "large": (40, 1000), "never": (5,)}


def adam() -> Any:
    return mx.optimizer.Adam(learning_rate=0.125)


def gradient(key: str, step: int) -> Any:
    return mx.nd.full(SHAPES[key], 1.0 + step % 3)


def begin(kv: Any) -> None:
    kv.set_optimizer(adam())
    for key, shape in SHAPES.items():
        kv.init(key, mx.nd.ones(shape))


def push_in_turn(kv: Any, first: int, steps: int) -> None:
    """Make these steps, of which each rank pushes some."""
    for step in range(first, first + steps):
        if step % kv.num_workers == kv.rank:
            for key in ("small", "large"):
                kv.push(key, gradient(key, step))
        settled(kv)


def pulled(kv: Any) -> dict[str, Any]:
    outs = {key: mx.nd.zeros(shape) for key, shape in SHAPES.items()}
    for key, out in outs.items():
        kv.pull(key, out=out)
    return {key: out.asnumpy() for key, out in outs.items()}


def expected(steps: int) -> dict[str, Any]:
    """Return what one optimiser makes of so many steps."""
    found = {key: mx.nd.ones(shape) for key, shape in SHAPES.items()}
    updater = mx.optimizer.get_updater(adam())
    for step in range(steps):
        for key in ("small", "large"):
            updater(key, gradient(key, step), found[key])
    return {key: value.asnumpy() for key, value in found.items()}


def check(kv: Any, steps: int) -> None:
    found = pulled(kv)
    for key, value in expected(steps).items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5)


@on_nodes
def test_a_checkpoint_has_the_owners_values_and_states_for_either_kind_of_store(kv: Any) -> None:
    with shared_folder(kv) as folder:
        begin(kv)
        push_in_turn(kv, 0, 4)
        kv.save_checkpoint(folder, extra={"step": 4}).wait(60)
        kv._barrier()
        after, synchronous = mx.kv.create(STORE), mx.kv.create("dist_sync_netstorm")
        for store in (after, synchronous):
            loaded = store.load_checkpoint(folder)
            assert (loaded.extra, loaded.world_size) == ({"step": 4}, NODES)
            begin(store)
            check(store, 4)
        push_in_turn(kv, 4, 3)
        push_in_turn(after, 4, 3)
        for step in range(4, 7):
            for key in ("small", "large"):
                synchronous.push(key, gradient(key, step) if kv.rank == 0 else mx.nd.zeros(SHAPES[key]))
        for store in (kv, after, synchronous):
            check(store, 7)


@on_nodes
def test_a_checkpoint_of_a_synchronous_store_is_loaded_by_an_asynchronous_one(kv: Any) -> None:
    with shared_folder(kv) as folder:
        synchronous = mx.kv.create("dist_sync_netstorm")
        begin(synchronous)
        for step in range(2):
            for key in ("small", "large"):
                synchronous.push(key, gradient(key, step) if kv.rank == 0 else mx.nd.zeros(SHAPES[key]))
        synchronous.save_checkpoint(folder).wait(60)
        kv._barrier()
        kv.load_checkpoint(folder)
        begin(kv)
        push_in_turn(kv, 2, 3)
        check(kv, 5)


def momentum() -> Any:
    return mx.optimizer.SGD(learning_rate=0.5, momentum=0.5, lazy_update=True)


@on_nodes
def test_rows_and_their_states_are_in_a_checkpoint(kv: Any) -> None:
    other = mx.kv.create(STORE)
    with shared_folder(kv) as folder:
        rows = mx.nd.sparse.row_sparse_array((mx.nd.ones((2, 40)), [kv.rank, 700]), shape=(900, 40))
        for store in (kv, other):
            if store is other:
                kv.save_checkpoint(folder).wait(60)
                kv._barrier()
                store.load_checkpoint(folder)
            store.set_optimizer(momentum())
            store.init("rows", mx.nd.ones((900, 40)).tostype("row_sparse"))
            if store is kv:
                store.push("rows", rows)
        for store in (kv, other):
            found = mx.nd.zeros((900, 40)).tostype("row_sparse")
            store.pull("rows", out=found, ignore_sparse=False)
            assert found.asnumpy()[[0, 1, 2, 3, 700], 3].tolist() == [0.5, 0.5, 0.5, 1.0, -1.125]
            store._barrier()
            store.push("rows", rows)
            settled(store)
            store.pull("rows", out=found, ignore_sparse=False)
            assert found.asnumpy()[[3, 700], 3].tolist() == [1.0, -4.015625]


@on_nodes
def test_what_compression_has_kept_is_in_a_checkpoint(kv: Any) -> None:
    other = mx.kv.create(STORE)
    with shared_folder(kv) as folder:
        for store in (kv, other):
            store.set_gradient_compression({"type": "2bit", "threshold": 2.0})
            if store is other:
                kv.save_checkpoint(folder).wait(60)
                kv._barrier()
                store.load_checkpoint(folder)
            store.set_optimizer(momentum())
            store.init("k", mx.nd.zeros((30, 7)))
            if store is kv:
                store.push("k", mx.nd.full((30, 7), 1.5))  # too little to be sent
        for store in (kv, other):
            store.push("k", mx.nd.full((30, 7), 0.5))  # with the rest of before 2
            settled(store)
            found = mx.nd.ones((30, 7))
            store.pull("k", out=found)
            assert (found.asnumpy() == -4.25).all()


@on_nodes
def test_a_checkpoint_is_loaded_before_owners_have_values(kv: Any) -> None:
    with shared_folder(kv) as folder:
        begin(kv)
        with pytest.raises(UsageError, match="load before set_optimizer"):
            kv.load_checkpoint(folder)


SCRIPT = """
import os
from netstorm.frontends.mxnet.compat import mx
from tests.integration.mxnet.asynchronous.test_checkpoints import begin, check, push_in_turn

kv = mx.kv.create("dist_async_netstorm")
loaded = kv.load_checkpoint(os.environ["FOLDER"], missing_ok=True)
first = 0 if loaded is None else loaded.extra["step"]
begin(kv)
check(kv, first)
kv._barrier()  # nobody pushes before all have looked
push_in_turn(kv, first, 5)
check(kv, first + 5)
kv.save_checkpoint(os.environ["FOLDER"], extra={"step": first + 5}).wait(60)
print(f"ends at step {first + 5}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_goes_on_with_another_number_of_nodes(tmp_path):
    for run, nodes in enumerate((2, 1)):
        (tmp_path / str(run)).mkdir()
        with Job(tmp_path / str(run), nodes, CHUNK_SIZE=10_000) as job:
            for rank in range(nodes):
                job.start(rank, SCRIPT, FOLDER=tmp_path / "checkpoints")
            for rank in range(nodes):
                ended = job.end(rank)
                assert ended.code == 0, ended.text
                assert f"ends at step {5 * run + 5}" in ended.out
