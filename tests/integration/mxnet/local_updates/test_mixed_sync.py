"""MixedSync on three real nodes at two sites: in step within a site, and no site waits for the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.local_updates import MixedSync
from tests.integration.mxnet.on_nodes import everywhere, on_nodes, same_everywhere

VARIABLES = {rank: {"NETSTORM_SITE": site} for rank, site in enumerate(("east", "east", "west"))}

SHAPE = (40, 301)
"""More than one block."""


def full(value: float) -> Any:
    return mx.nd.full(SHAPE, value)


def pulled(kv: Any, key: Any) -> Any:
    out = mx.nd.zeros(SHAPE)
    kv.pull(key, out=out)
    return out.asnumpy()


def descent() -> Any:
    return mx.optimizer.SGD(learning_rate=1.0)


@on_nodes
def test_a_site_pushes_the_sum_of_its_gradients_once_and_all_its_ranks_get_the_same_value(kv: Any) -> None:
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
    mx.nd.waitall()
    kv._barrier()
    assert (pulled(kv, "w") == 5 * 16).all()
    assert (kv.statistics().get("pushes_of_blocks", 0) > 0) == kv.sites.is_leader
    kv._barrier()


@on_nodes
def test_a_site_may_be_ahead_of_the_other(kv: Any) -> None:
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
def test_gluon_trains_with_it_and_dcasgd(kv: Any) -> None:
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
    mx.nd.waitall()
    kv._barrier()
    weight = mx.nd.zeros((1, 4))
    kv.pull(0, out=weight)
    assert float((mx.nd.dot(x, weight.T) ** 2).mean().asscalar()) < first / 4
    assert same_everywhere(kv, weight)


@on_nodes
def test_sparse_and_whole_values_are_refused(kv: Any) -> None:
    kv = MixedSync()
    kv.set_optimizer(descent())
    with pytest.raises(UsageError, match="MixedSync takes dense"):
        kv.init("rows", full(0).tostype("row_sparse"))
    kv.init("w", full(0))
    with pytest.raises(UsageError, match="dense gradients"):
        kv.push("w", full(0).tostype("row_sparse"))
