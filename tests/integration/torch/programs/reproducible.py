"""Training whose bits depend on the order in which values are added, with ranks that come at other times."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from netstorm.frontends.torch.asynchronous import AsynchronousSGD
from netstorm.frontends.torch.gradient_codecs import CodecHookState
from tests.integration.torch.programs.begin import begin, error_of


def train(*, backwards: bool) -> dict[str, Any]:
    """Return the digest of what was summed and trained; ranks are late in ascending or descending order."""
    torch.use_deterministic_algorithms(mode=True)
    rank, size = begin()

    def be_late() -> None:
        time.sleep(0.01 * (size - 1 - rank if backwards else rank))

    be_late()
    groups: list[Any] = [dist.new_group(ranks) for ranks in ([0, 1, 2], [1, 2, 3], None)]
    if backwards:
        groups.reverse()  # keys of groups come to the scheduler in another order
    found = {}
    for group in groups:
        if dist.get_rank(group) >= 0:
            values = values_of(rank, 40_000)
            be_late()
            dist.all_reduce(values, group=group)
            found[dist.get_world_size(group), dist.get_process_group_ranks(group)[0]] = values
    part = torch.empty(5000)
    be_late()
    dist.reduce_scatter_tensor(part, values_of(rank, 5000 * size))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
    trained: Any = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        be_late()
        (trained(values_of(rank, 640).reshape(10, 64).clamp(-1, 1)) ** 2).mean().backward()
        optimizer.step()
    digest = hashlib.sha256()
    for tensor in (*(found[key] for key in sorted(found)), part, *model.parameters()):
        digest.update(tensor.detach().numpy().tobytes())
    refused = [
        error_of(lambda: AsynchronousSGD(model, lr=0.1)),
        error_of(lambda: CodecHookState("auto", model)),
    ]
    dist.destroy_process_group()
    return {"digest": digest.hexdigest(), "refused": refused}


def values_of(rank: int, count: int) -> torch.Tensor:
    """Return values of many magnitudes, the same in each run."""
    chance = torch.Generator().manual_seed(rank)
    magnitudes = 10.0 ** torch.randint(-4, 4, (count,), generator=chance)
    return torch.randn(count, generator=chance) * magnitudes


def refused() -> str:
    """Return the error of a group that cannot be what PyTorch asks for."""
    torch.use_deterministic_algorithms(mode=True)
    return error_of(begin)
