"""One rank of `compression.py`: a store for each codec; a round pushes and pulls all keys of one of them."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import netstorm.frontends.mxnet  # noqa: F401 - registers dist_sync_netstorm
from harness.serving import Answer, serve
from netstorm.frontends.mxnet.compat import mx


def join() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Join the job with a store for each codec of the command line."""
    elements, keys = int(sys.argv[1]) // 4 // int(sys.argv[2]), int(sys.argv[2])
    columns = math.isqrt(elements)  # PowerSGD is for matrices
    shape = (elements // columns, columns)
    stores: dict[str, Any] = {}
    zeros = mx.nd.zeros(shape)
    for name, described in json.loads(sys.argv[3]).items():
        stores[name] = store = mx.kv.create("dist_sync_netstorm")
        if described is not None:
            store.set_gradient_compression(described)
        for key in range(keys):
            store.init(key, zeros)
    rank = next(iter(stores.values())).rank
    random = np.random.default_rng(rank)  # alike at no two ranks: the worst case for sparse sums
    gradients = [mx.nd.array(random.standard_normal(shape, np.float32)) for _ in range(keys)]
    outs = [zeros.copy() for _ in range(keys)]
    mx.nd.waitall()

    def do(command: Answer) -> Answer:
        store = stores[command["codec"]]
        store._barrier()  # noqa: SLF001 - MXNet has no other
        before, used = store.statistics()["bytes_sent"], time.process_time()
        start = time.monotonic()
        for key, gradient in enumerate(gradients):
            store.push(key, gradient, priority=-key)
        for key, out in enumerate(outs):
            store.pull(key, out=out, priority=-key)
        for out in outs:
            out.wait_to_read()
        finish = time.monotonic()
        store._barrier()  # noqa: SLF001 - what is forwarded for others counts, too
        return {
            "start": start,
            "finish": finish,
            "bytes": store.statistics()["bytes_sent"] - before,
            "cpu_s": time.process_time() - used,
        }

    return {"rank": rank, "bytes": 4 * keys * shape[0] * shape[1]}, do


if __name__ == "__main__":
    serve(join)
