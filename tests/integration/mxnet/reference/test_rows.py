"""The same random row-sparse calls on MXNet's own `dist_sync` and on NetStorm: the same bytes.

Only what MXNet's servers survive: initial values with all rows, an optimiser, one `out` a pull.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import run_job
from tests.integration.mxnet.reference.servers import run_with_servers

NODES = 3

SCRIPT = """
import faulthandler, hashlib
faulthandler.dump_traceback_later(80, exit=True)
import numpy as np
from netstorm.frontends.mxnet.compat import mx

STORE = {store!r}
kv = mx.kv.create(STORE)
together, mine = np.random.RandomState(1), np.random.RandomState(10 + kv.rank)
shapes = {{"a": (5, 3), "b": (400, 7), "c": (60, 2, 2)}}

def rows(shape, chance):
    count = mine.randint(0, min(9, shape[0]))
    if count == 0:
        return mx.nd.sparse.zeros("row_sparse", shape)
    numbers = mine.randint(0, shape[0], count)  # out of order, and repeated
    values = mine.randint(-8, 9, (count, *shape[1:])).astype("float32")
    return mx.nd.sparse.row_sparse_array((values, numbers), shape=shape)

# Integers, and a power of two as rate: sums and updates are exact in whatever order.
kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
kv._barrier()
for name, shape in shapes.items():
    kv.init(name, mx.nd.array(together.randint(1, 9, shape)).tostype("row_sparse"))
digest = hashlib.sha256()
for step in range(40):
    name = sorted(shapes)[together.randint(3)]
    shape, lists = shapes[name], together.rand() < 0.3
    kv.push(name, [rows(shape, mine) for _ in range(2)] if lists else rows(shape, mine))
    if together.rand() < 0.5:
        out = mx.nd.sparse.zeros("row_sparse", shape)
        kv.row_sparse_pull(name, out=out, row_ids=mx.nd.array(together.randint(0, shape[0], 12)))
        digest.update(out.indices.asnumpy().tobytes())
        digest.update(out.data.asnumpy().tobytes())
for name, shape in shapes.items():
    out = mx.nd.sparse.zeros("row_sparse", shape)
    kv.row_sparse_pull(name, out=out, row_ids=mx.nd.arange(shape[0]))
    digest.update(out.asnumpy().tobytes())
print(digest.hexdigest(), flush=True)
kv._barrier()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_rows_have_the_results_of_mxnets_servers(tmp_path: Path) -> None:
    theirs = run_with_servers(tmp_path, NODES, SCRIPT.format(store="dist_sync"), timeout_s=120)
    ours = run_job(tmp_path, NODES, SCRIPT.format(store="dist_sync_netstorm"), CHUNK_SIZE=100)
    assert [end.code for end in ours] == [0] * NODES, ours
    printed = [text.strip() for text in (*theirs, *(end.out for end in ours))]
    assert len(set(printed)) == 1, printed
    assert len(printed[0]) == 64
