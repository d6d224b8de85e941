"""Checkpoints of a scheduled training, steps that fail or are left out, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netstorm.frontends.torch import elastic
from netstorm.frontends.torch.scheduled_optimizer import ScheduledOptimizer
from tests.integration.torch.programs.begin import PATIENCE, begin, error_of, same_at_all_ranks


class _Fails(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(_context: Any, values: Any) -> Any:
        return values.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: Any) -> Any:
        raise ArithmeticError("in the midst of a backward pass")


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.fails = False

    def forward(self, values: Any) -> Any:
        values = self.first(values).tanh()
        return self.last(_Fails.apply(values) if self.fails else values)


def _model() -> _Model:
    torch.manual_seed(1)
    return _Model()


def _training(model: nn.Module, **given: Any) -> ScheduledOptimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return ScheduledOptimizer(model, optimizer, **{"least_bytes": 1, **given})


def _backward(model: nn.Module, batch: int) -> None:
    torch.manual_seed(10 * batch + dist.get_rank())
    model(torch.randn(4, 8)).pow(2).mean().backward()


def _train(model: nn.Module, training: ScheduledOptimizer, *batches: int) -> None:
    for batch in batches:
        training.zero_grad()
        _backward(model, batch)
        training.step()


def _same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(*both) for both in zip(one.parameters(), other.parameters(), strict=True))


def saved_and_resumed() -> dict[str, bool]:
    """Save right after a step, whose sums are under way, and load before another one's; return what holds."""
    begin()
    model = _model()
    training = _training(model)
    _train(model, training, 0)
    of_optimizer = copy.deepcopy(training.optimizer.state_dict())
    after_it = copy.deepcopy(training.state_dict())
    _train(model, training, 1)
    of_part = copy.deepcopy(model.first.state_dict())
    saved, state = copy.deepcopy(model.state_dict()), copy.deepcopy(training.state_dict())
    found = {
        "a part is saved after the step": torch.equal(of_part["weight"], saved["first.weight"]),
        "the optimiser is saved after the step": all(
            of_optimizer["state"][place][name].equal(value)
            for place, values in after_it["state"].items()
            for name, value in values.items()
        ),
    }
    _train(model, training, 2, 3)
    training.synchronize()
    resumed = _Model()
    again = _training(resumed)
    _train(resumed, again, 7)
    _backward(resumed, 8)  # its step is left out
    resumed.load_state_dict(saved)
    again.load_state_dict(state)
    found["a step under way is not taken on what is loaded"] = torch.equal(
        resumed.last.weight, saved["last.weight"]
    )
    _train(resumed, again, 2, 3)
    again.close()
    found["training goes on with the same bits"] = _same(model, resumed)
    return found


def left_out() -> dict[str, Any]:
    """Leave out steps whose forward or backward pass has failed, and one that was complete; return what holds
    afterwards.
    """
    begin()
    model, plain = _model(), _model()
    training, expected = _training(model), _training(plain)
    _train(plain, expected, 0, 1, 2)
    expected.close()
    _train(model, training, 0)
    model.fails = True
    errors = [error_of(lambda: _backward(model, 5))]
    model.fails = False
    errors += [error_of(training.step), error_of(lambda: _backward(model, 5))]
    _train(model, training, 1)
    errors.append(error_of(lambda: model(torch.ones(1, 9))))
    training.zero_grad()
    _backward(model, 6)  # complete, and left out by all
    _train(model, training, 2)
    training.close()
    return {"errors": errors, "same": _same(model, plain), "ranks": same_at_all_ranks([*model.parameters()])}


class _Functional(nn.Module):
    """Uses its first child's parameters without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, values: Any) -> Any:
        return self.last(nn.functional.linear(values, self.child.weight, self.child.bias))


class _Counting(torch.optim.SGD):
    """Counts its steps in its parameter groups."""

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


def _functional(way: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = _Functional()
    training = _training(model, whole=(_Functional,) if way == "whole" else (), least_bytes=2**16)
    for batch in range(3):
        if way == "synchronize":
            training.synchronize()
        _train(model, training, batch)
    training.close()
    return [parameter.detach() for parameter in model.parameters()]


def refused() -> dict[str, Any]:
    """Return the errors of what cannot work, by what it is, and whether the ways around them do."""
    begin()
    ways = [_functional("whole"), _functional("synchronize")]
    model = _model()
    training = _training(model)
    found = {
        "functional": error_of(lambda: _functional("")),
        "twice": error_of(lambda: _training(model)),
        "ddp": error_of(lambda: _training(DistributedDataParallel(_model()))),
        "frozen": error_of(lambda: ScheduledOptimizer(_model().requires_grad_(False), training.optimizer)),
        "other optimizer": error_of(lambda: ScheduledOptimizer(_model(), training.optimizer)),
        "its own step": error_of(training.optimizer.step),
    }
    _backward(model, 1)
    found["second"] = error_of(lambda: _backward(model, 2))
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    found["added"] = error_of(training.step)
    training.close()
    _backward(model, 3)
    found["closed"] = str(model.last.weight.grad is not None)
    embedding = nn.Embedding(8, 8, sparse=True)
    sparse = ScheduledOptimizer(embedding, torch.optim.SGD(embedding.parameters(), lr=0.1))
    found["sparse"] = error_of(lambda: embedding(torch.arange(3)).sum().backward())
    del sparse
    layer = nn.Linear(8, 8)
    counting = ScheduledOptimizer(layer, _Counting(layer.parameters(), lr=0.1))
    _train(layer, counting, 1)
    found["counting"] = error_of(counting.synchronize)
    return {**found, "ways": [torch.equal(*both) for both in zip(*ways, strict=True)]}


def rank_fails() -> str:
    """Rank 1 fails in the midst of a backward pass; return the error of rank 0, which goes on training."""
    rank, _ = begin()
    model = _model()
    training = _training(model)
    model.fails = rank == 1
    if rank:
        _train(model, training, 1)
    return error_of(lambda: _train(model, training, 1, 2))


def elastic_job(folder: str) -> str:
    """Return the error in an elastic job."""
    elastic.init_process_group(PATIENCE)
    found = error_of(lambda: _training(_model()))
    dist.destroy_process_group()
    return found
