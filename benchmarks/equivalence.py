#!/usr/bin/env python3
"""Do NetStorm and MXNet's servers train the same weights? Both examples, several optimizers, on four ranks.

    python benchmarks/equivalence.py
    python benchmarks/equivalence.py --examples gluon --optimizers sgd --runs 3

MXNet's servers add gradients in the order of their arrival, so that no two runs end with the same weights.
Their spread is the largest difference of any weight between any two MXNet runs. NetStorm's distance is the
largest difference of any weight between its run and any MXNet run. It may be twice the spread. The ranks of
one NetStorm run must have the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from harness.arguments import number, seconds, writable
from harness.child import ChildError
from harness.job import run_job
from harness.machine import describe_machine
from harness.stopping import stop_on_sigterm
from systems.base import BENCHMARKS, Case, System
from systems.mxnet_dist import MXNetDist
from systems.netstorm_store import NetStormStore

Weights = dict[str, NDArray[np.float32]]

EXAMPLES = ("gluon", "module")
OPTIMIZERS = ("sgd", "adam")
ALLOWED = 2.0
"""Times the spread of MXNet's own runs."""

_STORES: dict[str, tuple[str, System]] = {
    "mxnet": ("dist_sync", MXNetDist(name="mxnet", servers=1)),
    "netstorm": ("dist_sync_netstorm", NetStormStore()),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and return the exit code: 1 if anything failed or differs by more than allowed."""
    options = _options(arguments)
    stop_on_sigterm()
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "comparisons": [],
    }
    console = Console(stderr=True)
    cases = list(itertools.product(options.examples, options.optimizers))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    interrupted = False
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(cases) * (options.runs + 1))
        try:
            for example, optimizer in cases:
                progress.update(bar, description=f"{example}, {optimizer}")
                found = compare(example, optimizer, options, lambda: progress.advance(bar))
                results["comparisons"].append(found)
        except KeyboardInterrupt:
            interrupted = True
    text = json.dumps(results, indent=2)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)
    if interrupted:
        return 130
    return int(not all(found["equivalent"] for found in results["comparisons"]))


def compare(example: str, optimizer: str, options: argparse.Namespace, done: Any) -> dict[str, Any]:
    """Train with both stores, and return how far the weights are apart."""
    found: dict[str, Any] = {
        "example": example,
        "optimizer": optimizer,
        "spread": None,
        "distance": None,
        "distance_over_spread": None,
        "ranks_identical": {},
        "equivalent": False,
        "errors": {},
    }
    runs: dict[str, list[Weights]] = {"mxnet": [], "netstorm": []}
    for store in options.stores:
        try:
            for _ in range(options.runs if store == "mxnet" else 1):
                weights, identical = train(example, optimizer, store, options)
                runs[store].append(weights)
                found["ranks_identical"][store] = identical and found["ranks_identical"].get(store, True)
                done()
        except ChildError as error:
            found["errors"][store] = str(error)
    if len(runs["mxnet"]) > 1:
        pairs = itertools.combinations(runs["mxnet"], 2)
        found["spread"] = max(distance(one, other) for one, other in pairs)
        found["largest_weight"] = max(float(np.abs(value).max()) for value in runs["mxnet"][0].values())
    if runs["mxnet"] and runs["netstorm"]:
        distances = [distance(runs["netstorm"][0], other) for other in runs["mxnet"]]
        found["distance"] = max(distances)
        found["distance_to_nearest"] = min(distances)
    if found["spread"] is not None and found["distance"] is not None:
        found["distance_over_spread"] = found["distance"] / found["spread"] if found["spread"] else None
        near = found["distance"] <= ALLOWED * found["spread"]
        found["equivalent"] = near and found["ranks_identical"]["netstorm"]
    return found


def train(example: str, optimizer: str, store: str, options: argparse.Namespace) -> tuple[Weights, bool]:
    """Return rank 0's weights after a training of all ranks, and whether all ranks have the same bytes."""
    name, system = _STORES[store]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(BENCHMARKS.parent / "examples" / f"{example}_digits.py")]
        command += ["--kv-store", name, "--optimizer", optimizer, "--epochs", str(options.epochs)]
        command += ["--seed", str(options.seed), "--save", f"{folder}/{{rank}}.npz"]
        launch = system.launch(Case(nodes=options.nodes, bytes=4)).running(command)
        run_job(launch, timeout_s=options.timeout)
        ranks = [_load(Path(folder, f"{rank}.npz")) for rank in range(options.nodes)]
    return ranks[0], len({_digest(weights) for weights in ranks}) == 1


def distance(one: Weights, other: Weights) -> float:
    """Return the largest absolute difference of any weight."""
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def _load(path: Path) -> Weights:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def _digest(weights: Weights) -> str:
    return hashlib.sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Do NetStorm and MXNet's servers train the same weights?")
    add = parser.add_argument
    add("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    add("--optimizers", nargs="+", default=list(OPTIMIZERS), metavar="NAME", help="default sgd adam")
    add("--stores", nargs="+", choices=tuple(_STORES), default=list(_STORES), help="default both")
    add("--nodes", type=number, default=4, metavar="N", help="default 4")
    add("--runs", type=number, default=5, metavar="N", help="of MXNet, for the spread; default 5")
    add("--epochs", type=number, default=3, metavar="N", help="default 3")
    add("--seed", type=int, default=1)
    add("--json", type=writable, metavar="FILE", help="also write the results to FILE")
    add("--timeout", type=seconds, default=120.0, metavar="S", help="for one training; default 120")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
