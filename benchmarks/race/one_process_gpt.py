"""The GPT of the examples, trained by many ranks in one process: as DDP does it, or with local steps."""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from gpt.model import GPT
from gpt.text import Batches, load_text
from netstorm.errors import UsageError
from netstorm.training.codec_states import Parameter
from race.one_process import Curve, UnitSums
from race.technique import Technique

__all__ = ["train_gpt"]

_CONTEXT: Final = 64

Batch = tuple[torch.Tensor, torch.Tensor]


def train_gpt(technique: Technique, seed: int, options: argparse.Namespace) -> Curve:
    """Return the losses of a training, in nats: means over all ranks. With local steps it is the loss of the
    mean of all ranks' parameters, so that it is one model's in any case.

    Raises:
        UsageError: PyTorch's part has no such technique, or it needs a job of several processes.
    """
    if technique.variables:
        raise UsageError("the GPT in one process: codecs, local, diloco; the rest needs a job")
    if technique.local_steps and technique.compression and not technique.outer:
        raise UsageError("PyTorch's LocalSGD has no codec, DiLoCo has: such as diloco:steps=20+int8")
    torch.manual_seed(seed)
    model = GPT(context=_CONTEXT, width=options.width, layers=options.layers, heads=4)
    job = (_LocalRanks if technique.local_steps else _Together)(model, technique, options)
    text = load_text()
    batches = [
        Batches(text=text, rank=rank, batch_size=options.batch_size, context=_CONTEXT, seed=seed).steps(
            0, options.steps
        )
        for rank in range(options.ranks)
    ]
    curve = Curve()
    for step in range(1, options.steps + 1):
        curve.add(step, statistics.mean(job.step([next(own) for own in batches])))
    return curve


class _Together:
    """One model, whose gradients are averaged in each step."""

    def __init__(self, model: nn.Module, technique: Technique, options: argparse.Namespace) -> None:
        self._model: Final = model
        self._ranks: Final[int] = options.ranks
        self._sums: Final = _unit_sums(model, technique, options.ranks)
        self._optimizer: Final = torch.optim.AdamW(model.parameters(), lr=options.lr)

    def step(self, batches: Sequence[Batch]) -> list[float]:
        """Train a step, and return the losses of the ranks."""
        losses, gradients = [], []
        for batch in batches:
            self._optimizer.zero_grad()
            loss = self._model(*batch)
            loss.backward()
            losses.append(loss.item())
            own = [one.grad.reshape(-1) for one in self._model.parameters() if one.grad is not None]
            gradients.append(torch.cat(own).numpy())
        _set_gradients(self._model, torch.from_numpy(self._sums.sum(gradients)) / self._ranks)
        self._optimizer.step()
        return losses


class _LocalRanks:
    """A model of each rank, and one of what all have after an average, as `local_updates` has them."""

    def __init__(self, model: nn.Module, technique: Technique, options: argparse.Namespace) -> None:
        self._global: Final = model
        self._models: Final = [copy.deepcopy(model) for _ in range(options.ranks)]
        self._mean: Final = copy.deepcopy(model)
        self._optimizers: Final = [torch.optim.AdamW(one.parameters(), lr=options.lr) for one in self._models]
        # LocalSGD takes the mean, as a plain step of SGD does; DiLoCo has the optimizer of `bench train`.
        self._outer: Final = (
            torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            if technique.outer
            else torch.optim.SGD(model.parameters(), lr=1.0)
        )
        self._sums: Final = _unit_sums(model, technique, options.ranks)
        self._every: Final = technique.local_steps
        self._steps = 0

    def step(self, batches: Sequence[Batch]) -> list[float]:
        """Train a step, and return the losses of the mean before it, of the ranks' batches."""
        _set_values(self._mean, torch.stack([_values(model) for model in self._models]).mean(dim=0))
        with torch.no_grad():
            losses = [self._mean(*batch).item() for batch in batches]
        for model, optimizer, batch in zip(self._models, self._optimizers, batches, strict=True):
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
        self._steps += 1
        if self._steps % self._every == 0:
            self._average()
        return losses

    def _average(self) -> None:
        """Bring the global parameters forward by the mean of what ranks have learnt, and give them to all."""
        start = _values(self._global)
        learnt = [(start - _values(model)).numpy() for model in self._models]
        _set_gradients(self._global, torch.from_numpy(self._sums.sum(learnt)) / len(learnt))
        self._outer.step()
        for model in self._models:
            model.load_state_dict(self._global.state_dict())


def _unit_sums(model: nn.Module, technique: Technique, ranks: int) -> UnitSums:
    described = [Parameter(name, tuple(one.shape)) for name, one in model.named_parameters()]
    return UnitSums(technique.compression or "none", described, ranks)


def _values(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def _set_values(model: nn.Module, values: torch.Tensor) -> None:
    parameters = list(model.parameters())
    with torch.no_grad():
        for part, one in zip(
            torch.split(values, [one.numel() for one in parameters]), parameters, strict=True
        ):
            one.copy_(part.view_as(one))


def _set_gradients(model: nn.Module, values: torch.Tensor) -> None:
    parameters = list(model.parameters())
    for part, one in zip(torch.split(values, [one.numel() for one in parameters]), parameters, strict=True):
        one.grad = part.view_as(one).clone()
