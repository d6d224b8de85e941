#!/usr/bin/env python3
"""How long `push`, `pull` and `pushpull` hold up a training script, and what a busy script does to rounds.

    python benchmarks/blocking.py                                    NetStorm, 3 nodes
    python benchmarks/blocking.py --nodes 2 --alone                  a node that has the machine to itself
    python benchmarks/blocking.py --kv-store dist_sync               MXNet's own, for comparison

A call should only queue its work: what it takes on the wall is given as median, 99th percentile and maximum
over all ranks. With more ranks than cores most of the tail is waiting for a core; `--alone` measures rank 0
as on a machine of its own: the others have the lowest priority, and get what it leaves. Rounds are timed with
the main thread waiting, busy in C and busy in Python, in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from itertools import compress
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.arguments import amount, megabytes, number, seconds, writable
from harness.child import ChildError
from harness.group import Group
from harness.machine import describe_machine
from harness.stopping import stop_on_sigterm
from systems.base import BENCHMARKS, Case, Launch, Process, environment
from systems.mxnet_dist import MXNetDist
from systems.netstorm_store import NetStormStore

STORES = ("dist_sync_netstorm", "dist_sync", "local")
OPERATIONS = ("push", "pull", "pushpull")

# Busy C costs a round what it costs that a core is taken; what busy Python costs beyond it is the lock's.
BESIDE = {
    "nothing": "waits",
    "native": "is busy in C, without the interpreter lock",
    "python": "is busy in Python",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code."""
    options = _options(arguments)
    stop_on_sigterm()
    case = Case(nodes=options.nodes, bytes=options.size, keys=options.keys)
    script = [options.kv_store, options.size, options.keys, options.optimizer]
    command = [sys.executable, str(BENCHMARKS / "workers" / "blocking.py"), *map(str, script)]
    try:
        with Group(
            _launch(options.kv_store, case).running(command),
            start_timeout_s=options.timeout,
            round_timeout_s=options.timeout,
        ) as group:
            found = measure(group, steps=options.steps, rounds=options.rounds, alone=options.alone)
    except ChildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    shown = {name: value for name, value in vars(options).items() if name != "json"}
    found = {"machine": describe_machine(), "options": shown, **found}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    show(found, Console())
    return 0


def measure(group: Group, *, steps: int, rounds: int, alone: bool) -> dict[str, Any]:
    """Return the times of calls and rounds, in seconds: of all ranks, or of rank 0 alone."""
    group.ask({"do": "calls", "operation": "pushpull", "steps": 2})  # warm up
    measured_ranks = [answer["measured"] for answer in group.ask({"do": "give_way"})] if alone else None

    def ask(**command: Any) -> list[dict[str, Any]]:
        answers = group.ask(command)
        return answers if measured_ranks is None else list(compress(answers, measured_ranks))

    calls = {}
    for operation in OPERATIONS:
        answers = ask(do="calls", operation=operation, steps=steps)
        calls[operation] = {
            "wall": percentiles([time for answer in answers for time in answer["wall_s"]]),
            "cpu": percentiles([time for answer in answers for time in answer["cpu_s"]]),
        }
    times: dict[str, list[float]] = {beside: [] for beside in BESIDE}
    laps: dict[str, list[float]] = {beside: [] for beside in BESIDE}
    for _ in range(rounds):
        for beside, measured in times.items():
            answers = ask(do="round", beside=beside)
            first = min(answer["start"] for answer in answers)
            measured.append(max(answer["finish"] for answer in answers) - first)
            laps[beside] += [answer["laps"] / (answer["finish"] - answer["start"]) for answer in answers]
    found = {}
    for beside, measured in times.items():
        found[beside] = {"rounds_s": measured, "median_s": statistics.median(measured)}
        if beside != "nothing":
            answers = ask(do="laps", beside=beside, seconds=1.0)
            undisturbed = statistics.median(answer["laps_per_s"] for answer in answers)
            found[beside]["speed_of_the_script"] = statistics.median(laps[beside]) / undisturbed
    return {"calls": calls, "rounds_beside": found}


def percentiles(times: list[float]) -> dict[str, float]:
    """Return number, median, 99th percentile and maximum of some seconds."""
    ordered = sorted(times)
    return {
        "count": len(ordered),
        "p50_s": ordered[len(ordered) // 2],
        "p99_s": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "max_s": ordered[-1],
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    options = found["options"]
    size = megabytes(options["size"])
    title = f"{options['kv_store']}: {options['nodes']} nodes, {size} in {options['keys']} keys"
    table = Table(title=title + ("; rank 0, before which the others give way" if options["alone"] else ""))
    for heading in ("call", "number", "median", "99 %", "maximum", "CPU 99 %"):
        table.add_column(heading, justify="left" if heading == "call" else "right")
    for operation, measured in found["calls"].items():
        wall, cpu = measured["wall"], measured["cpu"]
        shown = [
            f"{time * 1e6:.0f} us" for time in (wall["p50_s"], wall["p99_s"], wall["max_s"], cpu["p99_s"])
        ]
        table.add_row(operation, str(wall["count"]), *shown)
    console.print(table)
    rounds = found["rounds_beside"]
    for beside, what in BESIDE.items():
        line = f"a round while the script {what}: {rounds[beside]['median_s']:.4f} s"
        if beside != "nothing":
            line += f"; the script runs at {rounds[beside]['speed_of_the_script']:.0%} of its speed alone"
        console.print(line, highlight=False)


def _launch(store: str, case: Case) -> Launch:
    if store == "dist_sync_netstorm":
        return NetStormStore().launch(case)
    if store == "dist_sync":
        return MXNetDist(name="mxnet-1-server", servers=1).launch(case)
    return Launch(workers=[Process(name="local", command=[], environment=environment())])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How long calls on a store hold up a training script.")
    add = parser.add_argument
    add("--kv-store", choices=STORES, default=STORES[0])
    add("--nodes", type=number, default=3, metavar="N", help="default 3; local has one")
    add("--size", type=amount, default=amount("16MB"), metavar="SIZE", help="of all keys; default 16MB")
    add("--keys", type=number, default=32, metavar="N", help="default 32")
    add("--optimizer", choices=("none", "sgd", "adam"), default="sgd", help="in the store; default sgd")
    add("--steps", type=number, default=20, metavar="N", help="steps whose calls are timed; default 20")
    add("--rounds", type=number, default=10, metavar="N", help="rounds of each kind; default 10")
    add("--alone", action="store_true", help="measure rank 0; the others get the cores that it leaves")
    add("--json", type=writable, metavar="FILE", help="write the results")
    add(
        "--timeout",
        type=seconds,
        default=120.0,
        metavar="S",
        help="for a start or measurement; default 120",
    )
    options = parser.parse_args(arguments)
    if options.kv_store == "local":
        options.nodes = 1
    return options


if __name__ == "__main__":
    sys.exit(main())
