"""The same random calls, rank after rank, on MXNet's own `dist_async` and on NetStorm: the same bytes.

Ranks take turns, with barriers between, so that there is one right result. Only what MXNet's servers survive:
row-sparse initial values with all rows, one `out` a pull of rows, no rows under compression.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import run_job
from tests.integration.mxnet.servers import run_with_servers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NODES = 2

SCRIPT = """
import faulthandler, hashlib, os
faulthandler.dump_traceback_later(80, exit=True)
import numpy as np
from netstorm.frontends.mxnet.compat import mx

STORE, COMPRESSED = {store!r}, {compressed}
kv = mx.kv.create(STORE)
together, mine = np.random.RandomState(1), np.random.RandomState(10 + kv.rank)
shapes = {{"a": (5, 3), "b": (40, 70), "c": (60, 2, 2), "d": (9,)}}
sparse = set() if COMPRESSED else {{"b", "c"}}

def drawn(name, chance):
    shape = shapes[name]
    if COMPRESSED:
        return mx.nd.array(chance.randint(-8, 9, shape) / 8)
    if name not in sparse:
        return mx.nd.array(chance.randint(-8, 9, shape))
    numbers = chance.randint(0, shape[0], 1 + chance.randint(9))
    values = chance.randint(-8, 9, (len(numbers), *shape[1:])).astype("float32")
    return mx.nd.sparse.row_sparse_array((values, numbers), shape=shape)

if COMPRESSED:
    kv.set_gradient_compression({{"type": "2bit", "threshold": 0.5}})
# Integers, or multiples of an eighth, and a power of two as rate: updates are exact.
kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
kv._barrier()
for name, shape in shapes.items():
    value = mx.nd.array(together.randint(1, 9, shape))
    kv.init(name, value.tostype("row_sparse") if name in sparse else value)
digest = hashlib.sha256()
for step in range(30):
    name = sorted(shapes)[together.randint(4)]
    if step % kv.num_workers == kv.rank:
        kv.push(name, drawn(name, mine))
    mx.nd.waitall()
    kv._barrier()
    if name in sparse:
        out = mx.nd.sparse.zeros("row_sparse", shapes[name])
        kv.row_sparse_pull(name, out=out, row_ids=mx.nd.array(together.randint(0, shapes[name][0], 12)))
        digest.update(out.indices.asnumpy().tobytes() + out.data.asnumpy().tobytes())
    else:
        out = mx.nd.zeros(shapes[name])
        kv.pull(name, out=out)
        digest.update(out.asnumpy().tobytes())
    mx.nd.waitall()
    kv._barrier()
print(digest.hexdigest(), flush=True)
kv._barrier()
if STORE == "dist_async":
    os._exit(0)  # MXNet's own end hangs at times
"""


@pytest.mark.parametrize("compressed", [False, True], ids=["rows", "compressed"])
def test_ranks_that_take_turns_have_the_results_of_mxnets_servers(
    tmp_path: Path, *, compressed: bool
) -> None:
    scripts = {
        store: SCRIPT.format(store=store, compressed=compressed)
        for store in ("dist_async", "dist_async_netstorm")
    }
    theirs = run_with_servers(
        tmp_path, NODES, scripts["dist_async"], timeout_s=120, MXNET_KVSTORE_BIGARRAY_BOUND=1000
    )
    ours = run_job(tmp_path, NODES, scripts["dist_async_netstorm"], CHUNK_SIZE=100)
    assert [end.code for end in ours] == [0] * NODES, ours
    printed = [text.strip() for text in (*theirs, *(end.out for end in ours))]
    assert len(set(printed)) == 1, printed
    assert len(printed[0]) == 64
