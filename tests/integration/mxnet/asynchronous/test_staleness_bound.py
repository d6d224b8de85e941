"""Bounded staleness with real MXNet, and what happens to an asynchronous job when a rank fails."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.jobs import Job, run_job
from tests.integration.mxnet.reference.test_training import TRAIN

NODES = 3


@pytest.mark.slow
def test_with_a_staleness_of_0_all_weights_have_the_synchronous_stores_bits(tmp_path: Path) -> None:
    stores = ("dist_sync_netstorm", "dist_async_netstorm")
    parts = [TRAIN.format(store=store, module=module) for module in (False, True) for store in stores]
    ended = run_job(tmp_path, NODES, "\n".join(parts), NETSTORM_STALENESS=0)
    assert [end.code for end in ended] == [0] * NODES, ended
    assert len({end.out for end in ended}) == 1
    gluon, gluon_in_step, module, module_in_step = ended[0].out.splitlines()
    assert (gluon, module) == (gluon_in_step, module_in_step)


IN_STEP = """
import random, time
from netstorm.frontends.mxnet.compat import mx
STEPS, BASE = 12, 32
for counted in (False, True):  # by the script, which pushes twice in each step
    kv = mx.kv.create("dist_async_netstorm")
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    kv.init("k", mx.nd.zeros((3,), dtype="float64"))
    if counted:
        kv.clock()  # or a key's second push would have begun another clock by itself
    chance, out, largest = random.Random(kv.rank), mx.nd.zeros((3,), dtype="float64"), 0
    for step in range(1, STEPS + 1):
        for _ in range(2 if counted else 1):
            kv.push("k", mx.nd.full((3,), -float(BASE**kv.rank), dtype="float64"))
        if counted:
            kv.clock()
        kv.pull("k", out=out)
        left, counts = int(out.asnumpy()[0]), []
        for _ in range(kv.num_workers):
            left, count = divmod(left, BASE)
            counts.append(count)
        assert counts[kv.rank] == step * (2 if counted else 1), (step, counts)
        largest = max(largest, step - min(counts) // (2 if counted else 1))
        if kv.rank == 0:
            time.sleep(chance.random() * 0.02)
    print(largest, flush=True)

# A rank whose script has ended serves as owner, and nobody waits for its clock.
kv = mx.kv.create("dist_async_netstorm")
kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
kv.init("k", mx.nd.zeros((100_000,)))
out = mx.nd.zeros((100_000,))
for step in range(2 + 10 * kv.rank):
    kv.pushpull("k", -mx.nd.ones((100_000,)), out=out)
    out.wait_to_read()
print(int(out.asnumpy().max()))
"""


@pytest.mark.slow
def test_no_rank_is_further_ahead_than_it_may_be_and_one_that_has_ended_holds_nobody_back(
    tmp_path: Path,
) -> None:
    ended = run_job(tmp_path, NODES, IN_STEP, NETSTORM_STALENESS=2)
    assert [(end.code, end.error_lines) for end in ended] == [(0, [])] * NODES, ended
    for end in ended:
        assert all(0 <= int(largest) <= 2 for largest in end.out.splitlines()[:2]), end
    assert 22 <= int(ended[2].out.splitlines()[2]) <= 2 + 12 + 22


TRAINS_ON = """
from netstorm.frontends.mxnet.compat import mx
kv = mx.kv.create("dist_async_netstorm")
kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
kv.init("k", mx.nd.zeros((100_000,)))
out = mx.nd.zeros((100_000,))
try:
    for step in range(100_000):
        kv.pushpull("k", mx.nd.ones((100_000,)), out=out)
        out.wait_to_read()
        if step == 2:
            print("training", flush=True)
except Exception as error:
    print(type(error).__name__, error, flush=True)
    raise
"""


def test_a_lost_owner_is_an_error_that_names_it(tmp_path: Path) -> None:
    with Job(tmp_path, NODES, PS_HEARTBEAT_INTERVAL="200ms", PS_HEARTBEAT_TIMEOUT="2s") as job:
        for rank in range(NODES):
            job.start(rank, TRAINS_ON)
        for rank in range(NODES):
            job.wait_until_said(rank, "training")
        job.send(1, signal.SIGKILL)
        for rank in (0, 2):
            end = job.end(rank)
            assert end.code == 1
            assert "NodeLost" in end.out
            assert "rank 1" in end.out


DIFFERS = """
from netstorm.frontends.mxnet.compat import mx
kv = mx.kv.create("dist_async_netstorm")
kv.set_optimizer(mx.optimizer.SGD(momentum=0.5 if kv.rank == 2 else 0.25))
kv.init("k", mx.nd.zeros((100_000,)))
out = mx.nd.zeros((100_000,))
kv.pushpull("k", mx.nd.ones((100_000,)), out=out)
out.wait_to_read()
kv._barrier()
"""


@pytest.mark.slow
def test_different_optimizers_are_an_error_that_names_both_ranks(tmp_path: Path) -> None:
    ended = run_job(tmp_path, NODES, DIFFERS)
    assert all(end.code != 0 for end in ended), ended
    assert any("every rank must use the same optimizer" in end.text for end in ended), ended


RULE_FAILS = """
from netstorm.frontends.mxnet.compat import mx
kv = mx.kv.create("dist_async_netstorm")

def updater(key, gradient, stored):
    raise RuntimeError("no such rule")

kv._set_updater(updater)
kv.init("k", mx.nd.zeros((4,)))
kv.push("k", mx.nd.ones((4,)))
out = mx.nd.zeros((4,))
kv.pull("k", out=out)
out.asnumpy()
"""


@pytest.mark.slow
def test_an_update_rule_that_fails_ends_the_job_with_its_reason(tmp_path: Path) -> None:
    ended = run_job(tmp_path, 2, RULE_FAILS)
    assert all(end.code != 0 for end in ended), ended
    assert all("RuntimeError: no such rule" in end.text for end in ended), ended
