"""Models of all kinds under `ScheduledOptimizer`, beside a plain loop that sums each gradient by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from netstorm.frontends.torch.scheduled_optimizer import ScheduledOptimizer
from tests.integration.torch.begin import begin
from tests.integration.torch.ranks import on_ranks

_STEPS = 3


class _Branches(nn.Module):
    """Of three layers, rank 0 never uses the second one, and nobody the third one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, values: Any) -> Any:
        values = self.first(values).tanh()
        return self.second(values) if dist.get_rank() else values


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, values: Any) -> Any:
        return self.head(self.inner(self.embedding(values.argmax(-1))))


class _Attention(nn.Module):
    """Layers that use the parameters of layers inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2
        )
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, values: Any) -> Any:
        sequence = values.unsqueeze(0)
        sequence = self.decoder(sequence, self.encoder(sequence))
        return self.attention(sequence, sequence, sequence, need_weights=False)[0]


class _Listed(nn.Module):
    """Parameters in lists, which cannot be called, and one of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.inner = nn.Linear(8, 8)
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(2))
        self.named = nn.ParameterDict({"bias": torch.zeros(8)})

    def forward(self, values: Any) -> Any:
        for weight in self.weights:
            values = (values @ weight).tanh() * self.scale
        return self.inner(values) + self.named["bias"]


class _Recomputed(nn.Module):
    """All layers but the first one are computed again in the backward pass, in one of two ways."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, values: Any) -> Any:
        values = self.layers[0](values)
        for layer in self.layers[1:]:
            values = checkpoint(layer, values, use_reentrant=self.reentrant).tanh()
        return values


class _Orthogonal(torch.optim.Optimizer):
    """Has a product of matrices in its step, which autocast would compute in 16 bits."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    matrix = one.grad.reshape(len(one), -1)
                    one.sub_(group["lr"] * (matrix @ matrix.T @ matrix).reshape(one.shape))


def _spectral() -> nn.Module:
    return nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(8, 8)), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    )


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def _adamw(parameters: Any, rate: Any = 0.05) -> Any:
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.1, foreach=False)


@dataclass(frozen=True)
class _Case:
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], Any] = _adamw
    clip: float = 0.0
    forward: Callable[[], Any] = nullcontext
    evaluation: Callable[[], Any] = torch.no_grad


def _bfloat16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


_CASES = {
    "unused": _Case(_Branches),
    "tied": _Case(_Tied),
    "attention": _Case(_Attention),
    "spectral norm": _Case(_spectral),
    "lists": _Case(_Listed),
    "checkpointed": _Case(lambda: _Recomputed(reentrant=False)),
    "checkpointed, reentrant": _Case(lambda: _Recomputed(reentrant=True)),
    "clipped": _Case(_layers, clip=0.05),
    "inference mode": _Case(_layers, evaluation=torch.inference_mode),
    "autocast": _Case(_layers, _Orthogonal, forward=_bfloat16, evaluation=_bfloat16),
    "rate in a tensor": _Case(_layers, lambda of: _adamw(of, torch.tensor(0.05))),
}


def _plain_step(model: nn.Module, optimizer: Any, clip: float) -> float:
    """Average each gradient that there is at some rank, and take a step; return the norm."""
    size = dist.get_world_size()
    for parameter in model.parameters():
        given = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(given)
        if given:
            average = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / size
            dist.all_reduce(average)
            parameter.grad = average
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip)) if clip else 0.0
    optimizer.step()
    return norm


def _trained(case: _Case, model: nn.Module, *, scheduled: bool) -> list[torch.Tensor]:
    """Train with an evaluation after some steps; return all that was found, and the parameters."""
    optimizer = case.optimizer(model.parameters())
    training = ScheduledOptimizer(model, optimizer, least_bytes=1) if scheduled else None
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found = []
    for step in range(_STEPS):
        (training or optimizer).zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        with case.forward():
            loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        if training is None:
            norm = _plain_step(model, optimizer, case.clip)
        else:
            norm = float(training.clip_grad_norm_(case.clip)) if case.clip else 0.0
            training.step()
        rate.step()
        found += [loss.detach(), torch.tensor(norm)]
        if step != 1:
            model.eval()
            with case.evaluation():
                found.append(model(torch.ones(4, 8)).detach().clone())
            model.train()
    if training is not None:
        training.close()
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.slow
@on_ranks(2)
def test_models_of_all_kinds_get_the_bits_of_a_plain_loop() -> None:
    """Two ranks' sums are the same in any order."""
    begin()
    for name, case in _CASES.items():
        torch.manual_seed(1)
        model = case.model()
        plain = _trained(case, copy.deepcopy(model), scheduled=False)
        scheduled = _trained(case, model, scheduled=True)
        assert len(plain) == len(scheduled)
        assert all(map(torch.equal, plain, scheduled)), name
