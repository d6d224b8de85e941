"""Ranks whose gradients may come too late."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netstorm.frontends.torch.bounded_loss import BoundedLossState, bounded_loss_hook
from tests.integration.torch.programs.begin import begin, gloo_group

VALUES = 40_000


def steps() -> dict[str, Any]:
    """Train some steps, in the third of which the last rank is late; return the gradients of all."""
    rank, size = begin()
    gloo = gloo_group()
    model = DistributedDataParallel(nn.Linear(VALUES, 1, bias=False))
    state = BoundedLossState()
    model.register_comm_hook(state, bounded_loss_hook)
    found = []
    for step in range(5):
        late = step == 2
        model.zero_grad()
        loss = model(torch.full((1, VALUES), 10.0**rank)).sum()
        if late and rank == size - 1:
            dist.barrier(group=gloo)
        loss.backward()
        if late and rank != size - 1:
            dist.barrier(group=gloo)
        gradient = model.module.weight.grad * size
        found.append(sorted(set(gradient.round().reshape(-1).tolist())))
    left = float(sum(one.abs().sum() for one in state.uncounted.values()))
    return {"gradients": found, "left": left}
