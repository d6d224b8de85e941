#!/usr/bin/env python3
"""PyTorch on this machine's loopback: what a DDP step and a collective cost, NetStorm beside Gloo.

    python benchmarks/torch_loopback.py --json torch-loopback.json
    python benchmarks/torch_loopback.py --nodes 2 --size 4MB --rounds 3

The processes of both stay alive and take turns, so that a machine that is busy for a while is busy for both.
In a turn each takes a DDP step, does all-reduces of 4 KB one after the other, copies a large tensor in
several ways, and starts asynchronous all-reduces, large and small. Every sum of a step is checked, and every
copy. Medians are over all ranks and turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.arguments import amount, megabytes, number, seconds, writable
from harness.child import ChildError
from harness.group import Group
from harness.machine import describe_machine
from harness.stopping import stop_on_sigterm
from systems.base import BENCHMARKS, Case
from systems.registry import SYSTEMS
from systems.torch_ddp import TORCH_GLOO, TORCH_NETSTORM

_SMALL = 4096
_LARGE_COUNT, _SMALL_COUNT = 3, 20
"""Calls of a turn: ten turns make 200 small all-reduces."""
_WARMUP = 2
_COPIES = ("broadcast", "gather", "scatter", "send")

_FIGURES = {
    "step_s": "a DDP step of {size}",
    "step_cpu_s": "processor time of such a step, all ranks",
    "small_s": "an all-reduce of 4 KB",
    "broadcast_s": "a broadcast of {size}",
    "gather_s": "a gather of {size} in all",
    "scatter_s": "a scatter of {size} in all",
    "send_s": "a send of {size} to one rank",
    "copies_cpu_s": "processor time of these four, all ranks",
    "issue_large_s": "start of an asynchronous all-reduce of {size}",
    "issue_small_s": "start of an asynchronous all-reduce of 4 KB",
    "issue_large_cpu_s": "processor time of such a start, {size}",
    "issue_small_cpu_s": "processor time of such a start, 4 KB",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code: 1 if a system failed, 130 after Ctrl-C."""
    options = _options(arguments)
    stop_on_sigterm()
    case = Case(nodes=options.nodes, bytes=options.size)
    measured: dict[str, dict[str, list[float]]] = {
        name: {figure: [] for figure in _FIGURES} for name in (TORCH_NETSTORM, TORCH_GLOO)
    }
    code = 0
    try:
        with ExitStack() as groups:
            started = {name: groups.enter_context(_group(name, case, options.timeout)) for name in measured}
            for turn in range(_WARMUP + options.rounds):
                order = list(started) if turn % 2 else list(reversed(started))
                for name in order:
                    found = measure(started[name], case.bytes, turn)
                    if turn >= _WARMUP:
                        for figure, times in found.items():
                            measured[name][figure] += times
    except ChildError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "options": {"nodes": options.nodes, "bytes": options.size, "rounds": options.rounds},
        "figures": summary(measured),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    console = Console()
    show(results, console if console.is_terminal else Console(width=120))  # a file has room for the table
    return code


def measure(group: Group, size: int, turn: int) -> dict[str, list[float]]:
    """Return the seconds that one turn of a system has measured, by figure."""

    def issue(nbytes: int, count: int) -> tuple[list[float], list[float]]:
        answers = group.ask({"do": "issue", "bytes": nbytes, "count": count})
        wall, cpu = ([time for answer in answers for time in answer[clock]] for clock in ("seconds", "cpu_s"))
        return wall, cpu

    steps = group.ask({"do": "step", "round": turn})
    begun = min(answer["start"] for answer in steps)
    small = group.ask({"do": "small", "bytes": _SMALL, "count": _SMALL_COUNT})
    copies = group.ask({"do": "copy", "bytes": size})
    times = {call: [answer[call] for answer in copies] for call in _COPIES}
    large_wall, large_cpu = issue(size, _LARGE_COUNT)
    small_wall, small_cpu = issue(_SMALL, _SMALL_COUNT)
    return {
        "step_s": [max(answer["finish"] for answer in steps) - begun],
        "step_cpu_s": [sum(answer["cpu_s"] for answer in steps)],
        "small_s": [time for answer in small for time in answer["seconds"]],
        **{
            f"{call}_s": [max(end for _, end, _ in each) - min(start for start, _, _ in each)]
            for call, each in times.items()
        },
        "copies_cpu_s": [sum(busy for each in times.values() for _, _, busy in each)],
        "issue_large_s": large_wall,
        "issue_small_s": small_wall,
        "issue_large_cpu_s": large_cpu,
        "issue_small_cpu_s": small_cpu,
    }


def summary(measured: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """Return by figure the median of each system, how many times it is of, and NetStorm's over Gloo's."""
    found: dict[str, dict[str, Any]] = {}
    for figure in _FIGURES:
        medians = {
            name: statistics.median(times[figure]) if times[figure] else None
            for name, times in measured.items()
        }
        ours, theirs = medians[TORCH_NETSTORM], medians[TORCH_GLOO]
        found[figure] = {
            **medians,
            "count": min(len(times[figure]) for times in measured.values()),
            "ratio": ours / theirs if ours is not None and theirs else None,
        }
    return found


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print the table."""
    options = found["options"]
    table = Table(title=f"PyTorch on loopback, {options['nodes']} ranks, medians")
    table.add_column("what", no_wrap=True)
    for heading in ("NetStorm", "Gloo", "NetStorm / Gloo", "number"):
        table.add_column(heading, justify="right", no_wrap=True)
    for figure, text in _FIGURES.items():
        values = found["figures"][figure]
        if values["ratio"] is None:
            continue
        table.add_row(
            text.format(size=megabytes(options["bytes"])),
            *(f"{values[name] * 1e3:.3f} ms" for name in (TORCH_NETSTORM, TORCH_GLOO)),
            f"{values['ratio']:.2f}",
            str(values["count"]),
        )
    console.print(table)


def _group(name: str, case: Case, timeout_s: float) -> Group:
    worker = str(BENCHMARKS / "workers" / "torch_calls.py")
    command = [sys.executable, worker, name, str(case.nodes), str(case.bytes)]
    launch = SYSTEMS[name].launch(case).running(command)
    return Group(launch, start_timeout_s=timeout_s, round_timeout_s=timeout_s)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="netstorm bench torch_loopback",
        description="PyTorch on loopback: DDP steps and collectives, NetStorm beside Gloo.",
    )
    add = parser.add_argument
    add("--nodes", type=number, default=3, metavar="N", help="ranks; default 3")
    add("--size", type=amount, default=amount("40MB"), metavar="SIZE", help="of the model; default 40MB")
    add("--rounds", type=number, default=10, metavar="N", help="turns that count; default 10")
    add("--timeout", type=seconds, default=120.0, metavar="S", help="for a start or a turn; default 120")
    add("--json", type=writable, metavar="FILE", help="write the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
