#!/usr/bin/env python3
"""All-reduce of float32 among processes of this machine: NetStorm beside MXNet's servers and Gloo.

    python benchmarks/loopback.py                                  the whole comparison, some minutes
    python benchmarks/loopback.py --nodes 3 --sizes 40MB --rounds 5

The processes of all systems stay alive and take turns, a round each, in changing order, so that a machine
that is busy for a while is busy for all of them. Where they do not fit into memory together, they take turns
in blocks. A round lasts from the first worker's start until the last one can read the sum; then every element
is checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.arguments import amounts, megabytes, number, numbers, seconds, writable
from harness.compare import Comparison
from harness.machine import describe_machine
from harness.results import Results, Row
from harness.stopping import stop_on_sigterm
from systems.base import Case
from systems.registry import SYSTEMS

_MEMORY_LIMIT = 24 * 1024**3
_MEMORY_SHARE = 0.8
"""Of what is free: other programs grow too, and a machine that swaps measures its disk."""

_SYSTEMS = ["netstorm", "mxnet-1-server", "mxnet-n-servers", "gloo"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and return the exit code: 1 if a system failed, 130 after Ctrl-C."""
    options = _options(arguments)
    stop_on_sigterm()
    console = Console(stderr=True)
    systems = [SYSTEMS[name] for name in options.systems]
    results = Results(
        machine=describe_machine(),
        options={"rounds": options.rounds, "warmup": options.warmup, "keys": options.keys},
    )
    cases = [
        Case(nodes=nodes, bytes=size, keys=options.keys) for nodes in options.nodes for size in options.sizes
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(cases) * len(systems) * options.rounds)
        comparison = Comparison(
            systems,
            rounds=options.rounds,
            warmup=options.warmup,
            start_timeout_s=options.timeout,
            round_timeout_s=options.timeout,
            on_round=lambda _name: progress.advance(bar),
        )
        try:
            for done, case in enumerate(cases):
                what = f"{case.nodes} nodes, {megabytes(case.bytes)}"
                progress.update(bar, description=what, completed=done * len(systems) * options.rounds)
                if not console.is_terminal:
                    console.print(what, highlight=False)
                rows = {system.name: Row(system=system, case=case) for system in systems}
                results.rows.extend(rows.values())
                limit = min(_MEMORY_LIMIT, int(psutil.virtual_memory().available * _MEMORY_SHARE))
                comparison.run(case, rows, limit)
                if options.memory:
                    _measure_baselines(comparison, case, rows)
                results.save(options.json)
        except KeyboardInterrupt:
            results.interrupted = True
    results.save(options.json)
    results.show(_output())
    if results.interrupted:
        return 130
    return int(any(row.error for row in results.rows))


def _output() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=130)  # a file has room for the table


def _measure_baselines(comparison: Comparison, case: Case, rows: dict[str, Row]) -> None:
    frameworks = {row.system.framework for row in rows.values() if row.peak_rss is not None}
    for framework in sorted(frameworks):
        peak = comparison.baseline(framework, case)
        for row in rows.values():
            if row.system.framework == framework:
                row.baseline_rss = peak


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="All-reduce of float32 among processes of this machine, several systems side by side."
    )
    add = parser.add_argument
    sizes = "4MB,40MB,244MB"
    names = ", ".join(SYSTEMS)
    add("--nodes", type=numbers, default=[3, 9], metavar="N,...", help="default 3,9")
    add("--sizes", type=amounts, default=amounts(sizes), metavar="SIZE,...", help=f"default {sizes}")
    add("--keys", type=number, default=1, metavar="N", help="arrays that a size is divided into; default 1")
    add("--rounds", type=number, default=10, metavar="N", help="rounds that count; default 10")
    add("--warmup", type=number, default=2, metavar="N", help="rounds before them; default 2")
    add("--systems", type=_systems, default=_SYSTEMS, metavar="NAME,...", help=f"of {names}")
    add("--json", type=writable, metavar="FILE", help="write the results, also after each case and Ctrl-C")
    add("--memory", action="store_true", help="measure memory over a run without a store")
    add(
        "--timeout",
        type=seconds,
        default=120.0,
        metavar="S",
        help="seconds for a start or a round; default 120",
    )
    options = parser.parse_args(arguments)
    for size in options.sizes:
        if size // 4 < options.keys:
            parser.error(f"--sizes: {megabytes(size)} are fewer values than --keys {options.keys}")
    return options


def _systems(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no system {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    sys.exit(main())
