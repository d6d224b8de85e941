"""A dense and a row-sparse push to one key in the same step: an error that names both ranks, at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import run_job

SCRIPT = """
import netstorm.frontends.mxnet
import mxnet as mx
kv = mx.kv.create("dist_sync_netstorm")
{before}
kv.init("k", mx.nd.ones((50, 4)))
gradient, out = mx.nd.ones((50, 4)), mx.nd.zeros((50, 4))
for step in range(2):
    kv.push("k", gradient)
    kv.pull("k", out=out)
out.wait_to_read()
kv.push("k", gradient if kv.rank == 0 else gradient.tostype("row_sparse"))
kv.pull("k", out=out)
out.wait_to_read()
"""


@pytest.mark.parametrize("before", ["", "kv.set_optimizer(mx.optimizer.SGD())"])
def test_a_dense_and_a_row_sparse_push_in_one_step_are_an_error_that_names_both_ranks(
    tmp_path: Path, before: str
) -> None:
    ended = run_job(tmp_path, 2, SCRIPT.format(before=before), CHUNK_SIZE=30, NETSTORM_WAIT_TIMEOUT=1000)
    for end in ended:
        assert end.code != 0
        assert "round 3 of key 'k'" in end.err
        assert "of row_sparse arrays" in end.err
        assert "rank 0" in end.err
        assert "rank 1" in end.err
