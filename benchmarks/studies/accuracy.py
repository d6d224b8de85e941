#!/usr/bin/env python3
"""What techniques do to accuracy: trainings of all ranks in one process, with several seeds.

    python benchmarks/studies/accuracy.py digits --json docs/data/accuracy-digits.json
    python benchmarks/studies/accuracy.py gpt --seeds 5 --techniques int8,powersgd:rank=16 --json gpt.json
    python benchmarks/studies/accuracy.py digits --techniques local:steps=4+int8,mxnet --json digits.json

Runs that the JSON file has already are not made again, so a study can be interrupted, and grow. All
techniques of a seed begin with the same weights and have the same batches. Differences are between runs of
the same seed: their mean, and their standard deviation over seeds.

`mxnet` is no technique but MXNet's own `dist_sync`, with real processes on loopback.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from harness.arguments import number, writable
from harness.child import ChildError
from netstorm.errors import UsageError
from race.one_process import Curve
from race.technique import Technique, split_name

PLAIN: Final = "none"
MXNET: Final = "mxnet"

DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "digits": {
        "ranks": 9,
        "width": 512,
        "batch_size": 8,
        "lr": 0.05,
        "steps": 80,
        "target": 0.9,
        "techniques": "fp16,bf16,int8,1bit,2bit:threshold=0.0625,topk:momentum=0.9,bsc,powersgd,"
        "local:steps=4,local:steps=8",
    },
    "gpt": {
        "ranks": 4,
        "width": 128,
        "batch_size": 4,
        "lr": 1e-3,
        "steps": 200,
        "target": 2.7,
        "techniques": "fp16,bf16,int8,1bit,2bit:threshold=0.003,topk,bsc,powersgd,powersgd:rank=16",
    },
}
SHAPE: Final = ("ranks", "width", "layers", "batch_size", "lr", "steps")
"""Options that a run depends on."""

_FINAL: Final = {"digits": 3, "gpt": 10}
"""How many of the last values are averaged: accuracies of 360 samples, losses of one batch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the table, and return the exit code."""
    options = _options(arguments)
    shape = {name: getattr(options, name) for name in SHAPE}
    results: dict[str, Any] = {"model": options.model, "options": shape, "runs": {}}
    if options.json is not None and options.json.exists() and options.json.stat().st_size:
        results = json.loads(options.json.read_text())
        if (results["model"], results["options"]) != (options.model, shape):
            print(f"error: {options.json} is of other options: {results['options']}", file=sys.stderr)
            return 2
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name, technique in options.techniques.items():
            runs = results["runs"].setdefault(name, {})
            if str(seed) in runs:
                continue
            try:
                curve = _train(technique, seed, options)
            except (UsageError, ChildError) as error:
                print(f"error: {name}: {error}", file=sys.stderr)
                return 2
            runs[str(seed)] = {"steps": curve.steps, "values": [round(value, 5) for value in curve.values]}
            if options.json is not None:
                options.json.write_text(json.dumps(results) + "\n")
            print(f"seed {seed}: {name:32} {final(curve.values, options.model):.4f}", file=sys.stderr)
    print("\n".join(table(results, options.target)))
    return 0


def _train(technique: Technique | None, seed: int, options: argparse.Namespace) -> Curve:
    # Each framework takes a second to import.
    if options.model == "gpt":
        if technique is None:
            raise UsageError("MXNet does not train the GPT, which is PyTorch's")
        from race.one_process_gpt import train_gpt  # noqa: PLC0415

        return train_gpt(technique, seed, options)
    if technique is None:
        from race.mxnet_training import mxnet_on_loopback  # noqa: PLC0415

        return mxnet_on_loopback(seed, options)
    from race.one_process_digits import train_digits  # noqa: PLC0415

    return train_digits(technique, seed, options)


def final(values: Sequence[float], model: str) -> float:
    """Return what a run has reached in the end."""
    return statistics.mean(values[-_FINAL[model] :])


def steps_to(run: Mapping[str, Any], target: float, model: str) -> int | None:
    """Return after how many steps a run has reached a target; None: it has not.

    Losses are means of ten steps, since those of single batches scatter.
    """
    steps, values = run["steps"], run["values"]
    if model == "digits":
        return next((step for step, value in zip(steps, values, strict=True) if value >= target), None)
    means = ((steps[end - 1], statistics.mean(values[end - 10 : end])) for end in range(10, len(steps) + 1))
    return next((step for step, value in means if value <= target), None)


def rows(results: Mapping[str, Any], target: float) -> list[dict[str, Any]]:
    """Return what became of each technique, beside float32 with the same seeds.

    A difference is in points of accuracy, or in percent of the loss.
    """
    model, plain = results["model"], results["runs"][PLAIN]
    found = []
    for name, runs in results["runs"].items():
        seeds = [seed for seed in runs if seed in plain]
        finals = [final(runs[seed]["values"], model) for seed in seeds]
        bases = [final(plain[seed]["values"], model) for seed in seeds]
        differences = [
            100 * (one - base) / (1 if model == "digits" else base)
            for one, base in zip(finals, bases, strict=True)
        ]
        reached = [steps_to(runs[seed], target, model) for seed in seeds]
        arrived = [steps for steps in reached if steps is not None]
        found.append(
            {
                "technique": name,
                "seeds": len(seeds),
                "final": statistics.mean(finals),
                "difference": statistics.mean(differences),
                "spread": statistics.stdev(differences) if len(seeds) > 1 else math.nan,
                "arrived": len(arrived),
                "steps": statistics.mean(arrived) if arrived else None,
            }
        )
    return found


def table(results: Mapping[str, Any], target: float) -> list[str]:
    """Return the table, as Markdown."""
    digits = results["model"] == "digits"
    what, unit = ("accuracy", "points") if digits else ("loss", "%")
    lines = [
        f"| technique | final {what} | beside `none`, {unit} | steps to {target:g} | seeds that arrived |",
        "|---|---|---|---|---|",
    ]
    for row in rows(results, target):
        value = f"{100 * row['final']:.1f} %" if digits else f"{row['final']:.3f}"
        beside = "" if row["technique"] == PLAIN else f"{row['difference']:+.2f} ± {row['spread']:.2f}"
        steps = "" if row["steps"] is None else f"{row['steps']:.0f}"
        lines.append(
            f"| `{row['technique']}` | {value} | {beside} | {steps} | {row['arrived']} of {row['seeds']} |"
        )
    return lines


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Accuracy under techniques, with several seeds.")
    add = parser.add_argument
    add("model", choices=tuple(DEFAULTS), help="what is trained")
    add("--techniques", metavar="NAME,...", help="beside none; default: those of docs/benchmarks")
    add("--seeds", type=number, default=5, metavar="N", help="default 5")
    add("--first-seed", type=number, default=1, metavar="N", help="default 1")
    add("--steps", type=number, metavar="N", help="default 80 (digits), 200 (gpt)")
    add("--ranks", type=number, metavar="N", help="default 9 (digits), 4 (gpt)")
    add("--width", type=number, metavar="N", help="default 512 (digits), 128 (gpt)")
    add("--layers", type=number, default=2, metavar="N", help="of the GPT; default 2")
    add("--batch-size", type=number, metavar="N", help="of a rank; default 8 (digits), 4 (gpt)")
    add("--lr", type=float, metavar="X", help="learning rate; default 0.05 (digits), 0.001 (gpt)")
    add("--target", type=float, metavar="X", help="accuracy or loss; default 0.9 (digits), 2.7 (gpt)")
    add("--json", type=writable, metavar="FILE", help="read the runs that are there, and add the others")
    options = parser.parse_args(arguments)
    for name, value in DEFAULTS[options.model].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    try:
        options.techniques = {
            name: None if name == MXNET else split_name(f"netstorm-packing+{name}")[1]
            for name in dict.fromkeys([PLAIN, *options.techniques.split(",")])
        }
    except UsageError as error:
        parser.error(f"--techniques: {error}")
    return options


if __name__ == "__main__":
    sys.exit(main())
