"""Sums that overlap with the next forward pass, in real processes: bits, checkpoints, failures, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netstorm.frontends.torch import elastic
from netstorm.frontends.torch.scheduled_optimizer import ScheduledOptimizer
from tests.integration.torch.begin import PATIENCE, begin, error_of, same_at_all_ranks, store
from tests.integration.torch.elastic_ranks import ElasticRanks
from tests.integration.torch.ranks import Ranks, on_ranks


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


_OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda of: torch.optim.SGD(of, lr=0.1),
    "momentum": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda of: torch.optim.AdamW(of, lr=0.01),
}


@pytest.mark.slow
@on_ranks(2)
def test_parameters_have_the_bits_of_ddp_and_the_whole_optimiser() -> None:
    """Two ranks' sums are the same in any order."""
    rank, _ = begin()
    for name, optimizer_of in _OPTIMIZERS.items():
        torch.manual_seed(0)
        shared = nn.Linear(20, 20)
        mine = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), shared, nn.Tanh(), shared, nn.Linear(20, 1))
        ddp = DistributedDataParallel(copy.deepcopy(mine))
        theirs = optimizer_of(ddp.parameters())
        training = ScheduledOptimizer(mine, optimizer_of(mine.parameters()), least_bytes=1)
        rates = [torch.optim.lr_scheduler.StepLR(one, 1, 0.9) for one in (theirs, training.optimizer)]
        torch.manual_seed(rank + 1)
        for step in range(4):
            for model, optimizer in ((ddp, theirs), (mine, training)):
                torch.manual_seed(10 * step + rank)
                optimizer.zero_grad()
                with (ddp if model is ddp else training).no_sync():
                    model(torch.randn(8, 20)).pow(2).mean().backward()
                model(torch.randn(8, 20)).pow(2).mean().backward()
                optimizer.step()
            for rate in rates:
                rate.step()
        saved = mine.state_dict()
        for key, value in ddp.module.state_dict().items():
            assert torch.equal(value, saved[key]), (name, key)
        assert same_at_all_ranks(mine.parameters())
        assert error_of(training.step).startswith("UsageError: step() without a backward pass")


@on_ranks(2)
def test_the_next_forward_pass_begins_before_the_last_layers_sum_is_there() -> None:
    """Rank 1 sends nothing of the last layer until rank 0 is in its next forward pass."""
    rank, _ = begin()
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50), nn.Linear(50, 2000))
    training = ScheduledOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), least_bytes=1)
    last, seen = training._units[-1], []
    member: Any = training._group.member  # type: ignore[union-attr]
    submit = member._submit
    held: list[Any] = []
    if rank == 1:
        member._submit = lambda *what: submit(*what) if held else held.append(what)
    model(torch.ones(2, 50)).sum().backward()
    training.step()
    if rank == 0:
        for layer in (model[0], model[1]):
            layer.register_forward_pre_hook(lambda *_: seen.append(last.sums[0][1].is_completed()))  # type: ignore[attr-defined]
        model[1].register_forward_pre_hook(lambda *_: store().set("forward", "begun"))
    else:
        store().wait(["forward"])
        submit(*held[0])
    model(torch.ones(2, 50))
    dist.barrier()
    assert seen == ([] if rank else [False, False])


@on_ranks(2)
def test_training_goes_on_from_what_was_saved_right_after_a_step() -> None:
    """Its sums are under way; what was saved is loaded before another one's."""
    begin()
    model = _model()
    training = _training(model)
    _train(model, training, 0)
    of_optimizer = copy.deepcopy(training.optimizer.state_dict())
    after_it = copy.deepcopy(training.state_dict())
    _train(model, training, 1)
    of_part = copy.deepcopy(model.first.state_dict())
    saved, state = copy.deepcopy(model.state_dict()), copy.deepcopy(training.state_dict())
    assert torch.equal(of_part["weight"], saved["first.weight"])
    for place, values in after_it["state"].items():
        assert all(of_optimizer["state"][place][name].equal(value) for name, value in values.items())
    _train(model, training, 2, 3)
    training.synchronize()
    resumed = _Model()
    again = _training(resumed)
    _train(resumed, again, 7)
    _backward(resumed, 8)  # its step is left out
    resumed.load_state_dict(saved)
    again.load_state_dict(state)
    assert torch.equal(resumed.last.weight, saved["last.weight"]), "a step is taken on what is loaded"
    _train(resumed, again, 2, 3)
    again.close()
    assert _same(model, resumed)


@on_ranks(2)
def test_steps_that_fail_or_are_left_out_leave_no_trace() -> None:
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
    failed, early, second, forward = errors
    assert "in the midst of a backward pass" in failed
    assert early.startswith("UsageError: step() without a backward pass")
    assert second.startswith("UsageError: a second backward pass before step()")
    assert forward.startswith("RuntimeError")
    assert _same(model, plain)
    assert same_at_all_ranks(model.parameters())


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


@on_ranks(2)
def test_what_cannot_work_is_refused_and_the_ways_around_it_work() -> None:
    begin()
    assert all(map(torch.equal, _functional("whole"), _functional("synchronize")))
    model = _model()
    training = _training(model)
    embedding, layer = nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8)
    optimizer = training.optimizer

    def second() -> None:
        for batch in (1, 2):
            _backward(model, batch)

    def added() -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        training.step()

    def sparse() -> None:
        _training_of_it = ScheduledOptimizer(embedding, torch.optim.SGD(embedding.parameters(), lr=0.1))
        embedding(torch.arange(3)).sum().backward()

    def counting() -> None:
        of_layer = ScheduledOptimizer(layer, _Counting(layer.parameters(), lr=0.1))
        _train(layer, of_layer, 1)
        of_layer.synchronize()

    for said, call in {
        "its module has not been called since the last step: name the class": lambda: _functional(""),
        "the model has a ScheduledOptimizer already": lambda: _training(model),
        "a model in DistributedDataParallel": lambda: _training(DistributedDataParallel(_model())),
        "has no parameters that need a gradient": lambda: ScheduledOptimizer(
            _model().requires_grad_(False), optimizer
        ),
        "expected an optimizer of exactly the model's trained parameters": lambda: ScheduledOptimizer(
            _model(), optimizer
        ),
        "call the step() of ScheduledOptimizer": optimizer.step,
        "a second backward pass before step()": second,
        "the optimizer has got other parameters": added,
        "has a sparse gradient": sparse,
        "_Counting changes 'count' of its parameter groups": counting,
    }.items():
        assert said in (error := error_of(call)), error
    training.close()
    _backward(model, 3)
    assert model.last.weight.grad is not None


def rank_fails() -> str:
    """Rank 1 fails in the midst of a backward pass; return the error of rank 0, which goes on training."""
    rank, _ = begin()
    model = _model()
    training = _training(model)
    model.fails = rank == 1
    if rank:
        _train(model, training, 1)
    return error_of(lambda: _train(model, training, 1, 2))


def test_a_rank_that_fails_in_its_backward_pass_is_named_at_the_others(ranks: Ranks) -> None:
    ranks.start(rank_fails, 2)
    assert all(ranks.end(rank).code for rank in range(2))  # the job has failed
    error = ranks.answer(0)
    assert error.startswith("NodeFailed")
    assert "in the midst of a backward pass" in error


def elastic_job(folder: str) -> str:
    """Return the error in an elastic job."""
    elastic.init_process_group(PATIENCE)
    found = error_of(lambda: _training(_model()))
    dist.destroy_process_group()
    return found


def test_an_elastic_job_is_refused(forker, tmp_path):
    with ElasticRanks(forker, tmp_path, begin=1, elastic="1:2") as job:
        job.start("only", 0, elastic_job)
        assert "ScheduledOptimizer in an elastic job (NETSTORM_ELASTIC)" in job.answer("only")
        job.end()
