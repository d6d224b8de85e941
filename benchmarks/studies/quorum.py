#!/usr/bin/env python3
"""One rank is slower than the others: what it costs them in DiLoCo, whose sums wait for all or for a quorum.

    netstorm launch -n 4 -- python benchmarks/studies/quorum.py --json quorum.json

The last rank is the slow one. A step takes as long as is said, so that the result does not depend on the
machine. Trainings take turns; times are rank 0's, of as many steps as the others count, too. Ratios are to
the training of the same turn in which all ranks are alike and sums wait for all. "Waited" is what steps took
beside the time that is said: beginning sums, waiting for them, applying them. With NETSTORM_ELASTIC=2:4 the
job is an elastic one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import nn

from harness.arguments import factor, number, seconds, writable
from netstorm.frontends.torch import elastic
from netstorm.frontends.torch.local_updates import DiLoCo

EQUAL: Final = "all ranks alike"
EQUAL_QUORUM: Final = "all ranks alike, quorum"
WAITING: Final = "one slow, sums wait for all"
QUORUM: Final = "one slow, quorum"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, as one rank, and return the exit code."""
    options = _options(arguments)
    elastic.init_process_group()
    runs: dict[str, list[dict[str, Any]]] = {EQUAL: [], QUORUM: [], EQUAL_QUORUM: [], WAITING: []}
    if options.without_waiting:
        del runs[WAITING]
    for _ in range(options.turns):
        for name, found in runs.items():
            found.append(_train(name, options))
    if dist.get_rank() == 0:
        print(f"{'':28} seconds  of all alike  waited  longest wait  the slow rank's steps")
        rows = []
        for name, found in runs.items():
            ratios = [
                run["seconds"] / alike["seconds"] for run, alike in zip(found, runs[EQUAL], strict=True)
            ]
            row = {"training": name, "ratio": statistics.median(ratios), "ratios": ratios, "runs": found}
            median = {key: statistics.median(run[key] for run in found) for key in found[0]}
            print(
                f"{name:28} {median['seconds']:7.2f}  {row['ratio']:12.3f}  {median['waited_s']:6.2f}"
                f"  {median['longest_wait_s']:12.3f}  {median['slow_steps']:.0f} of {options.steps}"
            )
            rows.append(row)
        if options.json is not None:
            settings = {key: value for key, value in vars(options).items() if key != "json"}
            ranks = dist.get_world_size()
            options.json.write_text(
                json.dumps({"ranks": ranks, **settings, "results": rows}, indent=2) + "\n"
            )
    dist.destroy_process_group()
    return 0


def _train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train once; return the seconds that it took here, those of them that steps took beside the time that is
    said, in sum and the longest, and the steps that the slow rank has taken.
    """
    rank, ranks = dist.get_rank(), len(elastic.live_ranks())
    is_slow = rank == ranks - 1
    step_s = options.step * (options.slow if is_slow and name in (WAITING, QUORUM) else 1.0)
    model = nn.Linear(options.width, options.width)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    settings = {"quorum": ranks - 1, "grace": options.grace} if name in (QUORUM, EQUAL_QUORUM) else {}
    diloco = DiLoCo([model], inner, outer, options.sync_every, fragment_sync_delay=options.delay, **settings)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    taken = torch.zeros(1)
    waits: list[float] = []
    with diloco:
        dist.barrier()
        begin = time.perf_counter()
        while diloco.steps < options.steps:
            time.sleep(step_s)
            computed = time.perf_counter()
            inner.step()
            waits.append(time.perf_counter() - computed)
            taken += 1
        took = time.perf_counter() - begin
    if not is_slow:
        taken.zero_()
    dist.all_reduce(taken)
    return {
        "seconds": took,
        "waited_s": sum(waits),
        "longest_wait_s": max(waits),
        "slow_steps": int(taken.item()),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DiLoCo with one slow rank, with a quorum and without.")
    add = parser.add_argument
    add("--steps", type=number, default=320, metavar="N", help="of each training; default 320")
    add("--step", type=seconds, default=0.05, metavar="S", help="that a step takes; default 0.05")
    add("--slow", type=factor, default=4.0, metavar="X", help="so much longer at the last rank; default 4")
    add("--sync-every", type=number, default=20, metavar="N", help="default 20")
    add("--delay", type=number, default=10, metavar="N", help="steps that a sum may take; default 10")
    add("--grace", type=seconds, default=0.2, metavar="S", help="default 0.2")
    add("--width", type=number, default=1000, metavar="N", help="of the one layer; default 1000: 4 MB")
    add("--turns", type=number, default=3, metavar="N", help="default 3")
    add("--without-waiting", action="store_true", help="leave out what takes four times as long")
    add("--json", type=writable, metavar="FILE", help="write the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
