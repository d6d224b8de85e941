"""Stores with local updates, and MixedSync, on three nodes at two sites: what is averaged when, over whom.

Gradients are small integers and learning rates powers of two, so that sums are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.local_updates import HFA, ESync, LocalSGD, MixedSync
from tests.integration.mxnet.on_nodes import NODES, everywhere, on_nodes, same_everywhere, settled

VARIABLES = {rank: {"NETSTORM_SITE": site} for rank, site in enumerate(("east", "east", "west"))}

SHAPE = (40, 301)
"""More than one chunk."""


def full(value: float, *shape: int, dtype: str = "float32") -> Any:
    return mx.nd.full(shape or SHAPE, value, dtype=dtype)


def pulled(kv: Any, key: Any, dtype: str = "float32") -> Any:
    out = mx.nd.zeros(SHAPE, dtype=dtype)
    kv.pull(key, out=out)
    return out.asnumpy()


def descent() -> Any:
    return mx.optimizer.SGD(learning_rate=1.0)


def steps(kv: Any, count: int, key: Any = "w", dtype: str = "float32") -> list[float]:
    """Take steps with the gradient -(rank + 1) * 6; return the value after each."""
    found = []
    for _ in range(count):
        kv.push(key, full(-6.0 * (kv.rank + 1), dtype=dtype))
        value = pulled(kv, key, dtype)
        assert (value == value.flat[0]).all()
        found.append(float(value.flat[0]))
    return found


@on_nodes
def test_between_averages_each_rank_is_alone_and_an_average_is_over_all(kv: Any) -> None:
    kv = LocalSGD(sync_every=3)
    kv.set_optimizer(descent())
    kv.init("w", full(kv.rank))  # rank 0's value counts
    mine = 6.0 * (kv.rank + 1)
    assert steps(kv, 6) == [mine, 2 * mine, 36, 36 + mine, 36 + 2 * mine, 72]
    assert kv.averages == 2


@on_nodes
def test_hfa_averages_the_site_and_every_k2_th_time_all(kv: Any) -> None:
    kv = HFA(k1=2, k2=2)
    assert [kv.sites.name, kv.sites.local] == (["east", (0, 1)] if kv.rank < 2 else ["west", (2,)])
    kv.set_optimizer(descent())
    kv.init("w", full(0))
    mine, site = 6.0 * (kv.rank + 1), 9.0 if kv.rank < 2 else 18.0
    first = [mine, 2 * site, 2 * site + mine, 48.0]
    assert steps(kv, 8) == [*first, *(48 + value for value in first)]
    assert same_everywhere(kv, mx.nd.array(pulled(kv, "w")))


@on_nodes
def test_a_sites_average_sends_nothing_to_other_sites(kv: Any) -> None:
    kv = HFA(k1=1, k2=100)
    kv.set_optimizer(descent())
    kv.init("w", full(0))
    settled(kv)
    before = kv.statistics()["bytes_sent"]
    steps(kv, 4)
    mx.nd.waitall()
    sent = kv.statistics()["bytes_sent"] - before
    size = 4 * SHAPE[0] * SHAPE[1]
    assert sent < size if kv.rank == 2 else sent > 3 * size
    kv._barrier()


@on_nodes
def test_float16_and_float64_are_averaged_and_other_kinds_are_refused(kv: Any) -> None:
    kv = HFA(k1=1, k2=1)
    kv.set_optimizer(descent())
    for dtype in ("float16", "float64"):
        kv.init(dtype, full(0, dtype=dtype))
        assert steps(kv, 1, dtype, dtype) == [12.0]
    with pytest.raises(UsageError, match="int32"):
        kv.init("whole", full(0, dtype="int32"))
    with pytest.raises(UsageError, match="row_sparse"):
        kv.init("rows", full(0).tostype("row_sparse"))


@on_nodes
def test_a_push_needs_an_optimizer_and_a_checkpoint_an_average(kv: Any) -> None:
    kv = LocalSGD(sync_every=2)
    kv.init("w", full(0))
    with pytest.raises(UsageError, match="set_optimizer"):
        kv.push("w", full(1))
    kv.set_optimizer(descent())
    assert kv.is_averaged
    kv.push("w", full(1))
    with pytest.raises(UsageError, match="right after an average of all"):
        kv.save_checkpoint("nowhere")
    with pytest.raises(UsageError, match="at least 1"):
        HFA(k1=0, k2=1)


@on_nodes
def test_esync_takes_as_many_steps_as_the_state_server_says_and_all_get_the_same_average(kv: Any) -> None:
    kv = ESync(least_steps=2, most_steps=6)
    kv.set_optimizer(descent())
    kv.init("w", full(0))
    expected = 0.0
    for round in range(5):
        count, before = 0, kv.steps
        while kv.averages == round:
            assert kv.round_steps > count
            kv.push("w", full(-1.0))
            count += 1
        assert kv.steps == before + count
        assert 2 <= count <= (6 if round else 2)
        value = pulled(kv, "w")
        assert same_everywhere(kv, mx.nd.array(value))
        expected += sum(everywhere(kv, count)) / NODES
        assert np.allclose(value, expected)


@on_nodes
def test_gluon_trains_with_it_and_parameters_meet(kv: Any) -> None:
    kv = HFA(k1=2, k2=2)
    mx.random.seed(kv.rank)
    net = mx.gluon.nn.Dense(3, in_units=5)
    net.initialize(mx.init.Xavier())
    trainer = mx.gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=kv)
    x = mx.nd.array(np.random.RandomState(kv.rank).randn(8, 5))
    for step in range(1, 9):
        with mx.autograd.record():
            loss = (net(x) ** 2).mean()
        loss.backward()
        trainer.step(8)
        if step % 4 == 0:
            assert same_everywhere(kv, *(parameter.data() for parameter in net.collect_params().values()))
    assert kv.averages == 4
    assert len(set(everywhere(kv, float(x.sum().asscalar())))) == NODES


@on_nodes
def test_mixed_sync_pushes_a_sites_sum_once_and_all_its_ranks_get_the_same_value(kv: Any) -> None:
    kv = MixedSync()
    kv.set_optimizer(descent())
    kv.init("w", full(0))
    mine = 12.0 if kv.rank < 2 else 4.0  # the gradients of a site are -(4 + 8), or -4
    for step in range(1, 6):
        kv.push("w", full(-4.0 * (kv.rank % 2 + 1)))
        value = pulled(kv, "w")
        assert (value >= step * mine).all()
        assert (value <= step * mine + 5 * (16 - mine)).all()
        digests = everywhere(kv, float(value.astype(np.float64).sum()))
        assert digests[0] == digests[1]
    settled(kv)
    assert (pulled(kv, "w") == 5 * 16).all()
    assert (kv.statistics().get("pushes_of_blocks", 0) > 0) == kv.sites.is_leader
    kv._barrier()


@on_nodes
def test_with_mixed_sync_a_site_may_be_ahead_of_the_other(kv: Any) -> None:
    """The east takes all its steps before the west begins."""
    kv = MixedSync()
    kv.set_optimizer(descent())
    kv.init("w", full(0))
    if kv.rank == 2:
        kv._barrier()
    for step in range(1, 4):
        kv.push("w", full(-1.0))
        assert (pulled(kv, "w") == (6 + step if kv.rank == 2 else 2 * step)).all()
    if kv.rank != 2:
        kv._barrier()
    kv._barrier()


@on_nodes
def test_gluon_trains_with_mixed_sync_and_dcasgd(kv: Any) -> None:
    kv = MixedSync()
    net = mx.gluon.nn.Dense(1, in_units=4, use_bias=False)
    net.initialize(mx.init.Constant(1.0))
    trainer = mx.gluon.Trainer(net.collect_params(), "dcasgd", {"learning_rate": 0.02}, kvstore=kv)
    x = mx.nd.array(np.random.RandomState(kv.rank).randn(16, 4))
    first = float((net(x) ** 2).mean().asscalar())
    for _ in range(40):
        with mx.autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        trainer.step(16 * len(kv.ranks))
    settled(kv)
    weight = mx.nd.zeros((1, 4))
    kv.pull(0, out=weight)
    assert float((mx.nd.dot(x, weight.T) ** 2).mean().asscalar()) < first / 4
    assert same_everywhere(kv, weight)


@on_nodes
def test_mixed_sync_refuses_sparse_values(kv: Any) -> None:
    kv = MixedSync()
    kv.set_optimizer(descent())
    with pytest.raises(UsageError, match="MixedSync takes dense"):
        kv.init("rows", full(0).tostype("row_sparse"))
    kv.init("w", full(0))
    with pytest.raises(UsageError, match="dense gradients"):
        kv.push("w", full(0).tostype("row_sparse"))
