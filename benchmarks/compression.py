#!/usr/bin/env python3
"""Codecs side by side on an emulated network: bytes on the wire and time of a round, beside plain float32.

    netstorm bench compression examples/networks/internet2.yaml --rates-scale 0.1 --json compression.json
    netstorm bench compression examples/networks/four_sites.yaml --loopback --codecs 2bit,topk:ratio=0.001

One job of NetStorm has a store for each codec, and they take turns, a round each. The bytes are those that
all nodes have sent, as they count them, headers included, and those that the emulated links have carried.
Gradients are random and alike at no two ranks: sparse sums have the most elements then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from harness.arguments import amount, factor, megabytes, number, seconds, writable
from harness.child import ChildError
from harness.emulated import DROPPED, Place, emulated, on_loopback
from harness.group import Group
from harness.machine import describe_machine
from harness.stopping import stop_on_sigterm
from netstorm.cli.support import scratch_folder
from netstorm.errors import NetStormError, UsageError
from netstorm.topology.files import load_network
from netstorm.topology.network import Network
from race.technique import Value, codec_from
from systems.base import BENCHMARKS, Case
from systems.entrants import Entry, check_name, enter

PLAIN: Final = "none"
CODECS: Final = "fp16,bf16,int8,2bit,1bit,topk,bsc,powersgd"
LIMITS: Final = {"fp16": 0.51, "bf16": 0.51, "int8": 0.28, "2bit": 0.12, "topk": 0.06, "powersgd": 0.05}
"""Most bytes that are right, in parts of those of float32, with the codecs' defaults: their definitions, and
what headers add in a round of megabytes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code: 1 if a codec sends more than it may, 2 if it cannot begin."""
    options = parse_options(arguments)
    stop_on_sigterm()
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.codecs}
    results: dict[str, Any] = {"machine": describe_machine(), "options": _plain(options)}
    code = 0
    try:
        network = load_network(options.network).scaled(options.rates_scale)
        network = replace(network, changes=())
        up = on_loopback if options.loopback else emulated
        with scratch_folder() as folder, up(network, options) as place:
            results |= {"backend": place.backend, "congestion": place.congestion, "nodes": network.size}
            _measure(options, network, place, folder, rounds)
    except (NetStormError, ChildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        code = 130
    rows = results["results"] = summary(rounds)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if rows:
        console = Console()
        console = console if console.is_terminal else Console(width=100)  # a file has room for the table
        console.print(table(rows, f"{results['nodes']} nodes, {megabytes(options.size)} of float32"))
    return code or int(any(row["too_many"] for row in rows))


def _measure(
    options: argparse.Namespace,
    network: Network,
    place: Place,
    folder: Path,
    rounds: dict[str, list[dict[str, Any]]],
) -> None:
    case = place.located(Case(nodes=network.size, bytes=options.size, keys=options.keys))
    [entrant] = enter([options.system], Entry(network=network, folder=folder, bytes=case.bytes))
    described = json.dumps(options.codecs)
    worker = str(BENCHMARKS / "workers" / "compression.py")
    command = [sys.executable, worker, str(options.size), str(options.keys), described]
    launch = entrant.systems[0].launch(case).running(command).placed(place.command)
    order = random.Random(1)
    with Group(launch, start_timeout_s=options.timeout, round_timeout_s=options.timeout) as group:
        for turn in range(options.warmup + options.rounds):
            for name in order.sample(list(options.codecs), len(options.codecs)):
                before = place.carried()
                answers = group.ask({"do": "round", "codec": name})
                after = place.carried()
                if turn >= options.warmup:
                    rounds[name].append(
                        {
                            "seconds": max(answer["finish"] for answer in answers)
                            - min(answer["start"] for answer in answers),
                            "bytes": sum(answer["bytes"] for answer in answers),
                            "link_bytes": sum(
                                after[link] - before[link] for link in after if DROPPED not in link
                            ),
                            "cpu_s": sum(answer["cpu_s"] for answer in answers),
                            "load": os.getloadavg()[0],
                        }
                    )


def summary(rounds: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each codec with rounds: medians, and their parts of those of plain float32."""
    rows: list[dict[str, Any]] = []
    for name, measured in rounds.items():
        if not (measured and rounds[PLAIN]):
            continue
        medians = {
            what: statistics.median(round_[what] for round_ in measured)
            for what in ("seconds", "bytes", "link_bytes", "cpu_s")
        }
        plain = {what: statistics.median(round_[what] for round_ in rounds[PLAIN]) for what in medians}
        parts = {what: found / plain[what] if plain[what] else None for what, found in medians.items()}
        most = LIMITS.get(name)
        rows.append(
            {
                "codec": name,
                **medians,
                "parts": parts,
                "most": most,
                "too_many": most is not None and (parts["bytes"] or 0) > most,
                "rounds": measured,
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return the table of a summary."""
    shown = Table(title=title)
    shown.add_column("codec", no_wrap=True)
    for heading in ("MB sent", "of plain", "at most", "on links", "s a round", "of plain", "CPU s"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        parts = row["parts"]
        shown.add_row(
            row["codec"],
            f"{row['bytes'] / 1e6:.2f}",
            _part(parts["bytes"]),
            "" if row["most"] is None else f"{row['most']:.2f}{' !' if row['too_many'] else ''}",
            _part(parts["link_bytes"]),
            f"{row['seconds']:.2f}",
            _part(parts["seconds"]),
            f"{row['cpu_s']:.2f}",
        )
    return shown


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    kept = ("system", "codecs", "size", "keys", "rounds", "warmup", "rates_scale")
    return {"network": str(options.network), **{name: getattr(options, name) for name in kept}}


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="netstorm bench compression",
        description="Bytes and times of rounds under codecs, beside float32.",
    )
    add = parser.add_argument
    add("network", type=Path, metavar="NETWORK.yaml", help="what is emulated")
    add("--codecs", default=CODECS, metavar="NAME,...", help=f"such as topk:ratio=0.001; default {CODECS}")
    add("--system", default="netstorm-packing", metavar="NAME", help="default netstorm-packing")
    add("--size", type=amount, default=amount("16MB"), metavar="SIZE", help="of gradients; default 16MB")
    add("--keys", type=number, default=4, metavar="N", help="square matrices of that size; default 4")
    add("--rounds", type=number, default=5, metavar="N", help="of each codec; default 5")
    add("--warmup", type=number, default=1, metavar="N", help="rounds before that; default 1")
    add("--rates-scale", type=factor, default=1.0, metavar="X", help="times all rates; default 1")
    add("--congestion", default="bbr", metavar="NAME", help="TCP's congestion control; default bbr")
    add("--backend", default="auto", metavar="NAME", help="of the emulation; default auto")
    add("--loopback", action="store_true", help="no emulation: bytes, and what codecs cost in time")
    add("--timeout", type=seconds, default=300.0, metavar="S", help="for a start or a round; default 300")
    add("--json", type=writable, metavar="FILE", help="write the results")
    options = parser.parse_args(arguments, argparse.Namespace(dynamic=False))
    try:
        check_name(options.system)
        options.codecs = _described(options.codecs)
    except UsageError as error:
        parser.error(str(error))
    if not options.system.startswith("netstorm-"):
        parser.error(f"--system {options.system}: codecs are for NetStorm, such as netstorm-packing")
    return options


def _described(text: str) -> dict[str, Mapping[str, Value] | None]:
    """Return the codecs in a text by name, plain float32 first."""
    return {name: codec_from(name) for name in dict.fromkeys([PLAIN, *text.split(",")])}


if __name__ == "__main__":
    sys.exit(main())
