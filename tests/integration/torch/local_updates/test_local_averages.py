"""HFA, ESync and AsynchronousSGD in real processes: what is averaged or applied when, and over whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn

from netstorm.frontends.torch.asynchronous import AsynchronousSGD
from netstorm.frontends.torch.local_updates import HFA, ESync
from tests.integration.torch.begin import begin, error_of, same_at_all_ranks
from tests.integration.torch.ranks import Ranks, on_ranks
from tests.integration.torch.test_site_mesh import SITES, begin_at, mesh_of_sites


class _Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(1001, dtype=torch.float64))


def _step(model: _Weights, optimizer: torch.optim.Optimizer, gradient: float) -> float:
    model.values.grad = torch.full_like(model.values, gradient)
    optimizer.step()
    return float(model.values[-1])


@on_ranks(4)
def test_hfa_averages_the_site_and_every_k2_th_time_all() -> None:
    """Steps have the gradient -4 (rank + 1)."""
    rank = begin_at(SITES)
    model, mesh = _Weights(), mesh_of_sites()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mine, site = 4.0 * (rank + 1), (8.0, 12.0)[rank % 2]
    with HFA(model, optimizer, k1=2, k2=2, mesh=mesh) as training:
        values = [_step(model, optimizer, -mine) for _ in range(8)]
        training.sync_site()
    first = [mine, 2 * site, 2 * site + mine, 40.0]
    assert values == [*first, *(40 + value for value in first)]
    assert same_at_all_ranks([model.values])
    assert error_of(HFA, model, optimizer, k1=0, k2=1, mesh=mesh).startswith("UsageError: k1=0, k2=1")


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
    assert training.state_dict()["averages"] == 5
    assert same_at_all_ranks([model.values])
    return {"taken": taken, "values": values}


def test_esync_takes_as_many_steps_as_the_state_server_says_and_all_get_the_same_average(
    ranks: Ranks,
) -> None:
    ranks.start(esync, 3)
    answers = ranks.answers()
    expected = 0.0
    for round in range(5):
        steps = [answer["taken"][round] for answer in answers]
        assert all(2 <= count <= (6 if round else 2) for count in steps)
        expected += sum(steps) / 3
        assert [answer["values"][round] for answer in answers] == [pytest.approx(expected)] * 3


@on_ranks(3, CHUNK_SIZE=100)
def test_gradients_are_corrected_by_what_their_own_rank_has_pulled() -> None:
    """By the paper's algorithm 2. One rank pushes and pulls after another, so that the order is known."""
    rank, ranks = begin()
    model = _Weights()
    with torch.no_grad():
        model.values.copy_(torch.linspace(-1, 1, 1001) if rank == 0 else torch.zeros(1001))
    lamda, momentum = 0.5, 0.5
    training = AsynchronousSGD(model, lr=0.25, lamda=lamda, momentum=momentum)
    value: Any = np.linspace(-1, 1, 1001)
    backups, velocity = [value.copy() for _ in range(ranks)], np.zeros(1001)
    for step in range(4):
        for turn in range(ranks):
            if (step + turn) % 3:
                gradient = np.linspace(-1 - step, 1 + turn, 1001)
                if rank == turn:
                    model.values.grad = torch.from_numpy(gradient)
                    training.step()
                corrected = gradient + lamda * gradient**2 * (value - backups[turn])
                velocity = momentum * velocity - 0.25 * corrected
                value = value + velocity
                backups[turn] = value.copy()
            dist.barrier()
    training.pull()
    assert same_at_all_ranks([model.values])
    np.testing.assert_allclose(model.values.detach().numpy(), value, rtol=1e-6, atol=1e-6)


@on_ranks(3)
def test_ranks_train_asynchronously_and_have_the_same_parameters_in_the_end() -> None:
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
    assert losses[-1] < losses[0] / 3
    dist.barrier()
    training.pull()
    assert error_of(AsynchronousSGD, model, lr=0.1, momentum=1.0).startswith("UsageError")
    half = nn.Linear(2, 2, dtype=torch.bfloat16)
    assert error_of(AsynchronousSGD, half, lr=0.1).startswith("UsageError")
    assert same_at_all_ranks([model.weight])
