"""A race of MXNet's stores on one network: how long each takes to a given accuracy, one after the other."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from harness.child import ChildError
from harness.emulated import DROPPED, Place, on_loopback
from harness.group import Group
from netstorm.cli.support import scratch_folder
from netstorm.topology.network import Network
from race.one_process import Curve
from race.technique import split_name
from systems.base import BENCHMARKS, Case
from systems.entrants import Entry, enter

__all__ = [
    "SHAPE",
    "complete",
    "mxnet_on_loopback",
    "parameters_of",
    "show_stores",
    "summary",
    "train_with_mxnet",
]

SHAPE: Final = ("model", "width", "batch_size", "lr", "seed")
"""Options that workers must know."""

_PIXELS, _CLASSES = 64, 10
_ALEXNET: Final = 20_344_650
"""Parameters of MXNet's AlexNet for images of 63 pixels and ten classes."""
_LOOK_STEPS: Final = 8
"""From one look at the test samples to the next, as in one process."""
_TIMEOUT_S: Final = 600.0
_FINAL: Final = 3
"""Epochs whose accuracies are averaged: of 360 test samples one is a quarter of a point."""


def train_with_mxnet(
    name: str, options: argparse.Namespace, network: Network, place: Place, folder: Path
) -> dict[str, Any]:
    """Return what one system has reached after each epoch, and in which time."""
    name_of_system, technique = split_name(name)
    parameters = parameters_of(options.model, options.width)
    case = place.located(Case(nodes=network.size, bytes=4 * parameters))
    found: dict[str, Any] = {"system": name, "parameters": parameters, "epochs": [], "error": None}
    entry = Entry(network=network, folder=folder, bytes=case.bytes, variables=technique.variables)
    [entrant] = enter([name_of_system], entry)
    if len(entrant.systems) != 1:
        return found | {"error": entrant.why_not or f"{name} is an average, and no system to train with"}
    system = entrant.systems[0]
    if system.framework != "mxnet":
        return found | {"error": "it is no store of MXNet's"}
    if technique.outer:
        return found | {"error": "diloco is PyTorch's: --framework torch has it as a system"}
    if technique.local_steps and (options.epoch_steps or 1) % technique.local_steps:
        return found | {"error": f"--epoch-steps must be a multiple of {technique.local_steps}: ranks differ"}
    found["settings"] = dict(system.settings)
    own = name.startswith("netstorm")
    shape = {option: getattr(options, option) for option in SHAPE} | technique.for_worker()
    command = [
        *(sys.executable, str(BENCHMARKS / "workers" / "train.py")),
        *("dist_sync_netstorm" if own else "dist_sync", json.dumps(shape)),
    ]
    launch = system.launch(case).running(command).placed(place.command)
    epochs = options.epochs if own else options.mxnet_epochs or options.epochs
    try:
        with Group(launch, start_timeout_s=options.timeout, round_timeout_s=options.timeout) as group:
            for _ in range(epochs):
                before = place.carried()
                answers = group.ask({"do": "train", "steps": options.epoch_steps})
                found["epochs"].append(_epoch(answers, before, place.carried()))
                if options.to_target and found["epochs"][-1]["accuracy"] >= options.target:
                    break
    except ChildError as error:
        found["error"] = str(error)
    return found | summary(found["epochs"], options.target)


def mxnet_on_loopback(seed: int, options: argparse.Namespace) -> Curve:
    """Return the accuracies that MXNet's own `dist_sync` reaches, with processes on loopback.

    Raises:
        ChildError: its processes have failed.
    """
    network = Network.uniform(options.ranks)
    shape = {name: getattr(options, name) for name in ("width", "batch_size", "lr", "target")}
    job = argparse.Namespace(
        **shape,
        model="cnn",
        seed=seed,
        epochs=options.steps // _LOOK_STEPS,
        mxnet_epochs=None,
        to_target=False,
        epoch_steps=_LOOK_STEPS,
        timeout=_TIMEOUT_S,
    )
    with scratch_folder() as folder, on_loopback() as place:
        found = train_with_mxnet("mxnet-star-best", job, network, place, folder)
    if found["error"] is not None:
        raise ChildError(found["error"])
    curve = Curve()
    for number, epoch in enumerate(found["epochs"], 1):
        curve.add(number * _LOOK_STEPS, epoch["accuracy"])
    return curve


def _epoch(
    answers: Sequence[Mapping[str, Any]], before: Mapping[str, int], after: Mapping[str, int]
) -> dict[str, Any]:
    first = min(answer["start"] for answer in answers)
    return {
        "seconds": max(answer["finish"] for answer in answers) - first,
        "steps": answers[0]["steps"],
        "samples": sum(answer["samples"] for answer in answers),
        "accuracy": max(answer["accuracy"] or 0.0 for answer in answers),  # one rank's
        "loss": sum(answer["loss"] for answer in answers) / len(answers),
        "link_bytes": sum(after[link] - before[link] for link in after if DROPPED not in link),
        "bytes_sent": sum(answer["bytes_sent"] for answer in answers),  # as NetStorm's nodes count
        "load": os.getloadavg()[0],
    }


def parameters_of(model: str, width: int) -> int:
    """Return how many parameters the net of `workers/train.py` has."""
    if model == "alexnet":
        return _ALEXNET
    if model == "mlp":
        return _PIXELS * width + width + width * width + width + width * _CLASSES + _CLASSES
    first, second = width // 4, width // 2
    convolutions = 9 * first + first + 9 * first * second + second
    return convolutions + 4 * second * width + width + width * _CLASSES + _CLASSES


def summary(epochs: Sequence[Mapping[str, Any]], target: float) -> dict[str, Any]:
    """Return samples a second without the first epoch, which makes connections; what it took to `target`."""
    steady = epochs[1:] or epochs
    time = sum(epoch["seconds"] for epoch in steady)
    reached = next((number for number, epoch in enumerate(epochs, 1) if epoch["accuracy"] >= target), None)
    until = epochs[:reached] if reached else []
    return {
        "samples_per_s": sum(epoch["samples"] for epoch in steady) / time if time else None,
        "step_s": time / sum(epoch["steps"] for epoch in steady) if steady else None,
        "epochs_to_target": reached,
        "seconds_to_target": sum(epoch["seconds"] for epoch in until) if until else None,
        "link_bytes_to_target": sum(epoch["link_bytes"] for epoch in until) if until else None,
        "accuracy": statistics.mean(epoch["accuracy"] for epoch in epochs[-_FINAL:]) if epochs else None,
        "computed": False,
    }


def complete(rows: list[dict[str, Any]]) -> None:
    """Fill in what systems with few epochs would have reached, by those of plain NetStorm.

    Sums without a technique are the same in every system, so the accuracy after a step is, too. What differs
    is how long a step takes, which few epochs show.
    """
    plain = next((row for row in rows if _plain_netstorm(row)), None)
    if plain is None or not plain["epochs_to_target"]:
        return
    for row in rows:
        if not row["epochs"] or len(row["epochs"]) >= len(plain["epochs"]) or "+" in row["system"]:
            continue
        needed, had = plain["epochs_to_target"], len(row["epochs"])
        if row["epochs_to_target"] is None and row["error"] is None:
            for what in ("seconds", "link_bytes"):
                row[f"{what}_to_target"] = needed / had * sum(epoch[what] for epoch in row["epochs"])
            row.update(accuracy=plain["accuracy"], epochs_to_target=needed, computed=True)


def _plain_netstorm(row: Mapping[str, Any]) -> bool:
    return bool(row["epochs"]) and row["system"].startswith("netstorm") and "+" not in row["system"]


def show_stores(results: Mapping[str, Any], target: float, console: Console) -> None:
    """Print the table."""
    table = Table(title=f"Training on {results['network']}")
    table.add_column("system", no_wrap=True)
    for heading in ("s a step", f"s to {target:.0%}", "times faster", "MB to it", "MB a step", "accuracy"):
        table.add_column(heading, justify="right", no_wrap=True)
    first = next((row.get("seconds_to_target") for row in results["results"]), None)
    for row in results["results"]:
        if not row["epochs"]:
            table.add_row(row["system"], "-")
            continue
        reached, about = row["seconds_to_target"], "≈ " if row["computed"] else ""
        sent = sum(epoch["link_bytes"] for epoch in row["epochs"])
        steps = sum(epoch["steps"] for epoch in row["epochs"])
        table.add_row(
            row["system"],
            f"{row['step_s']:.3f}",
            "not reached" if reached is None else f"{about}{reached:.1f}",
            "" if reached is None or first is None else f"{first / reached:.1f}",
            "" if reached is None else f"{about}{row['link_bytes_to_target'] / 1e6:.1f}",
            f"{sent / 1e6 / steps:.2f}",
            f"{about}{row['accuracy']:.1%}",
        )
    console.print(table)
    if any(row.get("computed") for row in results["results"]):
        console.print("≈: computed from its time a step and the steps of uncompressed NetStorm")
    for row in results["results"]:
        if row["error"]:
            console.print(f"{row['system']}: {row['error']}", highlight=False, markup=False)
