#!/usr/bin/env python3
"""Is a round slower than it was? Two checkouts of NetStorm side by side, and an interval for the ratio.

    git worktree add /tmp/before v0.1
    python benchmarks/versions.py /tmp/before . --json versions.json
    python benchmarks/versions.py /tmp/before . --network examples/networks/internet2.yaml --sizes 16MB
    python benchmarks/versions.py . . --with NETSTORM_ELASTIC=1:3

Both versions' processes are alive and take turns, a round each, in changing order; every element of every sum
is checked. Then all are started again, `--starts` times, because a start has its luck, too: ports, cores,
where memory is. The 95 % interval is of the ratio of medians (of processor time: means), new to old, by a
bootstrap in two stages [1]_: starts are drawn, and within each of them rounds, the same for both versions.

References:
    .. [1] Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, ISMM 2013, section 7.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psutil
from rich.console import Console
from rich.table import Table

from harness.arguments import amounts, factor, megabytes, number, numbers, seconds, writable
from harness.compare import Comparison
from harness.emulated import Place, emulated
from harness.machine import describe_machine
from harness.progress import Rounds, counted_rounds
from harness.results import Row
from harness.stopping import stop_on_sigterm
from netstorm.errors import NetStormError
from netstorm.topology.files import load_network
from systems.base import Case
from systems.checkout import Checkout

_MEMORY_SHARE: Final = 0.8
"""Of what is free."""

_RESAMPLES: Final = 4000
"""With so many the interval's ends are known to a few thousandths of its width."""

Times = npt.NDArray[np.float64]
"""Seconds of each round, shape (starts, rounds)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and return the exit code: 1 if a version failed or is above `--limit`, 2 if none can begin."""
    options = _options(arguments)
    stop_on_sigterm()
    variables = {} if options.network is None else {"NETSTORM_NETWORK": str(options.network.resolve())}
    versions = [
        Checkout(name=name, folder=folder, variables=variables | more)
        for name, folder, more in (("old", options.old, {}), ("new", options.new, dict(options.settings)))
    ]
    try:
        for version in versions:
            version.check()
        with contextlib.ExitStack() as stack:
            place = None
            nodes: list[int] = options.nodes
            if options.network is not None:
                network = load_network(options.network)
                nodes, place = [network.size], stack.enter_context(emulated(network, options))
            each = len(nodes) * len(options.sizes) * options.starts * options.rounds
            with counted_rounds(Console(stderr=True), each) as rounds:
                found = [
                    _compare(versions, _case(options, count, size, place), options, place, rounds)
                    for count in nodes
                    for size in options.sizes
                ]
    except NetStormError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if options.json is not None:
        content = {
            "machine": describe_machine(),
            "versions": {version.name: dict(version.settings) for version in versions},
            "network": None if options.network is None else str(options.network),
            "results": found,
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    _show(found, versions)
    above = options.limit is not None and any(
        not result["error"] and result["interval"][1] >= options.limit for result in found
    )
    return int(above or any(result["error"] for result in found))


def ratio(
    of: Callable[..., Any], old: Times, new: Times, *, seed: int = 1
) -> tuple[float, tuple[float, float]]:
    """Return `of`, such as the median, of `new` over that of `old`, and the 95 % interval; see the module."""
    chance = np.random.default_rng(seed)
    starts, rounds = old.shape
    start = chance.integers(starts, size=(_RESAMPLES, starts, 1))
    round = chance.integers(rounds, size=(_RESAMPLES, starts, rounds))
    drawn = [of(times[start, round].reshape(_RESAMPLES, -1), axis=1) for times in (old, new)]
    low, high = np.quantile(drawn[1] / drawn[0], (0.025, 0.975))
    return float(of(new) / of(old)), (float(low), float(high))


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value


def _compare(
    versions: list[Checkout], case: Case, options: argparse.Namespace, place: Place | None, rounds: Rounds
) -> dict[str, Any]:
    """Measure one case, and return what is written of it."""
    times: dict[str, list[list[float]]] = {version.name: [] for version in versions}
    cpu: dict[str, list[list[float]]] = {version.name: [] for version in versions}
    error = ""
    for _ in range(options.starts):
        rows = {version.name: Row(system=version, case=case) for version in versions}
        comparison = Comparison(
            list(versions),
            rounds=options.rounds,
            warmup=options.warmup,
            start_timeout_s=options.timeout,
            round_timeout_s=options.timeout,
            on_round=rounds.done,
            place=None if place is None else place.command,
        )
        comparison.run(case, rows, int(psutil.virtual_memory().available * _MEMORY_SHARE))
        error = next((f"{name}: {row.error}" for name, row in rows.items() if row.error), "")
        if error:
            break
        for name, row in rows.items():
            times[name].append(row.rounds_s)
            cpu[name].append(row.cpu_s)
    result: dict[str, Any] = {
        "nodes": case.nodes,
        "bytes": case.bytes,
        "keys": case.keys,
        "rounds_s": times,
        "cpu_s": cpu,
        "error": error,
    }
    if not error:
        medians, interval = ratio(np.median, np.array(times["old"]), np.array(times["new"]))
        # The kernel counts processor time in hundredths of a second: single rounds say little.
        means, cpu_interval = ratio(np.mean, np.array(cpu["old"]), np.array(cpu["new"]))
        result |= {
            "ratio": medians,
            "interval": interval,
            "cpu_ratio": means,
            "cpu_interval": cpu_interval,
        }
    return result


def _case(options: argparse.Namespace, nodes: int, size: int, place: Place | None) -> Case:
    case = Case(nodes=nodes, bytes=size, keys=options.keys)
    return case if place is None else place.located(case)


def _show(found: list[dict[str, Any]], versions: list[Checkout]) -> None:
    table = Table(title=" beside ".join(f"{one.name} ({one.commit() or one.folder})" for one in versions))
    for heading in ("nodes", "size", "keys", "old", "new", "new / old", "95 %", "CPU, new / old", "95 % "):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in found:
        cells = [str(result["nodes"]), megabytes(result["bytes"]), str(result["keys"])]
        if result["error"]:
            table.add_row(*cells, "failed")
            continue
        table.add_row(
            *cells,
            *(f"{statistics.median(np.ravel(result['rounds_s'][name])):.4f} s" for name in ("old", "new")),
            *_cells(result["ratio"], result["interval"]),
            *_cells(result["cpu_ratio"], result["cpu_interval"]),
        )
    console = Console()
    console = console if console.is_terminal else Console(width=130)
    console.print(table)
    for result in found:
        if result["error"]:
            console.print(result["error"], highlight=False, markup=False)


def _cells(value: float, interval: tuple[float, float]) -> tuple[str, str]:
    return f"{value:.3f}", f"{interval[0]:.3f} to {interval[1]:.3f}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="All-reduce of float32 by two versions of NetStorm, a round each in turn."
    )
    add = parser.add_argument
    add("old", type=Path, help="a checkout")
    add("new", type=Path, help="another one")
    add("--nodes", type=numbers, default=[3], metavar="N,...", help="on loopback; default 3")
    add("--network", type=Path, metavar="FILE", help="on this network, emulated: its nodes and links")
    add("--sizes", type=amounts, default=amounts("4MB,40MB"), metavar="SIZE,...", help="default 4MB,40MB")
    add("--keys", type=number, default=1, metavar="N", help="arrays that a size is divided into; default 1")
    add("--starts", type=number, default=5, metavar="N", help="of all processes; default 5")
    add("--rounds", type=number, default=20, metavar="N", help="of each start that count; default 20")
    add("--warmup", type=number, default=3, metavar="N", help="rounds before them; default 3")
    add("--limit", type=factor, metavar="R", help="exit with 1 unless the intervals end below this ratio")
    add(
        "--with",
        type=_setting,
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="a variable of the newer one; with the same checkout twice: what a setting costs",
    )
    add("--json", type=writable, metavar="FILE", help="write the results")
    add("--timeout", type=seconds, default=120.0, metavar="S", help="for a start or a round; default 120")
    add("--congestion", default="bbr", metavar="NAME", help="TCP's congestion control there; default bbr")
    add("--backend", default="auto", metavar="NAME", help="of the emulation; default auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
