"""The command line of the examples on digits: what all have, and what those of MXNet add."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "DATASETS",
    "MODELS",
    "STORES",
    "Options",
    "TrainingOptions",
    "add_training_options",
    "parse",
]

DATASETS = ("digits", "fashion-mnist", "mnist", "cifar10")
MODELS = ("cnn", "alexnet", "resnet18", "resnet50", "mobilenet")

# MXNet takes a name that it does not know for a store on this machine alone, so that a spelling mistake would
# train each rank by itself without a word. Hence the list.
STORES = (
    "dist_sync_netstorm",
    "netstorm",
    "dist_async_netstorm",
    "dist_sync",
    "dist_device_sync",
    "dist_async",
    "local",
    "device",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What the user asked for, whatever the framework."""

    dataset: str
    data_dir: Path | None
    epochs: int
    batch_size: int
    """Samples in a batch of one rank."""
    optimizer: str
    lr: float | None
    """None is 0.05 for SGD and 0.003 for all others."""
    momentum: float | None
    """None is 0.9 for SGD, and for others what the framework has."""
    seed: int
    save: str | None
    json: str | None
    digest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(TrainingOptions):
    """What the user asked for, of MXNet."""

    kv_store: str
    update_on_kvstore: bool | None
    """None leaves the choice to MXNet."""
    model: str
    image_size: int | None
    """Height and width that images are resized to; None is the model's own choice."""
    hybridize: bool

    @property
    def optimizer_params(self) -> dict[str, float]:
        """What MXNet's optimizer is made with."""
        sgd = self.optimizer == "sgd"
        params = {"learning_rate": self.lr or (0.05 if sgd else 0.003)}
        momentum = 0.9 if sgd and self.momentum is None else self.momentum
        if momentum is not None:
            params["momentum"] = momentum
        return params


def whole_number(text: str) -> int:
    """Parse a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def positive_number(text: str) -> float:
    """Parse a number above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def fraction(text: str) -> float:
    """Parse a number from 0 to below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def add_training_options(parser: argparse.ArgumentParser, optimizers: str) -> None:
    """Give a parser the options of `TrainingOptions`; `optimizers` says which there are."""
    add = parser.add_argument
    add("--dataset", choices=DATASETS, default="digits", help="digits comes with scikit-learn")
    add("--data-dir", type=Path, metavar="DIR", help="where the files of the other data sets are")
    add("--epochs", type=whole_number, default=3)
    add("--batch-size", type=whole_number, default=16, help="samples in a batch of one rank")
    add("--optimizer", type=str.lower, default="sgd", metavar="NAME", help=optimizers)
    add("--lr", type=positive_number, help="learning rate; by default 0.05 for sgd and 0.003 for others")
    add("--momentum", type=fraction, help="for optimizers that have one; by default 0.9 for sgd")
    add("--seed", type=int, default=1, help="of initial weights, order of the samples and dropout")
    add(
        "--save",
        metavar="FILE",
        help="write the final weights (npz); {rank} becomes the rank, without it only rank 0 writes",
    )
    add(
        "--json",
        metavar="FILE",
        help="write loss, accuracy and samples/s of each epoch; {rank} as for --save",
    )
    add("--digest", action="store_true", help="each rank prints the SHA-256 of its final weights")


def parse(description: str, arguments: Sequence[str] | None = None) -> Options:
    """Return the options of MXNet's examples; a wrong one ends the program with exit code 2."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--kv-store", choices=STORES, default=STORES[0], help="what mx.kv.create is asked for")
    add("--update-on-kvstore", choices=("yes", "no", "auto"), default="auto", help="where the optimizer runs")
    add("--model", choices=MODELS, default="cnn", help="all but cnn are from MXNet's model zoo")
    add(
        "--image-size",
        type=whole_number,
        metavar="PIXELS",
        help="resize images to this; by default what the model needs",
    )
    add("--hybridize", action="store_true", help="compile the network (Gluon; Module always does)")
    add_training_options(parser, "any that MXNet has: sgd, adam, nag, lamb, ...")
    given = vars(parser.parse_args(arguments))
    given["update_on_kvstore"] = {"yes": True, "no": False, "auto": None}[given["update_on_kvstore"]]
    return Options(**given)
