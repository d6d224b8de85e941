#!/usr/bin/env python3
"""MXNet on this machine's loopback: what a batch of a small network costs, NetStorm beside MXNet's server.

    python benchmarks/mxnet_loopback.py --json mxnet-loopback.json
    python benchmarks/mxnet_loopback.py --nodes 3 --batches 50 --rounds 4

The network is the perceptron of MXNet's `train_mnist.py`, six keys of 109,386 values in all, which takes so
little computation that what the store costs shows. All processes stay alive and take turns of some batches,
so that a machine that is busy for a while is busy for all. At the end all ranks of a synchronous store must
have the same weights. Medians are over all turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from harness.arguments import number, seconds, writable
from harness.child import ChildError
from harness.group import Group
from harness.machine import describe_machine
from harness.stopping import stop_on_sigterm
from systems.base import BENCHMARKS, Case
from systems.registry import SYSTEMS

_STORES: Final = {
    "dist_sync_netstorm": "netstorm",
    "dist_sync": "mxnet-1-server",
    "dist_async_netstorm": "netstorm",
    "dist_async": "mxnet-1-server",
}
"""The system whose processes each store needs."""

_BYTES: Final = 4 * 109_386
_WARMUP: Final = 2

_FIGURES: Final = {
    "batch_s": "a batch, ms",
    "cpu_s": "its processor time, all processes, ms",
    "woken": "wake-ups of a worker in it",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code: 1 if a store failed, 130 after Ctrl-C."""
    options = _options(arguments)
    stop_on_sigterm()
    measured: dict[str, dict[str, list[float]]] = {
        store: {figure: [] for figure in _FIGURES} for store in _STORES
    }
    code = 0
    try:
        with ExitStack() as groups:
            started = {store: groups.enter_context(_group(store, options)) for store in measured}
            for turn in range(_WARMUP + options.rounds):
                order = list(started) if turn % 2 else list(reversed(started))
                for store in order:
                    found = measure(started[store], options.batches)
                    if turn >= _WARMUP:
                        for figure, value in found.items():
                            measured[store][figure].append(value)
            for store, group in started.items():
                check(store, group)
    except ChildError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "options": {"nodes": options.nodes, "batches": options.batches, "rounds": options.rounds},
        "figures": summary(measured),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    console = Console()
    show(results, console if console.is_terminal else Console(width=120))  # a file has room for the table
    return code


def measure(group: Group, batches: int) -> dict[str, float]:
    """Return what a batch took in one turn of a store, by figure."""
    before = group.cpu_s()
    answers = group.ask({"do": "steps", "count": batches})
    used = group.cpu_s() - before
    took = max(answer["finish"] for answer in answers) - min(answer["start"] for answer in answers)
    woken = statistics.mean(answer["woken"] for answer in answers)
    return {"batch_s": took / batches, "cpu_s": used / batches, "woken": woken / batches}


def check(store: str, group: Group) -> None:
    """Check that all ranks of a synchronous store have the same weights.

    Raises:
        ChildError: they differ.
    """
    digests = {answer["digest"] for answer in group.ask({"do": "weights"})}
    if "sync" in store and "async" not in store and len(digests) > 1:
        raise ChildError(f"the ranks of {store} have trained different weights")


def summary(measured: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, float | None]]:
    """Return by store the median of each figure; None: there is none."""
    return {
        store: {figure: statistics.median(values) if values else None for figure, values in figures.items()}
        for store, figures in measured.items()
    }


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print the table."""
    options = found["options"]
    table = Table(title=f"MXNet's perceptron on loopback, {options['nodes']} workers, medians")
    table.add_column("store", no_wrap=True)
    for heading in _FIGURES.values():
        table.add_column(heading, justify="right")
    for store, figures in found["figures"].items():
        if None not in figures.values():
            batch_s, cpu_s, woken = (figures[figure] for figure in _FIGURES)
            table.add_row(store, f"{batch_s * 1e3:.2f}", f"{cpu_s * 1e3:.2f}", f"{woken:.0f}")
    console.print(table)


def _group(store: str, options: argparse.Namespace) -> Group:
    case = Case(nodes=options.nodes, bytes=_BYTES)
    command = [sys.executable, str(BENCHMARKS / "workers" / "mxnet_steps.py"), store]
    launch = SYSTEMS[_STORES[store]].launch(case).running(command)
    return Group(launch, start_timeout_s=options.timeout, round_timeout_s=options.timeout)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mxnet_loopback.py",
        description="MXNet on loopback: batches of a small network, NetStorm beside MXNet's server.",
    )
    add = parser.add_argument
    add("--nodes", type=number, default=2, metavar="N", help="workers; default 2")
    add("--batches", type=number, default=100, metavar="N", help="of a turn; default 100")
    add("--rounds", type=number, default=6, metavar="N", help="turns that count; default 6")
    add("--timeout", type=seconds, default=120.0, metavar="S", help="for a start or a turn; default 120")
    add("--json", type=writable, metavar="FILE", help="write the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
