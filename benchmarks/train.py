#!/usr/bin/env python3
"""Training on an emulated network: samples a second, and how long until the accuracy or the loss is there.

    netstorm bench train examples/networks/internet2.yaml --json train.json --plot train.png
    netstorm bench train examples/networks/internet2.yaml --systems netstorm-packing,mxnet-star-best

Every rank trains the same net on its share of the digits, with the same seeds, through `gluon.Trainer` and
the store of the system. The sums are the same, so the accuracy of a step is the same: what differs is how
long a step takes. Systems run one after the other, alone.

    netstorm bench train examples/networks/internet2.yaml --model cnn --rates-scale 0.1 \
        --systems netstorm-packing --techniques int8,topk:momentum=0.9,local:steps=8 --epoch-steps 8

Techniques send less, so accuracy may differ, too: each is added to the last of the systems.

    netstorm bench train examples/networks/internet2.yaml --framework torch --rates-scale 0.25 --plot loss.svg

With PyTorch it is the small GPT of the examples, in DDP or with DiLoCo, and the time is that to a given loss.
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

from harness.arguments import factor, folder, number, seconds, writable
from harness.emulated import emulated, on_loopback
from harness.machine import describe_machine
from harness.stopping import stop_on_sigterm
from netstorm.cli.support import scratch_folder
from netstorm.errors import NetStormError, UsageError
from netstorm.topology.files import load_network
from race.loss_plot import draw_losses
from race.mxnet_training import SHAPE as MXNET_SHAPE
from race.mxnet_training import complete, show_stores, train_with_mxnet
from race.technique import split_name
from race.torch_training import SHAPE, show_trainings, train_with_torch
from race.train_plot import draw_training
from systems.entrants import check_name
from systems.torch_training import TRAININGS

_SYSTEMS = ["mxnet-star-best", "mxnet-sharded", "netstorm-fapt", "netstorm-packing"]
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mxnet": {"systems": _SYSTEMS, "width": 1024, "batch_size": 16, "lr": 0.1, "target": 0.9},
    "torch": {"systems": list(TRAININGS), "width": 128, "batch_size": 4, "lr": 1e-3, "target": 2.7},
}
"""Of the options that differ, by framework."""
_SHAPES = {
    "mxnet": (*MXNET_SHAPE, "epochs", "epoch_steps", "mxnet_epochs", "to_target"),
    "torch": (*SHAPE, "seconds"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with each system, and return the exit code."""
    options = parse_options(arguments)
    stop_on_sigterm()
    results: dict[str, Any] = {
        "network": str(options.network),
        "machine": describe_machine(),
        "options": {
            name: getattr(options, name)
            for name in ("framework", "target", "rates_scale", *_SHAPES[options.framework])
        },
        "results": [],
    }
    code = 0
    try:
        network = load_network(options.network)
        links = tuple(replace(link, rate=link.rate * options.rates_scale) for link in network.links)
        network = replace(network, links=links, changes=())
        up = on_loopback if options.loopback else emulated
        with scratch_folder() as scratch, up(network, options) as place:
            results |= {"backend": place.backend, "congestion": place.congestion}
            train = train_with_torch if options.framework == "torch" else train_with_mxnet
            for name in options.systems:
                found = train(name, options, network, place, scratch)
                code = max(code, int(found["error"] is not None and not found.get("left_out")))
                results["results"].append(found)
                if options.framework == "mxnet":
                    complete(results["results"])
                if options.json is not None:
                    options.json.write_text(json.dumps(results, indent=2) + "\n")
    except NetStormError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        code = 130
    torch = options.framework == "torch"
    console = Console()
    console = console if console.is_terminal else Console(width=120)  # a file has room for the table
    (show_trainings if torch else show_stores)(results, options.target, console)
    if options.plot is not None and any(row["points" if torch else "epochs"] for row in results["results"]):
        (draw_losses if torch else draw_training)(results, options.plot)
    return code


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="netstorm bench train",
        description="Training on an emulated network, one system after the other.",
    )
    add = parser.add_argument
    add("network", type=Path, metavar="NETWORK.yaml", help="what is emulated")
    add("--framework", choices=tuple(_DEFAULTS), default="mxnet", help="whose trainings; default mxnet")
    add("--systems", metavar="NAME,...", help=f"default {_by_framework('systems')}")
    add("--width", type=number, metavar="N", help=f"of the hidden layers; default {_by_framework('width')}")
    add("--batch-size", type=number, metavar="N", help=f"of a rank; default {_by_framework('batch_size')}")
    add("--lr", type=float, metavar="X", help=f"learning rate; default {_by_framework('lr')}")
    add(
        "--target",
        type=float,
        metavar="X",
        help=f"accuracy, or PyTorch's loss, whose time counts; default {_by_framework('target')}",
    )
    _add_mxnet(parser.add_argument_group("MXNet: digits"))
    _add_torch(parser.add_argument_group("PyTorch: a small GPT of characters"))
    add("--rates-scale", type=factor, default=1.0, metavar="X", help="times all rates; default 1")
    add("--congestion", default="bbr", metavar="NAME", help="TCP's congestion control; default bbr")
    add("--backend", default="auto", metavar="NAME", help="of the emulation; default auto")
    add("--loopback", action="store_true", help="no emulation: tries the benchmark itself")
    add("--timeout", type=seconds, default=300.0, metavar="S", help="for a start or an epoch; default 300")
    add("--json", type=writable, metavar="FILE", help="write the results, after every system")
    add("--plot", type=writable, metavar="FILE", help="draw accuracy or loss over time, as .png or .svg")
    options = parser.parse_args(arguments, argparse.Namespace(dynamic=False))
    for name, value in _DEFAULTS[options.framework].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    systems = options.systems.split(",") if isinstance(options.systems, str) else options.systems
    if options.techniques:
        systems = [*systems, *(f"{systems[-1]}+{name}" for name in options.techniques.split(","))]
    try:
        options.systems = _systems(systems, options.framework)
    except UsageError as error:
        parser.error(f"--systems, --techniques: {error}")
    return options


def _add_mxnet(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--model",
        choices=("mlp", "cnn", "alexnet"),
        default="mlp",
        help="cnn: that of the examples; alexnet: 20 million values, Adam; default mlp",
    )
    add("--techniques", default="", metavar="NAME,...", help="added to the last system, one at a time")
    add("--epochs", type=number, default=4, metavar="N", help="default 4")
    add("--epoch-steps", type=number, metavar="N", help="of an epoch; default: once through the samples")
    add(
        "--mxnet-epochs",
        type=number,
        metavar="N",
        help="MXNet's servers train only so many; the rest is computed",
    )
    add("--to-target", action="store_true", help="end a training with the epoch that reaches the target")
    add("--seed", type=number, default=1, metavar="N", help="of weights and orders; default 1")


def _add_torch(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--layers", type=number, default=4, metavar="N", help="default 4")
    add("--context", type=number, default=32, metavar="N", help="characters of a sample; default 32")
    add("--sync-every", type=number, default=20, metavar="N", help="steps of DiLoCo; default 20")
    add(
        "--pause",
        type=seconds,
        default=0.0,
        metavar="S",
        help="between forward and backward pass, as for an accelerator: takes no processor; default 0",
    )
    add("--seconds", type=seconds, default=900.0, metavar="S", help="end a training after S; default 900")
    add("--logs", type=folder, metavar="FOLDER", help="keep what processes say on their error output there")


def _by_framework(option: str) -> str:
    def shown(value: Any) -> str:
        return ",".join(value) if isinstance(value, list) else str(value)

    return ", ".join(f"{shown(values[option])} ({name})" for name, values in _DEFAULTS.items())


def _systems(given: Sequence[str], framework: str) -> list[str]:
    """Return names, each once.

    Raises:
        UsageError: there is no such system; says which there are.
    """
    names = list(dict.fromkeys(given))
    for name in names:
        if framework == "mxnet":
            check_name(split_name(name)[0])
        elif name not in TRAININGS:
            raise UsageError(f"no PyTorch training {name!r}; there are {', '.join(TRAININGS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
