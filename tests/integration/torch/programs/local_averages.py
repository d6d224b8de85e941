"""Ranks that train alone and average: HFA over Gloo inside sites and NetStorm across, ESync over NetStorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from netstorm.frontends.torch.asynchronous import AsynchronousSGD
from netstorm.frontends.torch.local_updates import HFA, ESync
from tests.integration.torch.programs.begin import begin, error_of, same_at_all_ranks
from tests.integration.torch.programs.sites import begin_at, mesh_of_sites


class _Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(1001, dtype=torch.float64))


def _step(model: _Weights, optimizer: torch.optim.Optimizer, gradient: float) -> float:
    model.values.grad = torch.full_like(model.values, gradient)
    optimizer.step()
    return float(model.values[-1])


def hfa(sites: list[str]) -> dict[str, Any]:
    """Take steps with the gradient -(rank + 1) * 4; return the value after each."""
    rank = begin_at(sites)
    model = _Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with HFA(model, optimizer, k1=2, k2=2, mesh=mesh_of_sites()) as training:
        values = [_step(model, optimizer, -4.0 * (rank + 1)) for _ in range(8)]
        training.sync_site()
    refused = error_of(lambda: HFA(model, optimizer, k1=0, k2=1, mesh=training._mesh))
    return {"values": values, "same": same_at_all_ranks([model.values]), "refused": refused}


def esync() -> dict[str, Any]:
    """Take steps with the gradient -1 for five averages; return the steps and the value of each."""
    begin()
    model = _Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    taken, values = [], []
    training = ESync(model, optimizer, least_steps=2, most_steps=6)
    for averages in range(1, 6):
        with training:  # entering again compares the number of averages, not of steps
            count, value = 0, 0.0
            while training.averages < averages:
                value = _step(model, optimizer, -1.0)
                count += 1
        taken.append(count)
        values.append(value)
    saved = training.state_dict()
    early = error_of(lambda: (_step(model, optimizer, 0.0), training.state_dict()))
    same = same_at_all_ranks([model.values])
    return {"taken": taken, "values": values, "same": same, "averages": saved["averages"], "early": early}


def asynchronous(lamda: float, momentum: float) -> dict[str, Any]:
    """Push and pull one rank after the other, so that the order is known; return the values in the end."""
    rank, ranks = begin()
    model = _Weights()
    with torch.no_grad():
        model.values.copy_(torch.linspace(-1, 1, 1001) if rank == 0 else torch.zeros(1001))
    training = AsynchronousSGD(model, lr=0.25, lamda=lamda, momentum=momentum)
    for step in range(4):
        for turn in range(ranks):
            if rank == turn and (step + rank) % 3:
                model.values.grad = torch.linspace(-1 - step, 1 + rank, 1001, dtype=torch.float64)
                training.step()
            dist.barrier()
    training.pull()
    return {"values": model.values.tolist(), "same": same_at_all_ranks([model.values])}


def descending() -> dict[str, Any]:
    """Train asynchronously on a square; return its first and its last value."""
    rank, _ = begin()
    torch.manual_seed(rank)
    model = nn.Linear(20, 1, bias=False)
    inputs = torch.randn(64, 20)
    training = AsynchronousSGD(model, lr=0.02)
    losses = []
    for _ in range(30):
        model.zero_grad()
        loss = (model(inputs) ** 2).mean()
        loss.backward()
        losses.append(float(loss))
        training.step()
    dist.barrier()
    training.pull()
    refused = [
        error_of(lambda: AsynchronousSGD(model, lr=0.1, momentum=1.0)),
        error_of(lambda: AsynchronousSGD(nn.Linear(2, 2, dtype=torch.bfloat16), lr=0.1)),
    ]
    same = same_at_all_ranks([model.weight])
    return {"first": losses[0], "last": losses[-1], "same": same, "refused": refused}
