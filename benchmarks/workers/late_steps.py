"""A rank of `studies/datagrams.py`: computes, sums, and begins anew, without a framework.

Arguments: elements of the model, its keys, seconds of computing a step, seconds to train, folder for results.
It writes how long its steps took, after the first fifth of the time, and what came too late.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np

from netstorm.kvstore.operations import Operation
from netstorm.kvstore.options import loss_terms
from netstorm.kvstore.process.runtime import Runtime
from netstorm.observe.log import configure_logging
from netstorm.settings import Settings


def main() -> None:
    """Train, and write what was measured."""
    elements, keys = int(sys.argv[1]), int(sys.argv[2])
    compute_s, seconds, folder = float(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5])
    settings = Settings.from_environment()
    configure_logging(settings)
    runtime = Runtime(settings)
    namespace = runtime.open_namespace()
    made = [runtime.register(namespace, f"layer{number}", (elements,), "float32") for number in range(keys)]
    gradient = np.random.default_rng(runtime.rank).standard_normal(elements).astype(np.float32) ** 2
    gradient[0] = 0.0
    kept = [np.zeros(elements, np.float32) for _ in made]
    sums = [np.zeros(elements, np.float32) for _ in made]
    times: list[float] = []
    began = begun = time.monotonic()
    counted, steps = 0.0, 0
    left = threading.Semaphore(0)
    terms = loss_terms(settings)
    while sums[0][0] == 0:
        time.sleep(compute_s)
        for number, key in enumerate(made):
            kept[number] += gradient
            kept[number][0] = not number and runtime.rank == 0 and time.monotonic() - began > seconds
            source = kept[number] if terms else kept[number].copy()
            if not terms:
                kept[number][:] = 0
            runtime.submit(
                Operation(
                    key=key,
                    round=key.take_round(),
                    source=source,
                    destination=sums[number],
                    done=lambda _: left.release(),
                    priority=-number,
                    loss=terms,
                )
            )
        for _ in made:
            left.acquire()
        now = time.monotonic()
        if begun - began > seconds / 5:
            times.append(now - begun)
        begun, steps = now, steps + 1
        counted += sum(float(one[1:].sum()) for one in sums)
    runtime.barrier()
    late = sum(float(one[1:].sum()) for one in kept) / (float(gradient[1:].sum()) * keys)
    answer = {"times": times, "steps": steps, "sum": counted, "late": late, "counters": runtime.statistics()}
    (folder / f"rank{runtime.rank}.json").write_text(json.dumps(answer))
    runtime.finish()
    runtime.close()


if __name__ == "__main__":
    main()
