"""MixedSync on three real nodes at two sites: in step within a site, and no site waits for the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.local_updates import MixedSync
from tests.integration.jobs import Job
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


BOUNDED = """
import os, time
import numpy as np
from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.local_updates import MixedSync

kv, STEPS, BOUND = MixedSync(), 6, int(os.environ["NETSTORM_STALENESS"])
kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
kv.init("steps", mx.nd.zeros((2, 1000)))  # of both sites; each rank counts for half a step
kv.init("never pushed", mx.nd.zeros((10,)))
mine = kv.rank % 2
gradient, out = np.zeros((2, 1000), "float32"), mx.nd.zeros((2, 1000))
gradient[mine] = -0.5
for step in range(1, STEPS + 1):
    if mine == 1:
        time.sleep(0.1)
    kv.push("steps", mx.nd.array(gradient))
    if step == 1:
        try:
            kv.push("steps", mx.nd.array(gradient))
        except UsageError as error:
            assert "call clock() after each step" in str(error), error
        else:
            raise AssertionError("not refused")
    kv.clock()
    kv.pull("steps", out=out)
    found = out.asnumpy()
    assert (found[mine] == step).all(), (step, found)
    assert (found[1 - mine] >= step - BOUND).all(), (step, found)
    print("ahead by", step - int(found[1 - mine].min()), flush=True)
"""


@pytest.mark.slow
def test_a_site_is_ahead_of_the_slowest_by_no_more_than_the_bound(tmp_path: Path) -> None:
    with Job(tmp_path, 4, NETSTORM_STALENESS=2) as job:
        for rank in range(4):
            job.start(rank, BOUNDED, NETSTORM_SITE="ab"[rank % 2])
        ended = job.end_all()
    assert [one.code for one in ended] == [0] * 4, [one.text for one in ended]
    assert "ahead by 2" in ended[0].out


@pytest.mark.slow
def test_a_bound_of_0_is_refused(tmp_path: Path) -> None:
    script = "from netstorm.frontends.mxnet.local_updates import MixedSync\nMixedSync()\n"
    with Job(tmp_path, 1, NETSTORM_STALENESS=0) as job:
        job.start(0, script)
        refused = job.end(0)
    assert refused.code == 1
    assert "NETSTORM_STALENESS=0, which keeps all ranks in step" in refused.err
