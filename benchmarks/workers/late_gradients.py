"""A rank of `studies/bounded_loss.py` on an emulated network: computes, pushes and pulls, step after step.

Arguments: bytes of the model, its tensors, seconds of computing a step, seconds to train, folder for results.
It writes how long its steps took, after the first tenth of the time, and what came too late.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import netstorm.frontends.mxnet  # noqa: F401 - registers the store's type
from netstorm.frontends.mxnet.compat import mx


def main() -> None:
    """Train, and write what was measured."""
    size, keys = int(sys.argv[1]), int(sys.argv[2])
    compute_s, seconds, folder = float(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5])
    store = mx.kv.create("dist_sync_netstorm")
    elements = size // 4 // keys
    names = list(range(keys))
    store.init(names, [mx.nd.zeros((elements,)) for _ in names])
    gradients = [mx.nd.array(np.tile((1.0, 0.1), elements // 2 + 1)[:elements]) for _ in names]
    mean = float(gradients[0].asnumpy().mean())
    sums = [mx.nd.zeros((elements,)) for _ in names]
    times: list[float] = []
    began = begun = time.monotonic()
    total, steps = 0.0, 0
    running = True
    while running:
        time.sleep(compute_s)
        for name in names:
            store.push(name, gradients[name], priority=-name)
            store.pull(name, sums[name], priority=-name)
        mx.nd.waitall()
        now = time.monotonic()
        if begun - began > seconds / 10:
            times.append(now - begun)
        total += float(np.mean([one.asnumpy().mean() for one in sums])) / mean
        begun, steps = now, steps + 1
        # The rank whose clock counts says when it is over: all make the same number of steps.
        running = _agree(store, steps, folder, more=now - began < seconds)
    counters = store.statistics()
    answer = {"times": times, "steps": steps, "sum": total, "counters": counters}
    (folder / f"rank{store.rank}.json").write_text(json.dumps(answer))


def _agree(store: mx.kv.KVStore, steps: int, folder: Path, *, more: bool) -> bool:
    """Return whether there is another step: rank 0 decides, ahead of the others."""
    last = folder / "last_step"
    if store.rank == 0 and not more and not last.exists():
        (folder / "last_step.new").write_text(str(steps + 4))
        (folder / "last_step.new").rename(last)
    return not last.exists() or steps < int(last.read_text())


if __name__ == "__main__":
    main()
