#!/usr/bin/env python3
"""One node is slower than the others: synchronous training, LocalSGD and ESync side by side, on digits.

    python benchmarks/studies/local_steps.py --json local_steps.json    4 nodes, one of them 4 times slower

Real processes on loopback. A step takes as long as is said, so that the result does not depend on the
machine: what a small net needs is filled up. All systems train for about as long, and take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import factor, number, seconds, writable
from harness.child import ChildError
from harness.group import Group
from harness.stopping import stop_on_sigterm
from systems.base import BENCHMARKS, Case
from systems.netstorm_store import NetStormStore

SYSTEMS = ("dist_sync", "local_sgd:4", "esync:1", "esync:4")
"""Each with its number: steps between averages; of ESync, those of the slowest."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code."""
    options = _options(arguments)
    stop_on_sigterm()
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in options.systems}
    try:
        with Group(
            NetStormStore()
            .launch(Case(nodes=options.nodes, bytes=4))
            .running([sys.executable, str(BENCHMARKS / "workers" / "local_steps.py")]),
            start_timeout_s=options.timeout,
            round_timeout_s=options.timeout,
        ) as group:
            for seed in range(options.seeds):
                for system in options.systems:
                    runs[system].append(_run(group, system, seed, options))
    except ChildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    rows = [_row(system, found, options) for system, found in runs.items()]
    base = rows[0]
    print(
        f"{options.nodes} nodes, steps of {1000 * options.step:g} ms, rank {options.nodes - 1} "
        f"{options.slow:g} x slower; {options.seeds} runs of {options.seconds:g} s, medians"
    )
    print(f"{'':12} samples/s  of sync  to {100 * options.target:g} %  of sync  accuracy  steps by rank")
    for row in rows:
        print(_line(row, base))
    if options.json is not None:
        options.json.write_text(json.dumps({"options": _plain(options), "rows": rows}, indent=1) + "\n")
    return 0


def _run(group: Group, system: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    each = int(system.partition(":")[2] or 1)
    exchanges = max(1, round(options.seconds / (options.step * options.slow * each)))
    answers = group.ask(
        {
            "do": "train",
            "system": system,
            "seed": seed,
            "exchanges": exchanges,
            "step_s": options.step,
            "slow": options.slow,
            "slow_rank": options.nodes - 1,
            "batch_size": options.batch_size,
            "learning_rate": options.learning_rate,
        }
    )
    took = max(answer["seconds"] for answer in answers)
    steps = [answer["steps"] for answer in answers]
    snapshots = answers[0]["snapshots"]
    return {
        "seconds": took,
        "steps": steps,
        "exchanges": exchanges,
        "samples_per_s": sum(steps) * options.batch_size / took,
        "accuracy": snapshots[-1][2],
        "to_target_s": next((at for at, _, right in snapshots if right >= options.target), None),
        "curve": [(round(at, 3), right) for at, _, right in snapshots],
    }


def _row(system: str, runs: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    reached = [run["to_target_s"] for run in runs if run["to_target_s"] is not None]
    return {
        "system": system,
        "samples_per_s": statistics.median(run["samples_per_s"] for run in runs),
        "accuracy": statistics.median(run["accuracy"] for run in runs),
        "to_target_s": statistics.median(reached) if len(reached) == len(runs) else None,
        "target": options.target,
        "runs": runs,
    }


def _line(row: dict[str, Any], base: dict[str, Any]) -> str:
    gain = row["samples_per_s"] / base["samples_per_s"]
    time, sync = row["to_target_s"], base["to_target_s"]
    reached = "never" if time is None else f"{time:5.2f} s"
    part = "" if time is None or sync is None else f"{time / sync:.2f}"
    steps = " ".join(map(str, row["runs"][-1]["steps"]))
    return (
        f"{row['system']:12} {row['samples_per_s']:9.0f}  {gain:7.2f}  {reached:>7}  {part:>7}  "
        f"{100 * row['accuracy']:7.2f}%  {steps}"
    )


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name != "json"}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training with one slow node, by way of averaging.")
    add = parser.add_argument
    add("--nodes", type=number, default=4, metavar="N", help="default 4")
    add(
        "--slow",
        type=factor,
        default=4.0,
        metavar="X",
        help="how much slower the last node is; default 4",
    )
    add("--step", type=seconds, default=0.05, metavar="S", help="of a step of the others; default 0.05")
    add("--seconds", type=seconds, default=10.0, metavar="S", help="of each run, about; default 10")
    add("--seeds", type=number, default=3, metavar="N", help="runs of each system; default 3")
    add("--batch-size", type=number, default=32, metavar="N", help="of each node; default 32")
    add("--learning-rate", type=factor, default=0.1, metavar="X", help="default 0.1")
    add("--target", type=factor, default=0.95, metavar="X", help="accuracy whose time is told; default 0.95")
    add("--systems", nargs="+", default=list(SYSTEMS), metavar="NAME", help=f"default {' '.join(SYSTEMS)}")
    add("--timeout", type=seconds, default=120.0, metavar="S", help="for a start or a run; default 120")
    add("--json", type=writable, metavar="FILE", help="write what was found there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
