"""NETSTORM_REPRODUCIBLE: a script's bits are the same in each run."""

from __future__ import annotations

from pathlib import Path

from tests.integration.jobs import run_job

NODES = 4

SCRIPT = """
import hashlib, os, time
import numpy as np
import netstorm.frontends.mxnet
from netstorm import errors
from netstorm.frontends.mxnet.compat import mx

kv = mx.kv.create("dist_sync_netstorm")
some = mx.kv.create("dist_sync_netstorm")
some.set_gradient_compression({"type": "topk", "ratio": 0.5})
late = kv.num_workers - 1 - kv.rank if os.environ["BACKWARDS"] == "1" else kv.rank
random = np.random.default_rng(kv.rank)
digest = hashlib.sha256()

def values(*shape):
    # Of many magnitudes, so that the order of additions shows in the sums.
    return mx.nd.array(random.standard_normal(shape) * 10.0 ** random.integers(-4, 4, shape))

for store in (kv, some):
    store.init("w", mx.nd.zeros((300, 200)))
kv.init("rows", mx.nd.zeros((500, 20)).tostype("row_sparse"))
kv.set_optimizer(mx.optimizer.Adam(learning_rate=0.1))
for step in range(3):
    gradients = values(300, 200), values(300, 200), values(500, 20).tostype("row_sparse")
    time.sleep(0.01 * late)
    found = [mx.nd.zeros((300, 200)) for _ in range(2)]
    for store, gradient, out in zip((kv, some), gradients, found):
        store.push("w", gradient)
        store.pull("w", out=out)
    kv.push("rows", gradients[2])
    found.append(mx.nd.zeros((500, 20)).tostype("row_sparse"))
    kv.row_sparse_pull("rows", out=found[2], row_ids=mx.nd.arange(500))
    for array in found:
        digest.update(array.asnumpy().tobytes())
for refused in (
    lambda: mx.kv.create("dist_async_netstorm"),
    lambda: some.set_gradient_compression({"type": "auto"}),
):
    try:
        refused()
    except errors.UsageError as error:
        assert "with NETSTORM_REPRODUCIBLE=1" in str(error), error
    else:
        raise AssertionError("not refused")
print("digest", digest.hexdigest(), flush=True)
"""


def test_two_runs_end_with_the_same_bits_though_other_ranks_are_late(tmp_path: Path) -> None:
    digests: set[str] = set()
    for backwards in (0, 1):
        folder = tmp_path / str(backwards)
        folder.mkdir()
        ended = run_job(folder, NODES, SCRIPT, NETSTORM_REPRODUCIBLE=1, BACKWARDS=backwards)
        assert [one.code for one in ended] == [0] * NODES, [one.text for one in ended]
        digests.update(one.out for one in ended)
    assert len(digests) == 1
