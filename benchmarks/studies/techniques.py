#!/usr/bin/env python3
r"""The table of techniques: steps to a target by `accuracy.py`, times and bytes of a step on an emulated WAN.

    python benchmarks/studies/techniques.py examples/networks/internet2.yaml --rates-scale 0.1 \
        --accuracy docs/data/accuracy-digits.json --wan docs/data/steps-internet2-tenth.json --turns 2
    python benchmarks/studies/techniques.py --accuracy docs/data/accuracy-digits.json --wan FILE

Without a network it only prints the table of what was measured before. With one it first measures steps
there: `netstorm bench train` does that, and further options are its own. In each turn, each system makes two
epochs, of which the first makes connections and does not count; every second turn has the opposite order.
Time to the target is steps to it times the time of a step. Steps of a warm-up count as those of float32,
since their rounds are larger than measured ones.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import train
from harness.arguments import number, writable
from race.technique import split_name
from studies.accuracy import MXNET, PLAIN, rows, steps_to

_SYSTEM: Final = "netstorm-packing"
_MXNET: Final = "mxnet-star-best"
_KEPT: Final = ("system", "parameters", "settings", "error")
"""What is kept of a row of `netstorm bench train`, beside its epochs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure on the WAN if asked to, print the table, and return the exit code."""
    options, further = parse_options(arguments)
    accuracy = json.loads(options.accuracy.read_text())
    code = 0
    if options.network is not None:
        code = _measure(accuracy, options, further)
        if not options.wan.exists() or not options.wan.stat().st_size:
            return code
    print("\n".join(table(accuracy, json.loads(options.wan.read_text()), options.target)))
    return code


def _measure(accuracy: Mapping[str, Any], options: argparse.Namespace, further: list[str]) -> int:
    """Have all systems take their turns, write what they have done, and return the worst exit code."""
    together: dict[str, Any] = {}
    worst = 0
    part = options.wan.with_name(f"{options.wan.name}.part")
    for turn, calls in enumerate(trainings(accuracy, options)):
        for call in calls:
            code, found = _train([*call, "--json", str(part), *further], part)
            worst = max(worst, code)
            if found:
                merge(together, found, turn)
                options.wan.write_text(json.dumps(together, indent=1) + "\n")
            if code in (2, 130):  # no network, or interrupted
                return code
    return worst


def _train(call: Sequence[str], part: Path) -> tuple[int, dict[str, Any]]:
    """Run `netstorm bench train`, and return its exit code and the results in `part`; empty: there are
    none.
    """
    code = train.main(call)
    text = part.read_text() if part.exists() else ""
    part.unlink(missing_ok=True)
    found: dict[str, Any] = json.loads(text) if text else {}
    return code, found


def trainings(accuracy: Mapping[str, Any], options: argparse.Namespace) -> list[list[list[str]]]:
    """Return the command lines of `netstorm bench train`, by turn."""
    shape = accuracy["options"]
    names = dict.fromkeys(_measured_as(name) for name in accuracy["runs"] if name not in (PLAIN, MXNET))
    own = [_SYSTEM, *(f"{_SYSTEM}+{name}" for name in names)]

    def call(systems: Sequence[str], epochs: int, steps: int) -> list[str]:
        return [
            *(str(options.network), "--model", "cnn", "--systems", ",".join(systems)),
            *("--width", str(shape["width"]), "--batch-size", str(shape["batch_size"])),
            *("--lr", str(shape["lr"]), "--target", str(options.target)),
            *("--epochs", str(epochs), "--epoch-steps", str(steps)),
        ]

    turns = []
    for turn in range(options.turns):
        backwards = turn % 2 == 1
        calls = [call(own[::-1] if backwards else own, options.epochs, options.epoch_steps)]
        if not options.mxnet_to_target:
            mxnet = call([_MXNET], options.epochs, options.mxnet_steps)
            calls = [*calls, mxnet] if backwards else [mxnet, *calls]
        elif turn == 0:
            calls.insert(0, call([_MXNET], _epochs_to_target(accuracy, options), options.epoch_steps))
        turns.append(calls)
    return turns


def _epochs_to_target(accuracy: Mapping[str, Any], options: argparse.Namespace) -> int:
    """Return after how many epochs seed 1 is there without compression, and one more, as rounding differs."""
    needed = steps_to(accuracy["runs"][PLAIN]["1"], options.target, "digits")
    return 1 + math.ceil(int(needed or accuracy["options"]["steps"]) / int(options.epoch_steps))


def merge(together: dict[str, Any], part: Mapping[str, Any], turn: int) -> None:
    """Add the results of one call of `netstorm bench train` to those before it, in place."""
    if not together:
        together |= {name: value for name, value in part.items() if name != "results"} | {"results": []}
    known = {row["system"]: row for row in together["results"]}
    for row in part["results"]:
        kept = {name: row[name] for name in _KEPT if name in row}
        found = known.setdefault(row["system"], kept | {"epochs": []})
        found["error"] = row["error"] or found["error"]
        found["epochs"] += [epoch | {"turn": turn} for epoch in row["epochs"]]
    together["results"] = list(known.values())


def _measured_as(name: str) -> str:
    """Return techniques without a warm-up, which would be all that a short measurement sees."""
    return "+".join(
        ":".join(part for part in technique.split(":") if not part.startswith("warmup="))
        for technique in name.split("+")
    )


class _Step(NamedTuple):
    """What a step took, the median of epochs."""

    seconds: float
    megabytes: float
    """That links have carried."""


def table(accuracy: Mapping[str, Any], wan: Mapping[str, Any], target: float) -> list[str]:
    """Return the table, as Markdown. A technique that was not measured on the WAN has no times."""
    measured = {row["system"]: row for row in wan["results"] if row["epochs"]}
    plain = _step(measured[_SYSTEM])
    found = {row["technique"]: row for row in rows(accuracy, target)}
    lines = [
        f"| technique | steps | a step | to {target:.0%} | of MXNet | MB | accuracy | beside `none` | load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    slowest = None
    if _MXNET in measured:
        slowest, line = _of_mxnet(measured[_MXNET], found, target)
        lines.append(line)
    for name, row in found.items():
        if name == MXNET:
            continue
        system = _SYSTEM if name == PLAIN else f"{_SYSTEM}+{_measured_as(name)}"
        known = measured.get(system)
        step = None if known is None else _step(known)
        reached = f"{row['steps']:.0f}" if row["steps"] is not None else ""
        if row["arrived"] < row["seeds"]:
            reached = f"{reached} ({row['arrived']} of {row['seeds']} seeds)".strip()
        time, ratio, bytes_sent = "", "", ""
        if step is not None and row["arrived"] == row["seeds"]:
            warm = min(_warmup(name), row["steps"])
            seconds = warm * plain.seconds + (row["steps"] - warm) * step.seconds
            time = f"{seconds:.0f} s"
            bytes_sent = f"{warm * plain.megabytes + (row['steps'] - warm) * step.megabytes:.0f}"
            ratio = "" if slowest is None else f"{slowest / seconds:.1f} x"
        seconds_a_step = "" if step is None else f"{step.seconds:.2f} s"
        lines.append(
            f"| `{name}` | {reached} | {seconds_a_step} | {time} | {ratio} | {bytes_sent} | "
            f"{_accuracy(row)} | {'' if known is None else _load(known)} |"
        )
    return lines


def _of_mxnet(
    measured: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]], target: float
) -> tuple[float | None, str]:
    """Return MXNet's seconds to the target, and its line: what it did there if it has got to the target, else
    its own steps to it on loopback if there are such runs, else those of float32, of which its sums are.
    """
    step, row = _step(measured), found.get(MXNET, found[PLAIN])
    there = _reached(measured, target)
    steps, seconds, megabytes = "", None, ""
    if there is not None:
        count, seconds, carried = there
        steps, megabytes = f"{count}, seed 1", f"{carried:.0f}"
    elif row["steps"] is not None:
        seconds = row["steps"] * step.seconds
        steps = f"{row['steps']:.0f}" if MXNET in found else f"{row['steps']:.0f}, as `none`"
        megabytes = f"{row['steps'] * step.megabytes:.0f}"
    time = "" if seconds is None else f"{seconds:.0f} s"
    accuracy = _accuracy(row) if MXNET in found else " | "
    return seconds, (
        f"| MXNet, best hub | {steps} | {step.seconds:.2f} s | {time} | {'' if seconds is None else 1} | "
        f"{megabytes} | {accuracy} | {_load(measured)} |"
    )


def _accuracy(row: Mapping[str, Any]) -> str:
    plain = row["technique"] == PLAIN
    return f"{row['final']:.1%} | " + ("" if plain else f"{row['difference']:+.1f} ± {row['spread']:.1f}")


def _reached(row: Mapping[str, Any], target: float) -> tuple[int, float, float] | None:
    """Return steps, seconds and MB until a training there had the target; None: it had not."""
    for _, turn in groupby(row["epochs"], lambda epoch: epoch.get("turn", 0)):
        steps, seconds, megabytes = 0, 0.0, 0.0
        for epoch in turn:
            steps += epoch["steps"]
            seconds += epoch["seconds"]
            megabytes += epoch["link_bytes"] / 1e6
            if epoch["accuracy"] >= target:
                return steps, seconds, megabytes
    return None


def _warmup(name: str) -> int:
    described = split_name(f"{_SYSTEM}+{name}")[1].compression or {}
    return int(described.get("warmup", 0))


def _step(row: Mapping[str, Any]) -> _Step:
    """Return what a step took. The first epoch of a turn makes connections; it counts if it is the only
    one.
    """
    steady = []
    for _, turn in groupby(row["epochs"], lambda epoch: epoch.get("turn", 0)):
        first, *later = turn
        steady += later or [first]
    return _Step(
        statistics.median(epoch["seconds"] / epoch["steps"] for epoch in steady),
        statistics.median(epoch["link_bytes"] / epoch["steps"] for epoch in steady) / 1e6,
    )


def _load(row: Mapping[str, Any]) -> str:
    loads = [epoch["load"] for epoch in row["epochs"]]
    return f"{min(loads):.0f} to {max(loads):.0f}"


def parse_options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return what the command line asks for, and the options of `netstorm bench train`."""
    parser = argparse.ArgumentParser(
        description="Time to accuracy of techniques; further options are those of netstorm bench train."
    )
    add = parser.add_argument
    add("network", nargs="?", type=Path, metavar="NETWORK.yaml", help="measure steps there; default: do not")
    add("--accuracy", type=Path, required=True, metavar="FILE", help="of accuracy.py digits")
    add("--wan", type=writable, required=True, metavar="FILE", help="results of netstorm bench train")
    add("--target", type=float, default=0.9, metavar="X", help="accuracy; default 0.9")
    add("--turns", type=number, default=1, metavar="N", help="of each system there; default 1")
    add("--epochs", type=number, default=2, metavar="N", help="of a turn; default 2")
    add("--epoch-steps", type=number, default=8, metavar="N", help="a multiple of all local steps; default 8")
    add("--mxnet-steps", type=number, default=4, metavar="N", help="of its epochs; default 4")
    add(
        "--mxnet-to-target",
        action="store_true",
        help="MXNet trains there until it has the target, in the first turn alone; default: as many epochs",
    )
    return parser.parse_known_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
