"""Asynchronous training that saves and loads checkpoints.

With a momentum of 1/2 and gradients of -1 a value and its momentum are 2n together after n pushes. So a state
tells whether all that is in it is of the same moment.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from netstorm.frontends.torch import checkpoint, elastic
from netstorm.frontends.torch.asynchronous import AsynchronousSGD
from tests.integration.torch.programs.begin import PATIENCE, begin, error_of


class _Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(700, 4, dtype=torch.float64))
        self.small = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.single = nn.Parameter(torch.zeros(3, dtype=torch.float32))


def _make(path: str, *, newcomer: bool = False) -> tuple[_Weights, AsynchronousSGD, Any]:
    """Return a model in training, and what it has loaded."""
    model = _Weights()
    loaded = None if newcomer else checkpoint.load(path, missing_ok=True)
    state = None if loaded is None else loaded.state["training"]
    return model, AsynchronousSGD(model, lr=1.0, momentum=0.5, lamda=0.0, state=state), loaded


def _step(model: _Weights, training: AsynchronousSGD, gradient: float = -1.0) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    training.step()


def _pushes(state: dict[str, Any]) -> tuple[float, float]:
    """Return the least and the largest number of pushes in a state, by its values and momenta."""
    pushes = [(value + state["momenta"][name]).double() / 2 for name, value in state["parameters"].items()]
    for one in pushes:
        assert (one - one.round()).abs().max() < 1e-4, one
    largest = max(float(one.max()) for one in pushes)
    assert round(largest) == state["updates"].max()
    return min(float(one.min()) for one in pushes), largest


def saved_together(path: str, steps: int) -> dict[str, Any]:
    """Train, save, and train on."""
    _, ranks = begin()
    model, training, loaded = _make(path)
    at_first = _pushes(training.state_dict())
    for _ in range(steps):
        _step(model, training)
    checkpoint.save(path, {"training": training, "steps": steps}, keep=1).wait(60)
    for _ in range(3):
        _step(model, training)
    dist.barrier()
    found = {
        "loaded": None if loaded is None else (loaded.step, loaded.world_size, loaded.state["steps"]),
        "at_first": at_first,
        "at_last": _pushes(training.state_dict()),
        "other_model": error_of(
            lambda: AsynchronousSGD(nn.Linear(2, 2), 0.1, state=checkpoint.load(path).state["training"])  # type: ignore[union-attr]
        ),
        "no_state": error_of(lambda: AsynchronousSGD(model, 0.1, state={"parameters": {}})),
        "late": error_of(lambda: training.load_state_dict({})),
    }
    dist.destroy_process_group()
    return {**found, "ranks": ranks}


def saved_by_one(folder: str, path: str, number: int) -> dict[str, Any]:
    """Train in an elastic job until the file "end" is there, and save after every fifth step.

    Args:
        folder: of the job.
        path: of the checkpoints.
        number: of this process.
    """
    elastic.init_process_group(PATIENCE)
    model, training, loaded = _make(path, newcomer=elastic.is_newcomer())
    at_first = None if loaded is None else _pushes(training.state_dict())
    wrote = []
    while not (Path(folder) / "end").exists():
        _step(model, training)
        if training.steps % 5 == 0:
            state = {"training": training, "steps": training.steps, "by": number}
            saving = checkpoint.save(path, state, step=training.steps, keep=2)
            if saving.wait(60) != Path(path):
                wrote.append(saving.step)
                print("wrote", saving.step, flush=True)
    (Path(folder) / f"ended {number}").touch()
    while not (Path(folder) / "all ended").exists():
        time.sleep(0.02)
    own = error_of(lambda: checkpoint.save(path, {"training": training}, own={}))
    dist.destroy_process_group()
    step = None if loaded is None else loaded.step
    return {"wrote": wrote, "loaded": step, "at_first": at_first, "own": own}
