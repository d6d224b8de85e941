#!/usr/bin/env python3
"""ESync, which GeoMX lists as to be integrated: each node takes as many steps as let all be ready at once.

netstorm launch -n 4 -- python examples/geomx/esync.py --cpu --slow 4

An epoch is as many averages as a node has batches; a fast node takes several steps for each. With --slow the
last node is slower than the others, so that there is something to see.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from netstorm.frontends.mxnet.local_updates import ESync
from training import mx, parser_of, positive_number, run

_STEP_S = 0.05
"""Of the other nodes with --slow: more than this small network needs."""


def main() -> None:
    """Train as the command line says."""
    parser = parser_of("ESync: as many local steps as let all be ready at once.", learning_rate=0.005)
    parser.add_argument("--slow", type=positive_number, default=1.0, help="how much slower the last node is")
    given = parser.parse_args()
    run(given, ESync, lambda rate: mx.optimizer.Adam(learning_rate=rate), steps=partial(steps, given.slow))


def steps(slow: float, kvstore: Any, averages: int) -> Iterator[None]:
    """Yield until there have been so many more averages."""
    taken, end = 0, kvstore.averages + averages
    step_s = _STEP_S * (slow if kvstore.rank == kvstore.num_workers - 1 else 1) if slow != 1 else 0.0
    while kvstore.averages < end:
        began = time.monotonic()
        yield
        taken += 1
        time.sleep(max(0.0, began + step_s - time.monotonic()))
    print(f"rank {kvstore.rank}: {taken} steps for {averages} averages", flush=True)


if __name__ == "__main__":
    main()
