"""Misuse that a script catches as `mx.MXNetError`, as MXNet's own test of invalid operations does.

The job goes on: after all that was refused, every rank trains and ends well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import run_job

NODES = 3

PROLOGUE = """
import os, sys
import numpy as np
import netstorm.frontends.mxnet
from netstorm import errors
import mxnet as mx

def refused(call, *arguments, error=errors.UsageError, **named):
    try:
        call(*arguments, **named)
    except mx.MXNetError as refusal:
        assert isinstance(refusal, error), refusal
    else:
        raise AssertionError(f"accepted: {call.__name__}{arguments}{named}")

def train(kv, key, steps=3):
    '''Each rank pushes its rank + 1 in each step; the optimizer subtracts it all.'''
    kv.init(key, mx.nd.zeros((4, 2)))
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1, wd=0))
    out = mx.nd.zeros((4, 2))
    for _ in range(steps):
        kv.push(key, mx.nd.full((4, 2), kv.rank + 1))
        kv.pull(key, out=out)
        out.wait_to_read()
    kv._barrier()
    kv.pull(key, out=out)
    assert (out.asnumpy() == -6 * steps).all(), out.asnumpy()
    print("trained", flush=True)

dense, rows, numbers = mx.nd.ones((4, 2)), mx.nd.ones((4, 2)).tostype("row_sparse"), mx.nd.array([0, 1])
"""

KEYS_OF_ANOTHER_TYPE = """
for known, other in ((3, "3"), ("3", 3)):
    kv = mx.kv.create(STORE)
    kv.init(known, dense)
    kv.init(type(known)(7), rows)
    for key in (other, [other], [known, other]):
        several = isinstance(key, list)
        def given(array):
            return [array] * len(key) if several else array
        for array in (dense, rows):
            refused(kv.init, key, given(array))
            refused(kv.push, key, given(array))
            refused(kv.pushpull, key, given(array))
            refused(kv.broadcast, key, given(array), out=given(dense.copy()))
        refused(kv.pull, key, out=given(dense.copy()))
        refused(kv.row_sparse_pull, key, out=given(rows.copy()), row_ids=given(numbers))
    train(kv, type(known)(5))
"""

KEYS_THAT_ARE_NOT_INITIALISED = """
kv = mx.kv.create(STORE)
kv.init("known", dense)
kv.set_optimizer(mx.optimizer.SGD(learning_rate=1, wd=0))
for key in ("unknown", ["known", "unknown"]):
    several = isinstance(key, list)
    out = [dense.copy(), dense.copy()] if several else dense.copy()
    refused(kv.push, key, out)
    refused(kv.pull, key, out=out)
    refused(kv.pushpull, key, out)
    refused(kv.row_sparse_pull, key, out=[rows, rows] if several else rows, row_ids=numbers)
refused(kv.init, "known", dense)
train(kv, "unknown")
"""

ARRAYS_AND_OPTIONS = """
kv = mx.kv.create(STORE)
refused(kv.save_optimizer_states, "states")
refused(kv.load_optimizer_states, "states")
kv.init("known", dense)
if "async" in kv.type:
    refused(kv.push, "known", dense)  # an asynchronous store needs an optimizer first
refused(kv.set_optimizer, "sgd")
refused(kv._set_updater, "sgd")
refused(kv.set_gradient_compression, {"type": "3bit"})
refused(kv.is_capable, "telepathy")
refused(kv._send_command_to_servers, 0, "")
refused(kv.get_num_dead_node, 9)
refused(kv.init, 1.5, dense)
refused(kv.init, "flags", mx.nd.zeros((3,), dtype="bool"))
refused(kv.init, "compressed", dense.tostype("csr"))
refused(kv.pull, "known")
refused(kv.pull, "known", out=mx.nd.zeros((3, 3)), error=errors.KeyMismatch)
kv.set_optimizer(mx.optimizer.SGD(learning_rate=1, wd=0))
refused(kv.push, "known", mx.nd.zeros((3, 3)), error=errors.KeyMismatch)
refused(kv.push, "known", np.ones((4, 2)))
refused(kv.row_sparse_pull, "known", out=rows, row_ids=numbers)
kv.init("rows", rows)
wrong = rows.copy()
kv.row_sparse_pull("rows", out=wrong, row_ids=mx.nd.array([9]))
refused(wrong.wait_to_read)
train(kv, "later")
"""

ON_ONE_RANK_ALONE = """
kv = mx.kv.create(STORE)
if kv.rank == 1:
    for _ in range(50):
        refused(kv.pull, "unknown", out=dense)
        refused(kv.init, 1.5, dense)
train(kv, "k")
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("in_step", [False, True])
def test_a_job_whose_scripts_catch_what_was_refused_trains_on_and_ends_well(
    tmp_path: Path, *, in_step: bool
) -> None:
    parts = (KEYS_OF_ANOTHER_TYPE, KEYS_THAT_ARE_NOT_INITIALISED, ARRAYS_AND_OPTIONS, ON_ONE_RANK_ALONE)
    stores = ["dist_async_netstorm"] if in_step else ["dist_sync_netstorm", "dist_async_netstorm"]
    script = PROLOGUE + "\n".join(f"STORE = {store!r}\n" + "\n".join(parts) for store in stores)
    staleness = 0 if in_step else -1
    settings: dict[str, Any] = {"CHUNK_SIZE": 3, "NETSTORM_LOG": "error", "NETSTORM_STALENESS": staleness}
    ended = run_job(tmp_path, NODES, script, **settings)
    for end in ended:
        assert (end.code, end.err) == (0, "")
        assert end.out == "trained\n" * 5 * len(stores)


def test_a_setting_that_is_refused_when_a_store_is_created_is_mxnets_error_too(tmp_path: Path) -> None:
    script = (
        PROLOGUE
        + """
os.environ["CHUNK_SIZE"] = "many"
for store in ("dist_sync_netstorm", "dist_async_netstorm"):
    refused(mx.kv.create, store, error=errors.SettingsError)
print("refused")
"""
    )
    [end] = run_job(tmp_path, 1, script)
    assert (end.code, end.out) == (0, "refused\n"), end.err


def test_another_ranks_failure_is_mxnets_error_in_a_call_and_in_an_array(tmp_path: Path) -> None:
    script = (
        PROLOGUE
        + """
kv = mx.kv.create("dist_sync_netstorm")
kv.init("k", dense)
out = mx.nd.zeros((4, 2))
kv.pushpull("k", dense, out=out)
out.wait_to_read()
kv._barrier()  # both have the result: a failure in between would be raised by the first read
if kv.rank == 0:
    raise ValueError("my own")
def read():
    kv.pushpull("k", dense, out=out)
    out.wait_to_read()
refused(read, error=errors.NodeFailed)
refused(kv.pull, "k", out=out, error=errors.NodeFailed)
refused(kv._barrier, error=errors.NodeFailed)
print("raised three times")
"""
    )
    failed, *others = run_job(tmp_path, 2, script, NETSTORM_LOG="error")
    assert failed.code == 1
    for end in others:
        assert end.out == "raised three times\n", end.err
        assert end.code == 1
