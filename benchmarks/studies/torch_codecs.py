#!/usr/bin/env python3
"""What the GPT of the examples sends in a DDP step under each codec, and how well it learns: JSON on standard
output.

    python benchmarks/studies/torch_codecs.py --json codecs.json           4 ranks on loopback
    python benchmarks/studies/torch_codecs.py --codecs none int8 --steps 300 --width 128

Real processes. All systems train from the same weights with the same batches. Bytes are what all ranks have
sent, headers included, as the operating system was given them; the loss is the mean of the last tenth of the
steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import number, seconds, writable
from harness.child import ChildError
from harness.group import Group
from harness.machine import describe_machine
from harness.stopping import stop_on_sigterm
from systems.base import BENCHMARKS, Case
from systems.registry import SYSTEMS
from systems.torch_ddp import TORCH_NETSTORM

CODECS: dict[str, Any] = {
    "none": "none",
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "2bit": {"type": "2bit", "threshold": 0.003},
    "1bit": "1bit",
    "topk": {"type": "topk", "ratio": 0.01},
    "bsc": {"type": "bsc", "ratio": 0.01},
    "mpq": "mpq",
    "powersgd": {"type": "powersgd", "rank": 4},
    "powersgd-16": {"type": "powersgd", "rank": 16},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code."""
    options = _options(arguments)
    stop_on_sigterm()
    found: dict[str, dict[str, Any]] = {}
    launch = SYSTEMS[TORCH_NETSTORM].launch(Case(nodes=options.nodes, bytes=4))
    worker = str(BENCHMARKS / "workers" / "torch_codecs.py")
    try:
        with Group(
            launch.running([sys.executable, worker]),
            start_timeout_s=options.timeout,
            round_timeout_s=options.timeout,
        ) as group:
            for name in dict.fromkeys(["none", *options.codecs]):
                command = {
                    "do": "train",
                    "codec": CODECS[name],
                    **{
                        each: getattr(options, each)
                        for each in ("steps", "seed", "width", "layers", "batch_size")
                    },
                }
                found[name] = _row(group.ask(command), found.get("none"))
                print(f"{name:11} {_line(found[name])}", file=sys.stderr)
    except ChildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    plain = {name: value for name, value in vars(options).items() if name != "json"}
    text = json.dumps({"machine": describe_machine(), "options": plain, "codecs": found}, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0


def _row(answers: Sequence[Mapping[str, Any]], plain: Mapping[str, Any] | None) -> dict[str, Any]:
    curve = [statistics.mean(losses) for losses in zip(*(one["losses"] for one in answers), strict=True)]
    row: dict[str, Any] = {
        "bytes_per_step": sum(one["bytes"] for one in answers),
        "step_s": statistics.median(one["step_s"] for one in answers),
        "loss": statistics.mean(curve[-max(1, len(curve) // 10) :]),
        "parameters": answers[0]["parameters"],
    }
    base = row if plain is None else plain
    return {
        **row,
        "of_bytes": row["bytes_per_step"] / base["bytes_per_step"],
        "of_loss": row["loss"] / base["loss"],
        "curve": [round(loss, 4) for loss in curve],
    }


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['bytes_per_step'] / 1e6:8.3f} MB a step  {row['of_bytes']:.4f} of none's   "
        f"loss {row['loss']:.4f}  {row['of_loss']:.4f} of none's   {row['step_s']:.3f} s a step"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Bytes and losses of the example's GPT under codecs, with DDP."
    )
    add = parser.add_argument
    add("--nodes", type=number, default=4, metavar="N", help="ranks; default 4")
    add("--codecs", nargs="+", choices=CODECS, default=list(CODECS), help="beside none; default all")
    add("--steps", type=number, default=200, metavar="N", help="of each training; default 200")
    add("--width", type=number, default=256, metavar="N", help="of the model; default 256")
    add("--layers", type=number, default=4, metavar="N", help="of the model; default 4")
    add("--batch-size", type=number, default=8, metavar="N", help="samples of a rank; default 8")
    add("--seed", type=int, default=1, help="of weights and batches; default 1")
    add("--timeout", type=seconds, default=900.0, metavar="S", help="for a start or a training; default 900")
    add("--json", type=writable, metavar="FILE", help="write the results here, too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
