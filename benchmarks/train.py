#!/usr/bin/env python3
"""Training on an emulated network: samples a second, and how long until the accuracy is there.

    netstorm bench train examples/networks/internet2.yaml --json train.json --plot train.png
    netstorm bench train examples/networks/internet2.yaml --systems netstorm-packing,mxnet-star-best

Every rank trains the same multi-layer perceptron on its share of the digits, with the same seeds, through
`gluon.Trainer` and the store of the system. The sums are the same, so the accuracy of a step is the same:
what differs is how long a step takes. Systems run one after the other, alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.arguments import factor, number, seconds, writable
from harness.child import ChildError
from harness.emulated import Place, emulated, on_loopback
from harness.group import Group
from harness.machine import describe_machine
from harness.stopping import stop_on_sigterm
from netstorm.cli.scratch import scratch_folder
from netstorm.errors import NetStormError, UsageError
from netstorm.topology.networks.file import load_network
from netstorm.topology.networks.network import Network
from race.train_plot import draw_training
from systems.base import BENCHMARKS, Case
from systems.entrants import Entry, check_name, enter

_SYSTEMS = ["mxnet-star-best", "mxnet-sharded", "netstorm-fapt", "netstorm-packing"]
_WIDTH = 1024
_PIXELS, _CLASSES = 64, 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with each system, and return the exit code."""
    options = _options(arguments)
    stop_on_sigterm()
    results: dict[str, Any] = {
        "network": str(options.network),
        "machine": describe_machine(),
        "options": {
            name: getattr(options, name)
            for name in ("width", "batch_size", "epochs", "target", "rates_scale")
        },
        "results": [],
    }
    code = 0
    try:
        network = load_network(options.network)
        links = tuple(replace(link, rate=link.rate * options.rates_scale) for link in network.links)
        network = replace(network, links=links, changes=())
        up = on_loopback if options.loopback else emulated
        with scratch_folder() as folder, up(network, options) as place:
            results |= {"backend": place.backend, "congestion": place.congestion}
            for name in options.systems:
                found = _train(name, options, network, place, folder)
                code = max(code, int(found["error"] is not None))
                results["results"].append(found)
                if options.json is not None:
                    options.json.write_text(json.dumps(results, indent=2) + "\n")
    except NetStormError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        code = 130
    show(results, options.target, Console())
    if options.plot is not None and any(row["epochs"] for row in results["results"]):
        draw_training(results, options.plot)
    return code


def _train(
    name: str, options: argparse.Namespace, network: Network, place: Place, folder: Path
) -> dict[str, Any]:
    parameters = _parameters(options.width)
    case = place.located(Case(nodes=network.size, bytes=4 * parameters))
    found: dict[str, Any] = {"system": name, "parameters": parameters, "epochs": [], "error": None}
    [entrant] = enter([name], Entry(network=network, folder=folder, bytes=case.bytes))
    if len(entrant.systems) != 1:
        return found | {"error": entrant.why_not or f"{name} is an average, and no system to train with"}
    system = entrant.systems[0]
    if system.framework != "mxnet":
        return found | {"error": "it is no store of MXNet's"}
    found["settings"] = dict(system.settings)
    store = "dist_sync_netstorm" if name.startswith("netstorm") else "dist_sync"
    command = [
        *(sys.executable, str(BENCHMARKS / "workers" / "train.py"), store),
        *map(str, (options.width, options.batch_size)),
    ]
    launch = system.launch(case).running(command).placed(place.command)
    try:
        with Group(launch, start_timeout_s=options.timeout, round_timeout_s=options.timeout) as group:
            for epoch in range(options.epochs):
                answers = group.ask({"do": "train", "epoch": epoch})
                found["epochs"].append(
                    {
                        "seconds": max(answer["finish"] for answer in answers)
                        - min(answer["start"] for answer in answers),
                        "samples": sum(answer["samples"] for answer in answers),
                        "accuracy": answers[0]["accuracy"],
                        "loss": sum(answer["loss"] for answer in answers) / len(answers),
                    }
                )
    except ChildError as error:
        found["error"] = str(error)
    return found | _summary(found["epochs"], options.target)


def _parameters(width: int) -> int:
    return _PIXELS * width + width + width * width + width + width * _CLASSES + _CLASSES


def _summary(epochs: list[dict[str, Any]], target: float) -> dict[str, Any]:
    """Return samples a second without the first epoch, which makes connections, and the time to `target`."""
    steady = epochs[1:] or epochs
    time = sum(epoch["seconds"] for epoch in steady)
    reached, so_far = None, 0.0
    for epoch in epochs:
        so_far += epoch["seconds"]
        if epoch["accuracy"] >= target:
            reached = so_far
            break
    return {
        "samples_per_s": sum(epoch["samples"] for epoch in steady) / time if time else None,
        "seconds_to_target": reached,
        "accuracy": epochs[-1]["accuracy"] if epochs else None,
    }


def show(results: dict[str, Any], target: float, console: Console) -> None:
    """Print the table."""
    table = Table(title=f"Training on {results['network']}")
    table.add_column("system", no_wrap=True)
    for heading in ("samples/s", f"s to {target:.0%}", "accuracy", "first"):
        table.add_column(heading, justify="right", no_wrap=True)
    rates = [row["samples_per_s"] for row in results["results"] if row.get("samples_per_s")]
    for row in results["results"]:
        if not row["epochs"]:
            table.add_row(row["system"], "-")
            continue
        reached = row["seconds_to_target"]
        table.add_row(
            row["system"],
            f"{row['samples_per_s']:.1f} ({row['samples_per_s'] / rates[0]:.2f} x)",
            "not reached" if reached is None else f"{reached:.1f}",
            f"{row['accuracy']:.1%}",
            f"{row['epochs'][0]['seconds']:.1f} s",
        )
    console.print(table)
    for row in results["results"]:
        if row["error"]:
            console.print(f"{row['system']}: {row['error']}", highlight=False, markup=False)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="netstorm bench train",
        description="Training on an emulated network, one system after the other.",
    )
    add = parser.add_argument
    names = ",".join(_SYSTEMS)
    add("network", type=Path, metavar="NETWORK.yaml", help="what is emulated")
    add("--systems", type=_systems, default=_SYSTEMS, metavar="NAME,...", help=f"default {names}")
    add("--width", type=number, default=_WIDTH, metavar="N", help=f"of the hidden layers; default {_WIDTH}")
    add("--batch-size", type=number, default=16, metavar="N", help="of a rank; default 16")
    add("--epochs", type=number, default=4, metavar="N", help="default 4")
    add("--target", type=float, default=0.9, metavar="X", help="accuracy whose time counts; default 0.9")
    add("--rates-scale", type=factor, default=1.0, metavar="X", help="times all rates; default 1")
    add("--congestion", default="bbr", metavar="NAME", help="TCP's congestion control; default bbr")
    add("--backend", default="auto", metavar="NAME", help="of the emulation; default auto")
    add("--loopback", action="store_true", help="no emulation: tries the benchmark itself")
    add("--timeout", type=seconds, default=300.0, metavar="S", help="for a start or an epoch; default 300")
    add("--json", type=writable, metavar="FILE", help="write the results, after every system")
    add("--plot", type=writable, metavar="FILE", help="draw accuracy against time, as FILE.png or FILE.svg")
    return parser.parse_args(arguments, argparse.Namespace(dynamic=False))


def _systems(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        try:
            check_name(name)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return names


if __name__ == "__main__":
    sys.exit(main())
