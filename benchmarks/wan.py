#!/usr/bin/env python3
"""Real systems side by side on one emulated network: what an all-reduce takes over slow, unequal links.

    netstorm bench wan examples/networks/internet2.yaml --systems mxnet-star-best,gloo,netstorm-packing
    netstorm bench wan NETWORK.yaml --sizes 16MB,64MB --rounds 5 --json out.json --plot out.png

Each rank has a network namespace of its own; all programs are the published ones, unmodified, with their
recommended settings, which the results hold. They stay alive and take turns, a round each. A round lasts from
the first worker's start until the last one can read the sum; then every element is checked. Results are
written after every round: Ctrl-C loses none.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.arguments import amounts, number, seconds, writable
from harness.compare import Comparison
from harness.emulated import Place, emulated, on_loopback
from harness.machine import describe_machine
from harness.race_results import RaceResults, RaceRow
from harness.results import Row
from harness.stopping import stop_on_sigterm
from netstorm.errors import NetStormError, UsageError
from netstorm.topology.models import tensors_of
from netstorm.topology.network import Network
from netstorm.topology.network_file import load_network
from netstorm.topology.optimum import optimum
from systems.base import Case
from systems.entrants import NAMES, Entrant, Entry, check_name, enter

_MEMORY_LIMIT = 24 * 1024**3
_MEMORY_SHARE = 0.8
"""Of what is free: other programs grow too, and a machine that swaps measures its disk."""

_GOODPUT = 1448 / 1538
"""Of Ethernet's 1538 bytes for a full packet, TCP with time stamps carries 1448."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Race, and return the exit code: 1 if a system failed, 2 if it cannot begin, 130 after Ctrl-C."""
    options = _options(arguments)
    stop_on_sigterm()
    try:
        network = _network(options)
        up = on_loopback if options.loopback else emulated
        with tempfile.TemporaryDirectory(prefix="netstorm-bench-") as folder, up(network, options) as place:
            return _race(options, network, place, Path(folder))
    except NetStormError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _race(options: argparse.Namespace, network: Network, place: Place, folder: Path) -> int:
    console = Console(stderr=True)
    cases = _cases(options, network, place)
    results = RaceResults(
        network=_describe(options, network, place, cases),
        machine=describe_machine(),
        options={"rounds": options.rounds, "warmup": options.warmup, "seed": options.seed},
    )
    try:
        with _progress(console, len(cases) * options.rounds) as step:
            for case in cases:
                entry = Entry(
                    network=replace(network, changes=()),
                    folder=folder,
                    bytes=case.bytes,
                    model=case.model,
                    seed=options.seed,
                    trace=options.trace is not None,
                    variables=options.set,
                )
                rows = _rows(enter(options.systems, entry), case, replace(network, changes=()))
                results.rows.extend(rows)

                def on_round(name: str) -> None:
                    step(name)
                    results.save(options.json)

                _run(options, case, rows, place, on_round)
                results.save(options.json)
                if options.trace is not None:
                    _collect(folder, options.trace, rows)
    except KeyboardInterrupt:
        results.interrupted = True
    results.save(options.json)
    results.show(_output())
    if options.plot is not None and any(row.median_s for row in results.rows):
        results.plot(options.plot)
    if results.interrupted:
        return 130
    return int(any(row.error and not row.entrant.why_not for row in results.rows))


def _run(
    options: argparse.Namespace,
    case: Case,
    rows: list[RaceRow],
    place: Place,
    on_round: Callable[[str], None],
) -> None:
    systems = [system for row in rows for system in row.entrant.systems]
    parts = {name: part for row in rows for name, part in row.parts.items()}
    Comparison(
        systems,
        rounds=options.rounds,
        warmup=options.warmup,
        start_timeout_s=options.timeout,
        round_timeout_s=options.timeout,
        on_round=on_round,
        place=place.command,
        meter=place.carried,
    ).run(case, parts, min(_MEMORY_LIMIT, int(psutil.virtual_memory().available * _MEMORY_SHARE)))


def _rows(entrants: list[Entrant], case: Case, network: Network) -> list[RaceRow]:
    best = optimum(network, case.bytes).seconds
    return [
        RaceRow(
            entrant=entrant,
            case=case,
            optimum_s=best,
            goodput=_GOODPUT,
            parts={system.name: Row(system=system, case=case) for system in entrant.systems},
        )
        for entrant in entrants
    ]


def _cases(options: argparse.Namespace, network: Network, place: Place) -> list[Case]:
    if options.model:
        size = sum(tensors_of(options.model))
        return [Case(nodes=network.size, bytes=size, model=options.model, hosts=place.hosts)]
    return [
        Case(nodes=network.size, bytes=size, keys=options.keys, hosts=place.hosts) for size in options.sizes
    ]


def _network(options: argparse.Namespace) -> Network:
    network = load_network(options.network)
    scale, loss = options.rates_scale, options.loss
    links = tuple(
        replace(link, rate=link.rate * scale, loss=link.loss if loss is None else loss)
        for link in network.links
    )
    nodes = tuple(
        replace(
            node,
            egress=None if node.egress is None else node.egress * scale,
            ingress=None if node.ingress is None else node.ingress * scale,
        )
        for node in network.nodes
    )
    changes = tuple(
        replace(change, rate=None if change.rate is None else change.rate * scale)
        for change in network.changes
    )
    return replace(network, links=links, nodes=nodes, changes=changes if options.dynamic else ())


def _describe(
    options: argparse.Namespace, network: Network, place: Place, cases: list[Case]
) -> dict[str, Any]:
    still = replace(network, changes=())
    return {
        "file": str(options.network),
        "nodes": network.size,
        "links": [
            {
                "from": link.source,
                "to": link.target,
                "rate": link.rate,
                "latency": link.latency,
                "loss": link.loss,
            }
            for link in network.links
        ],
        "routing": network.routing.value,
        "rates_scale": options.rates_scale,
        "loss": "as in the file" if options.loss is None else f"{options.loss:.3%}",
        "dynamic": options.dynamic,
        "backend": place.backend,
        "congestion": place.congestion,
        "goodput": _GOODPUT,
        "optimum_s": {str(case.bytes): optimum(still, case.bytes).seconds for case in cases},
    }


def _collect(folder: Path, target: Path, rows: list[RaceRow]) -> None:
    """Join the timelines of each NetStorm job's nodes into one file a system."""
    from netstorm.observe.trace import join_traces  # noqa: PLC0415 - only with --trace

    traced = [row.entrant.name for row in rows if list(folder.glob(f"{row.entrant.name}.trace.*json"))]
    for name in traced:
        path = target if len(traced) == 1 else target.with_name(f"{target.stem}-{name}{target.suffix}")
        join_traces(sorted(folder.glob(f"{name}.trace.*json")), path)


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("starting", total=None)
        done: dict[str, int] = {}

        def step(name: str) -> None:
            done[name] = done.get(name, 0) + 1
            progress.update(bar, description=name, completed=sum(done.values()), total=total * len(done))
            if not console.is_terminal:
                console.print(f"{name}: round {done[name]}", highlight=False)

        yield step


def _output() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=150)  # a file has room for the table


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="netstorm bench wan",
        description="All-reduce on an emulated network, several systems side by side.",
    )
    add = parser.add_argument
    add("network", type=Path, metavar="NETWORK.yaml", help="what is emulated")
    add(
        "--systems",
        type=_systems,
        default=list(NAMES),
        metavar="NAME,...",
        help=f"of {', '.join(NAMES)} (default all); NetStorm's may have settings: NAME@VARIABLE=VALUE",
    )
    add("--sizes", type=amounts, default=amounts("16MB"), metavar="SIZE,...", help="default 16MB")
    add("--keys", type=number, default=1, metavar="N", help="arrays that a size is divided into; default 1")
    add(
        "--model", default="", metavar="MODEL", help="reduce a model's tensors: alexnet, resnet50, model.json"
    )
    add("--rounds", type=number, default=5, metavar="N", help="rounds that count; default 5")
    add("--warmup", type=number, default=2, metavar="N", help="rounds before them; default 2")
    add("--rates-scale", type=seconds, default=1.0, metavar="X", help="times all rates; default 1")
    add(
        "--loss",
        type=_percent,
        metavar="PERCENT",
        help="loss of all links instead of the file's, such as 0%%",
    )
    add("--dynamic", action="store_true", help="apply the file's changes as time passes; default: static")
    add("--congestion", default="bbr", metavar="NAME", help="TCP's congestion control; default bbr")
    add("--backend", default="auto", metavar="NAME", help="of the emulation; default auto")
    add("--loopback", action="store_true", help="no emulation, all on 127.0.0.1: tries the benchmark itself")
    add(
        "--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="for NetStorm's nodes"
    )
    add(
        "--seed", type=int, default=1, metavar="N", help="of the choice of the average star's hubs; default 1"
    )
    add("--timeout", type=seconds, default=180.0, metavar="S", help="for a start or a round; default 180")
    add("--json", type=writable, metavar="FILE", help="write the results, after every round")
    add("--plot", type=writable, metavar="FILE", help="draw the medians (needs matplotlib)")
    add("--trace", type=writable, metavar="FILE", help="timeline of NetStorm's chunks, for ui.perfetto.dev")
    options = parser.parse_args(arguments)
    options.set = dict(options.set)
    return options


def _systems(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        try:
            check_name(name)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return list(dict.fromkeys(names))


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage from 0% to below 100%")
    return value


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
