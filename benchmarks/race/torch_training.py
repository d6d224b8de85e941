"""A race of PyTorch jobs on one network: how long each takes to a given loss, one after the other, alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from harness.child import ChildError
from harness.emulated import Place, on_loopback
from harness.group import Group, busy_share
from netstorm.topology.network import Network
from systems.base import Case
from systems.entrants import Entry
from systems.torch_training import TRAININGS, training_launch

__all__ = ["SHAPE", "gpt_parameters", "seconds_to", "show_trainings", "train_with_torch"]

SHAPE: Final = ("width", "layers", "context", "batch_size", "lr", "sync_every", "pause")
"""Options that workers must know."""

_CHARACTERS: Final = 128
_DDP_STEPS: Final = 5
"""Steps of DDP between two looks at the loss; DiLoCo's loss is looked at when all ranks have one model."""


def train_with_torch(
    name: str, options: argparse.Namespace, network: Network, place: Place, folder: Path
) -> dict[str, Any]:
    """Return what one training has reached, and when.

    Each point has the seconds of training so far, the steps of each rank, and the loss on text that nobody
    trains on. Measuring the loss takes no time of the training.
    """
    if TRAININGS[name].network_free:
        with on_loopback() as loopback:
            return _train(name, options, network, loopback, folder)
    return _train(name, options, network, place, folder)


def _train(
    name: str, options: argparse.Namespace, network: Network, place: Place, folder: Path
) -> dict[str, Any]:
    parameters = gpt_parameters(width=options.width, layers=options.layers, context=options.context)
    case = place.located(Case(nodes=network.size, bytes=4 * parameters))
    shape = {option: getattr(options, option) for option in SHAPE}
    training = TRAININGS[name]
    found: dict[str, Any] = {
        "system": name,
        "what": training.what,
        "parameters": parameters,
        "points": [],
        "error": None,
    }
    entry = Entry(network=network, folder=folder, bytes=case.bytes)
    launch = training_launch(name, case, entry, [json.dumps(shape)])
    if isinstance(launch, str):
        return found | {"error": launch, "left_out": True}
    steps = options.sync_every if training.diloco else min(_DDP_STEPS, options.sync_every)
    try:
        with Group(
            launch.placed(place.command),
            start_timeout_s=options.timeout,
            round_timeout_s=options.timeout,
            logs=options.logs,
        ) as group:
            for point in _points(group, steps, options):
                found["points"].append(point)
    except ChildError as error:
        found["error"] = str(error)
    return found | {"seconds_to_target": seconds_to(options.target, found["points"])}


def _points(group: Group, steps: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield points until the loss is reached, or the time is over."""
    spent, done = 0.0, 0
    loss = group.ask({"do": "loss"})[0]["loss"]
    yield {"seconds": 0.0, "steps": 0, "loss": loss, "machine_cpu_share": None}
    while loss > options.target and spent < options.seconds:
        group.ask({"do": "prepare"})
        before = psutil.cpu_times()
        answers = group.ask({"do": "train", "steps": steps})
        share = busy_share(before, psutil.cpu_times())
        spent += max(answer["finish"] for answer in answers) - min(answer["start"] for answer in answers)
        done += steps
        loss = group.ask({"do": "loss"})[0]["loss"]
        yield {"seconds": spent, "steps": done, "loss": loss, "machine_cpu_share": share}


def seconds_to(target: float, points: list[dict[str, Any]]) -> float | None:
    """Return when the loss was first at most `target`, on the line between two points; None if never."""
    for before, after in pairwise(points):
        if after["loss"] <= target:
            part = (before["loss"] - target) / (before["loss"] - after["loss"])
            seconds: float = before["seconds"] + part * (after["seconds"] - before["seconds"])
            return seconds
    return None


def gpt_parameters(*, width: int, layers: int, context: int) -> int:
    """Return how many parameters the GPT of the examples has (`examples/gpt/model.py`)."""
    block = 12 * width * width + 13 * width
    embedding = (_CHARACTERS + context) * width
    return layers * block + embedding + 2 * width + width * _CHARACTERS + _CHARACTERS


def show_trainings(results: Mapping[str, Any], target: float, console: Console) -> None:
    """Print the table."""
    parameters = max((row["parameters"] for row in results["results"]), default=0)
    table = Table(title=f"Training {4e-6 * parameters:.1f} MB on {results['network']}")
    table.add_column("system", no_wrap=True)
    for heading in (f"s to loss {target:g}", "steps", "s a step", "loss", "cores busy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results["results"]:
        points = row["points"]
        if len(points) < 2:
            table.add_row(row["system"], "-")
            continue
        last = points[-1]
        reached = row["seconds_to_target"]
        shares = [point["machine_cpu_share"] for point in points[1:]]
        table.add_row(
            row["system"],
            f"not in {last['seconds']:.0f}" if reached is None else f"{reached:.1f}",
            str(last["steps"]),
            f"{last['seconds'] / last['steps']:.2f}",
            f"{last['loss']:.3f}",
            f"{sum(shares) / len(shares):.0%}",
        )
    console.print(table)
    for row in results["results"]:
        if row["error"]:
            console.print(f"{row['system']}: {row['error']}", highlight=False, markup=False)
