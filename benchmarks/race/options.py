"""The command line of a race on an emulated network."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.arguments import amounts, factor, folder, number, seconds, writable
from netstorm.errors import UsageError
from systems.entrants import KNOWLEDGE, NAMES, check_name

__all__ = ["race_options"]

_ROUNDS = 5


def race_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what `netstorm bench wan` is asked to do."""
    parser = argparse.ArgumentParser(
        prog="netstorm bench wan",
        description="All-reduce on an emulated network, several systems side by side.",
    )
    _add_systems(parser.add_argument_group("what is compared"))
    _add_rounds(parser.add_argument_group("rounds"))
    _add_network(parser.add_argument_group("the network"))
    _add_results(parser.add_argument_group("results"))
    options = parser.parse_args(arguments)
    options.set = dict(options.set)
    if options.rounds is None and not options.dynamic:
        options.rounds = _ROUNDS
    return options


def _add_systems(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
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
    add(
        "--knowledge",
        choices=KNOWLEDGE,
        default=KNOWLEDGE[0],
        help="what NetStorm is given at its start: the file's rates (default), only its links, or nothing",
    )
    add(
        "--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="for NetStorm's nodes"
    )
    add("--seed", type=int, default=1, metavar="N", help="draws the hubs of the average star; default 1")


def _add_rounds(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--rounds",
        type=number,
        metavar="N",
        help=f"rounds that count; default {_ROUNDS}, with --dynamic as many as there is time for",
    )
    add("--warmup", type=number, default=2, metavar="N", help="rounds before them; default 2")
    add("--seconds", type=seconds, metavar="S", help="begin no round later than S after the first")
    add("--timeout", type=seconds, default=180.0, metavar="S", help="for a start or a round; default 180")


def _add_network(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("network", type=Path, metavar="NETWORK.yaml", help="what is emulated")
    add("--rates-scale", type=factor, default=1.0, metavar="X", help="times all rates; default 1")
    add(
        "--loss",
        type=_percent,
        metavar="PERCENT",
        help="loss of all links instead of the file's, such as 0%%",
    )
    add(
        "--dynamic",
        action="store_true",
        help="apply the file's changes as time passes, to one system after the other; default: static",
    )
    add(
        "--times-scale",
        type=factor,
        default=1.0,
        metavar="X",
        help="times all times of changes, such as 1/9; default 1",
    )
    add(
        "--repeat",
        type=number,
        default=1,
        metavar="N",
        help="have the course of changes N times, for systems with long rounds; default 1",
    )
    add("--congestion", default="bbr", metavar="NAME", help="TCP's congestion control; default bbr")
    add("--backend", default="auto", metavar="NAME", help="of the emulation; default auto")
    add("--loopback", action="store_true", help="no emulation, all on 127.0.0.1: tries the benchmark itself")


def _add_results(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--json", type=writable, metavar="FILE", help="write the results, after every round")
    add("--plot", type=writable, metavar="FILE", help="draw them (needs matplotlib); see also bench plot")
    add("--trace", type=writable, metavar="FILE", help="timeline of NetStorm's chunks, for ui.perfetto.dev")
    add(
        "--logs",
        type=folder,
        metavar="FOLDER",
        help="keep what each process says on its error output there; it is made if it is missing",
    )
    add("--short", action="store_true", help="a small table in plain words")


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
