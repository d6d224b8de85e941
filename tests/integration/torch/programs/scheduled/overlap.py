"""Training with sums that overlap with the next forward pass, beside DDP."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netstorm.frontends.torch.scheduled_optimizer import ScheduledOptimizer
from tests.integration.torch.programs.begin import begin, error_of, same_at_all_ranks

_OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda of: torch.optim.SGD(of, lr=0.1),
    "momentum": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda of: torch.optim.AdamW(of, lr=0.01),
}


def beside_ddp() -> dict[str, Any]:
    """Train both with two ranks, whose sums are the same in any order; return where they differ."""
    rank, _ = begin()
    differing: list[str] = []
    found: dict[str, Any] = {}
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
        differing += [
            f"{name}: {key}"
            for key, value in ddp.module.state_dict().items()
            if not torch.equal(value, saved[key])
        ]
        early, same = error_of(training.step), same_at_all_ranks(list(mine.parameters()))
        found = {"differing": differing, "same": same, "early": early}
    return found


def next_forward() -> list[bool]:
    """Rank 1 sends nothing of the last layer until rank 0 is in its next forward pass. Return, at rank 0, for
    each layer that begins it whether the last layer's sum was there.
    """
    rank, _ = begin()
    store = dist.distributed_c10d._get_default_store()
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
        model[1].register_forward_pre_hook(lambda *_: store.set("forward", "begun"))
    else:
        store.wait(["forward"])
        submit(*held[0])
    model(torch.ones(2, 50))
    dist.barrier()
    return seen
