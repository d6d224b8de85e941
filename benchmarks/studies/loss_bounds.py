#!/usr/bin/env python3
"""What losing gradients does to accuracy, by bound and model: all ranks in one process, without a network.

    python benchmarks/studies/loss_bounds.py cnn mlp mlp-cancer --json loss-bounds.json
    python benchmarks/studies/loss_bounds.py gpt --bounds 0.1,0.3 --seeds 3

Every step lacks as much as the bound allows: the worst case, as most steps of a job lack nothing. The rules:

    late         NetStorm's: what chunks lack comes with the rank's next contribution, after four steps at the
                 latest. The root's own rule says how much of a step may be missing.
    lost         MLT's bound: packets of 320 values, drawn at random, are lost for ever
    unimportant  the same, and packets below the median of their rank and step are lost first, as MLT's
                 switches drop them

Models: the examples' CNN and an MLP on digits, an MLP on scikit-learn's breast cancer data, and the examples'
GPT. All runs of a seed begin with the same weights and have the same batches; differences are beside the same
seed without loss.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits.data import load
from gpt.model import GPT
from gpt.text import load_text
from harness.arguments import number, writable
from netstorm.kvstore.rounds.bounded_loss import EndedChunks, MissedRounds, OpenChunk, all_ended
from torch_digits import cnn

PACKET: Final = 320
"""Values of a packet: 1,280 bytes (`netstorm.pslite.datagram`)."""
CHUNK: Final = 1024
_LAST: Final = 3
"""Looks at the test samples that are averaged at the end."""
_EVERY: Final = 8
"""Steps between two of them."""
_KEY: Final = 0
_CONTEXT: Final = 64

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
"""(ranks, places)"""
RULES: Final = ("late", "lost", "unimportant")


class NextCharacter(nn.Module):
    """The examples' GPT, which returns scores instead of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(context=_CONTEXT, width=64, layers=2, heads=4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return (samples, characters, scores)."""
        embedding = self.gpt.embedding
        values = embedding["characters"](inputs) + embedding["places"](torch.arange(inputs.shape[1]))
        for block in self.gpt.blocks:
            values = block(values)
        scores: torch.Tensor = self.gpt.head(values)
        return scores


class Task(NamedTuple):
    """A model, its samples, and how it is trained."""

    model: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor
    ranks: int
    batch: int
    rate: float
    """Of SGD; of AdamW for the GPT."""
    steps: int


def task_of(name: str) -> Task:
    """Return a task, with fresh weights."""
    if name == "gpt":
        text = load_text()
        starts = torch.arange(0, 256_000, _CONTEXT)[:, None]
        samples = text[starts + torch.arange(_CONTEXT + 1)]
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
        samples = samples[order]
        inputs, targets = samples[:, :-1], samples[:, 1:]
        return Task(
            NextCharacter(), inputs[200:], targets[200:], inputs[:200], targets[:200], 4, 4, 3e-3, 240
        )
    if name == "mlp-cancer":
        from sklearn.datasets import load_breast_cancer  # noqa: PLC0415 - the others do without

        values, classes = load_breast_cancer(return_X_y=True)
        values = torch.tensor((values - values.mean(0)) / values.std(0), dtype=torch.float32)
        targets, test = torch.tensor(classes), torch.arange(len(classes)) % 3 == 0
        mlp = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        return Task(mlp, values[~test], targets[~test], values[test], targets[test], 7, 4, 0.1, 120)
    data = load("digits", None)
    pixels, test_pixels = (
        torch.tensor(one.images / data.white, dtype=torch.float32) for one in (data.train, data.test)
    )
    classes, test_classes = (torch.tensor(one.labels.astype(np.int64)) for one in (data.train, data.test))
    if name == "cnn":
        return Task(cnn(data), pixels, classes, test_pixels, test_classes, 7, 8, 0.2, 240)
    layers = (nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return Task(
        nn.Sequential(nn.Flatten(), *layers), pixels, classes, test_pixels, test_classes, 7, 8, 0.2, 240
    )


MODELS: Final = ("cnn", "mlp", "mlp-cancer", "gpt")


class Sums:
    """Sums of all ranks' gradients that lack a share of them, by one of `RULES`."""

    def __init__(self, rule: str, bound: float, ranks: int, elements: int, seed: int) -> None:
        """Begin without anything late; `elements`: of a gradient."""
        self._rule: Final = rule
        self._bound: Final = bound
        self._ranks: Final = ranks
        self._chance: Final = np.random.default_rng(seed)
        self._places: Final = np.arange(0, elements, CHUNK if rule == "late" else PACKET)
        self._lengths: Final = np.diff(np.append(self._places, elements))
        self._kept = np.zeros((ranks, elements), np.float32)
        self._missed: Final = MissedRounds()
        self.given = self.missing = 0.0
        """Absolute values of gradients, and of those that were not in the sum of their step."""

    def sum(self, gradients: Floats) -> Floats:
        """Return the sum of what counts, given (ranks, elements)."""
        if not self._bound:
            return np.asarray(gradients.sum(0))
        values = self._kept + gradients if self._rule == "late" else gradients.copy()
        masses = np.add.reduceat(np.abs(values), self._places, axis=1)
        lacks = self._late(masses) if self._rule == "late" else self._dropped(masses)
        lost = np.repeat(lacks, self._lengths, axis=1)
        self.given += float(np.abs(gradients).sum())
        self.missing += float(np.abs(gradients[lost]).sum())
        self._kept = np.where(lost, values, np.float32(0))
        return np.asarray(np.where(lost, np.float32(0), values).sum(0))

    def _dropped(self, masses: Floats) -> Flags:
        """Return which packets of each rank are lost, the unimportant ones first if that is the rule."""
        order = self._chance.permutation(masses.size)
        if self._rule == "unimportant":
            important = masses >= np.median(masses, axis=1, keepdims=True)
            order = order[np.argsort(important.ravel()[order], kind="stable")]
        return self._flags(order[: round(self._bound * masses.size)])

    def _late(self, masses: Floats) -> Flags:
        """Return which chunks of each rank are late, as many as the root lets be."""
        order = self._chance.permutation(masses.size)
        chunks = len(self._places)
        order = np.array(
            [one for one in order if self._missed.may_miss(_KEY, one % chunks, 1 << int(one // chunks))], int
        )
        count = round(1.2 * self._bound * masses.size)
        while count and not self._share(masses, self._flags(order[:count])) <= self._bound:
            count -= max(1, count // 50)
        late = self._flags(order[:count])
        for place in range(chunks):
            self._missed.record(_KEY, place, _bits(late[:, place]))
        return late

    def _flags(self, numbers: npt.NDArray[np.int64]) -> Flags:
        flags = np.zeros(self._ranks * len(self._places), bool)
        flags[numbers] = True
        return flags.reshape(self._ranks, -1)

    def _share(self, masses: Floats, late: Flags) -> float:
        arrived = np.where(late, 0, masses).sum(0)
        chunks = [
            OpenChunk(
                elements=int(self._lengths[place]),
                arrived=self._ranks - int(late[:, place].sum()),
                gradients=self._missed.gradients(_KEY, place, _bits(~late[:, place])),
                missing=int(late[:, place].sum()),
                mass=float(arrived[place]),
            )
            for place in range(len(self._places))
        ]
        return sum(all_ended(chunks), EndedChunks()).share


def _bits(ranks: npt.NDArray[np.bool_]) -> int:
    return sum(1 << int(rank) for rank in np.flatnonzero(ranks))


def train(name: str, rule: str, bound: float, seed: int) -> tuple[list[float], float]:
    """Train; return the accuracies of all looks, and the share of the gradients that missed its step."""
    torch.manual_seed(seed)
    task = task_of(name)
    parameters = dict(task.model.named_parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters.values(), lr=task.rate)
    if name == "gpt":
        optimizer = torch.optim.AdamW(parameters.values(), lr=task.rate)
    elements = sum(one.numel() for one in parameters.values())
    sums = Sums(rule, bound, task.ranks, elements, seed)

    def loss_of(values: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = functional_call(task.model, values, (inputs,))
        return nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten())

    gradients_of: Callable[..., dict[str, torch.Tensor]] = vmap(grad(loss_of), in_dims=(None, 0, 0))
    chance = torch.Generator().manual_seed(seed)
    looks = []
    for step in range(1, task.steps + 1):
        chosen = torch.randint(len(task.inputs), (task.ranks, task.batch), generator=chance)
        fixed = {one: value.detach() for one, value in parameters.items()}
        found = gradients_of(fixed, task.inputs[chosen], task.targets[chosen])
        flat = torch.cat([found[one].reshape(task.ranks, -1) for one in parameters], dim=1).numpy()
        total = torch.from_numpy(sums.sum(flat) / task.ranks)
        sizes = [one.numel() for one in parameters.values()]
        for one, part in zip(parameters.values(), torch.split(total, sizes), strict=True):
            one.grad = part.view_as(one).clone()
        optimizer.step()
        if step % _EVERY == 0:
            with torch.no_grad():
                scores = task.model(task.test_inputs)
            looks.append(float((scores.argmax(-1) == task.test_targets).float().mean()))
    return looks, sums.missing / sums.given if sums.given else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all models with all rules, bounds and seeds, print a table, and return the exit code."""
    options = _options(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        plain = {seed: train(name, "lost", 0.0, seed)[0] for seed in range(1, options.seeds + 1)}
        finals = {seed: _final(looks) for seed, looks in plain.items()}
        rows.append({"model": name, "rule": "none", "bound": 0.0, "accuracy": _mean(finals.values())})
        print(f"{name:10} without loss: {rows[-1]['accuracy']:.2f} %", flush=True)
        for rule in options.rules:
            for bound in options.bounds:
                runs = {seed: train(name, rule, bound, seed) for seed in plain}
                points = [_final(looks) - finals[seed] for seed, (looks, _) in runs.items()]
                row = {
                    "model": name,
                    "rule": rule,
                    "bound": bound,
                    "missing": _mean(missing for _, missing in runs.values()),
                    "accuracy": _mean(_final(looks) for looks, _ in runs.values()),
                    "difference": _mean(points),
                    "deviation": statistics.stdev(points) if len(points) > 1 else 0.0,
                    "points": points,
                }
                rows.append(row)
                _write(rows, options)
                print(
                    f"{name:10} {rule:11} bound {bound:4.0%}, {row['missing']:6.2%} missing: "
                    f"{row['accuracy']:.2f} %, {row['difference']:+.2f} ± {row['deviation']:.2f} points",
                    flush=True,
                )
    return 0


def _write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.json:
        content = {"seeds": options.seeds, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _final(looks: Sequence[float]) -> float:
    return 100 * statistics.fmean(looks[-_LAST:])


def _mean(values: Any) -> float:
    return statistics.fmean(values)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rules", type=lambda text: text.split(","), default=list(RULES))
    parser.add_argument("--bounds", type=_shares, default=(0.01, 0.1, 0.2, 0.3))
    parser.add_argument("--seeds", type=number, default=5)
    parser.add_argument("--json", type=writable, help="file for the results")
    return parser.parse_args(arguments)


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(one) for one in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
