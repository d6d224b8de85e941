"""One worker process of `compression.py`. Its command: round (push and pull; time and bytes)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import netstorm.frontends.mxnet  # noqa: F401 - registers dist_sync_netstorm
from harness.serving import Answer, serve
from netstorm.frontends.mxnet.compat import mx

_THRESHOLD = 0.5


def join() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Join the job with two stores, of which one compresses."""
    shape = (max(1, int(sys.argv[1]) // 4),)
    stores = {key: mx.kv.create("dist_sync_netstorm") for key in ("plain", "2bit")}
    stores["2bit"].set_gradient_compression({"type": "2bit", "threshold": _THRESHOLD})
    out = mx.nd.zeros(shape)
    gradient = mx.nd.random.normal(shape=shape)
    for store in stores.values():
        store.init("gradient", out)
    mx.nd.waitall()

    def do(command: Answer) -> Answer:
        store = stores[command["key"]]
        before = store.statistics()["bytes_sent"]
        start = time.monotonic()
        store.push("gradient", gradient)
        store.pull("gradient", out=out)
        out.wait_to_read()
        finish = time.monotonic()
        store._barrier()  # noqa: SLF001 - MXNet has no other: what is forwarded for others counts, too
        return {"start": start, "finish": finish, "bytes": store.statistics()["bytes_sent"] - before}

    return {"rank": stores["plain"].rank}, do


if __name__ == "__main__":
    serve(join)
