"""Asynchronous training in elastic jobs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from netstorm.frontends.torch import elastic
from netstorm.frontends.torch.asynchronous import AsynchronousSGD
from tests.integration.torch.programs.begin import PATIENCE, error_of

PLACES = 8
"""Elements that are one process's each, over and over."""


class _Weights(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(value)


def counts(folder: str, number: int) -> dict[str, Any]:
    """Add ones to this process's own elements until the file "end" is in `folder`; return the sums.

    Args:
        folder: of the test.
        number: of this process.
    """
    elastic.init_process_group(PATIENCE)
    newcomer = elastic.is_newcomer()
    model = _Weights(torch.full((4000, PLACES), 99.0 if newcomer else 0.0))
    training = AsynchronousSGD(model, lr=1.0, lamda=0.0)
    at_first = model.values.detach().amax(0).tolist()
    before = model.values.detach().clone()
    early = error_of(dist.barrier) if newcomer else ""
    live: tuple[int, ...] = ()
    while not (Path(folder) / "end").exists():
        if elastic.live_ranks() != live:
            live = elastic.live_ranks()
            print("with ranks", live, flush=True)
        model.values.grad = torch.zeros(4000, PLACES)
        model.values.grad[:, number] = -1
        training.step()
        found = model.values.detach().clone()
        assert (found[:, number] == training.steps).all(), (training.steps, found[:3])
        assert (found >= before).all()
        before = found
        print("confirmed", training.steps, flush=True)
    (Path(folder) / f"ended {number}").touch()
    while not (Path(folder) / "all ended").exists():
        time.sleep(0.02)
    training.pull()
    values = model.values.detach()
    dist.destroy_process_group()
    return {
        "steps": training.steps,
        "early": early,
        "at_first": at_first,
        "least": values.amin(0).tolist(),
        "most": values.amax(0).tolist(),
    }


def alone(folder: str, number: int) -> dict[str, Any]:
    """Rank 1 trains alone, and the others own parameters; return how far the values were from PyTorch's.

    The file "steps" has two numbers: how many steps to take, and how many steps without a gradient others
    have taken before the next one.

    Args:
        folder: of the test.
        number: of this process.
    """
    elastic.init_process_group(PATIENCE)
    rank = dist.get_rank()
    torch.manual_seed(number)
    model = _Weights(torch.rand(3001))
    training = AsynchronousSGD(model, lr=0.25, momentum=0.5, lamda=0.0)
    values = nn.Parameter(model.values.detach().clone())
    expected = torch.optim.SGD([values], lr=0.25, momentum=0.5)
    worst, others = 0.0, 0
    model.values.grad = torch.zeros(3001)
    training.step()  # it takes part
    while not (Path(folder) / "end").exists():
        wanted, taken = map(int, (Path(folder) / "steps").read_text().split())
        if rank == 1 and training.steps <= wanted:
            while others < taken:
                others, values.grad = others + 1, torch.zeros(3001)
                expected.step()
            model.values.grad = torch.linspace(-1, training.steps, 3001)
            values.grad = model.values.grad.clone()
            expected.step()
            training.step()
            worst = max(worst, float((model.values - values).abs().max()))
            print("step", training.steps - 1, flush=True)
        else:
            print("with ranks", elastic.live_ranks(), flush=True)
            time.sleep(0.02)
    dist.destroy_process_group()
    return {"worst": worst}
