"""The command line of `torch_digits.py`, and the optimizer that it names."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from digits.options import TrainingOptions, add_training_options, whole_number

__all__ = ["TorchOptions", "optimizer_of", "parse"]

_OPTIMIZERS: Final[dict[str, type[torch.optim.Optimizer]]] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}

_WITH_MOMENTUM: Final = ("rmsprop", "sgd")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions(TrainingOptions):
    """What the user asked for, of PyTorch."""

    backend: str
    model: str
    image_size: int | None
    """Height and width that images are resized to; None is the model's own choice."""


def parse(description: str, arguments: Sequence[str] | None = None) -> TorchOptions:
    """Return the options; a wrong one ends the program with exit code 2."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--backend", default="netstorm", help="what init_process_group is asked for")
    parser.add_argument("--model", choices=("cnn", "alexnet"), default="cnn")
    parser.add_argument(
        "--image-size",
        type=whole_number,
        metavar="PIXELS",
        help="AlexNet's images are resized to this; by default 224",
    )
    names = ", ".join(_OPTIMIZERS)
    add_training_options(parser, f"one of {names}")
    options = TorchOptions(**vars(parser.parse_args(arguments)))
    if options.optimizer not in _OPTIMIZERS:
        parser.error(f"--optimizer {options.optimizer}: expected one of {names}")
    if options.momentum is not None and options.optimizer not in _WITH_MOMENTUM:
        parser.error(f"--momentum: {options.optimizer} has none; {' and '.join(_WITH_MOMENTUM)} have")
    return options


def optimizer_of(options: TorchOptions, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer."""
    sgd = options.optimizer == "sgd"
    given: dict[str, Any] = {"lr": options.lr or (0.05 if sgd else 0.003)}
    momentum = 0.9 if sgd and options.momentum is None else options.momentum
    if momentum is not None:
        given["momentum"] = momentum
    return _OPTIMIZERS[options.optimizer](parameters, **given)
