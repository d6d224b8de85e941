#!/usr/bin/env python3
"""What late gradients do to accuracy: the CNN on digits, trained by all ranks in one process.

    python benchmarks/studies/late_gradients.py --late 0.02,0.05,0.1 --seeds 5 --json late.json

Uplinks dip as in `studies/bounded_loss.py`. A dip of a rank lasts one to four steps, in each of which most of
its chunks, always the last ones, are missing from the sums. They are added to the rank's next gradients; in
the fifth step it is waited for. What is late after the last step is dropped. The ranks' dips begin so often
that `--late` of all gradients are late. All runs of a seed have the same first weights and batches.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits.data import load
from digits.shards import Batch, Shard
from harness.arguments import number, writable
from netstorm.frontends.mxnet.compat import mx
from netstorm.kvstore.rounds.bounded_loss import MOST_MISSED
from workers.train import cnn

_LAST: Final = 3
"""Looks at the test samples that are averaged; they are 360."""

_EVERY: Final = 8
"""Steps between two of them."""

_MEAN_DIP: Final = (1 + MOST_MISSED) / 2

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Trained:
    """One training."""

    accuracy: float
    late: float
    """Share of the gradients that were not in the sum of their step."""


class LateSums:
    """Sums of all ranks' gradients, some of which come too late."""

    def __init__(self, ranks: int, late: float, options: argparse.Namespace) -> None:
        self._left: Final = [0] * ranks
        """Steps that a rank's dip still lasts."""
        self._kept: list[Floats | None] = [None] * ranks
        self._chance: Final = random.Random(f"dips {options.seed}")
        self._options: Final = options
        inside = late / options.share  # of all steps of a rank that are in a dip
        # A dip of so many steps, one step after it, and steps until the next begins.
        self._begins: Final = inside / (_MEAN_DIP * (1 - inside) - inside)
        self.given = self.missing = 0

    def sum(self, gradients: Sequence[Floats]) -> Floats:
        """Return the sum of what has come, given each rank's gradients, flat."""
        total = np.zeros_like(gradients[0])
        for rank, gradient in enumerate(gradients):
            known = self._kept[rank]
            values = gradient.copy() if known is None else known + gradient
            counted = self._counted(rank, len(values))
            total[:counted] += values[:counted]
            values[:counted] = 0
            self._kept[rank] = values
            self.given += len(values)
            self.missing += len(values) - counted
        return total

    def _counted(self, rank: int, elements: int) -> int:
        """Return how many elements of a rank are in time."""
        if self._left[rank] < 0:  # after a dip
            self._left[rank] = 0
            return elements
        if self._left[rank] == 0:
            if self._chance.random() >= self._begins:
                return elements
            self._left[rank] = self._chance.randint(1, MOST_MISSED)
        self._left[rank] -= 1
        if self._left[rank] == 0:
            self._left[rank] = -1
        chunk: int = self._options.chunk
        return int(elements * (1 - self._options.share)) // chunk * chunk


def train(late: float, options: argparse.Namespace) -> Trained:
    """Train one net by the sums of all ranks' gradients."""
    data = load("digits", None)
    batches = [
        _endless(
            Shard(
                data.train,
                rank=rank,
                ranks=options.ranks,
                batch_size=options.batch_size,
                seed=options.seed,
            )
        )
        for rank in range(options.ranks)
    ]
    mx.random.seed(options.seed)
    net = cnn(options.width)
    net.initialize(mx.init.Xavier())
    test = mx.nd.array(data.test.images / data.white)
    net(test[:1])
    net.hybridize(static_alloc=True)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    parameters = list(net.collect_params().values())
    ends = np.cumsum([one.data().size for one in parameters])[:-1]
    sums = LateSums(options.ranks, late, options)
    rate, found = options.lr / (options.ranks * options.batch_size), []

    def gradients_of(batch: Batch) -> Floats:
        with mx.autograd.record():
            loss = loss_of(net(mx.nd.array(batch[0] / data.white)), mx.nd.array(batch[1]))
        loss.backward()
        return np.concatenate([one.grad().asnumpy().ravel() for one in parameters])

    for step in range(1, options.steps + 1):
        total = sums.sum([gradients_of(next(one)) for one in batches])
        for parameter, part in zip(parameters, np.split(total, ends), strict=True):
            value = parameter.data()
            value -= mx.nd.array(part.reshape(parameter.shape)) * rate
        if step % _EVERY == 0:
            found.append(float((net(test).argmax(axis=1).asnumpy() == data.test.labels).mean()))
    return Trained(statistics.fmean(found[-_LAST:]), sums.missing / sums.given)


def _endless(shard: Shard) -> Iterator[Batch]:
    for epoch in count():
        yield from shard.batches(epoch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with all shares and seeds, and return the exit code."""
    options = _options(arguments)
    rows: dict[float, list[Trained]] = {late: [] for late in (0.0, *options.late)}
    for seed in range(1, options.seeds + 1):
        options.seed = seed
        for late, runs in rows.items():
            runs.append(train(late, options))
            print(
                f"seed {seed}, late {runs[-1].late:.2%}: accuracy {100 * runs[-1].accuracy:.2f} %", flush=True
            )
    found = [_row(late, runs, rows[0.0]) for late, runs in rows.items()]
    for row in found:
        print(
            f"{row['late']:.2%} late: accuracy {row['accuracy']:.2f} %, "
            f"{row['difference']:+.2f} points, standard deviation {row['deviation']:.2f}"
        )
    if options.json:
        shown = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({"options": shown, "rows": found}, indent=1) + "\n")
    return 0


def _row(wanted: float, runs: list[Trained], reliable: list[Trained]) -> dict[str, Any]:
    points = [100 * (one.accuracy - other.accuracy) for one, other in zip(runs, reliable, strict=True)]
    return {
        "wanted": wanted,
        "late": statistics.fmean(one.late for one in runs),
        "accuracy": 100 * statistics.fmean(one.accuracy for one in runs),
        "difference": statistics.fmean(points),
        "deviation": statistics.stdev(points) if len(points) > 1 else 0.0,
        "points": points,
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--late", type=_shares, default=(0.02, 0.05, 0.1), help="shares of all gradients")
    parser.add_argument(
        "--share", type=float, default=0.85, help="of a rank's chunks in a dip that are late (default: .85)"
    )
    parser.add_argument("--chunk", type=number, default=8192, help="elements (default: 8192)")
    parser.add_argument("--ranks", type=number, default=7, help="(default: 7)")
    parser.add_argument("--width", type=number, default=128, help="of the CNN (default: 128)")
    parser.add_argument("--batch-size", type=number, default=8, help="of a rank (default: 8)")
    parser.add_argument("--lr", type=float, default=0.2, help="(default: .2)")
    parser.add_argument("--steps", type=number, default=120, help="(default: 120)")
    parser.add_argument("--seeds", type=number, default=5, help="(default: 5)")
    parser.add_argument("--json", type=writable, help="file for the results")
    return parser.parse_args(arguments)


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(one) for one in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
