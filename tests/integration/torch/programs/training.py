"""Trainings over NetStorm and over Gloo, in the same processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.integration.torch.programs.begin import begin, gloo_group, same_at_all_ranks


def network() -> nn.Module:
    """Return a model; the same at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 5))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's inputs and labels of a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(16, 20, generator=generator)
    return inputs, torch.randint(0, 5, (16,), generator=generator)


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> list[torch.Tensor]:
    """Train; return the parameters."""
    for step in range(steps):
        inputs, labels = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def like_gloo() -> tuple[dict[str, tuple[float, bool]], bool, str]:
    """Train on both, in one job; return what `_fifty_steps`, `_whole_numbers` and `_batch_norm` do."""
    rank, _ = begin()
    steps = {optimizer: _fifty_steps(rank, optimizer) for optimizer in OPTIMIZERS}
    found = steps, _whole_numbers(rank), _batch_norm()
    dist.destroy_process_group()
    return found


def _fifty_steps(rank: int, optimizer: str) -> tuple[float, bool]:
    """Return the largest difference of a parameter, and whether ranks have the same bits."""
    found = []
    for group in (None, gloo_group()):
        model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.01)
        found.append(train(model, OPTIMIZERS[optimizer](model.parameters()), rank, 50))
    difference = max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))
    return difference, same_at_all_ranks(found[0])


def _whole_numbers(rank: int) -> bool:
    """Sum gradients that are whole numbers; return whether both have the same bits."""
    found = []
    for group in (None, gloo_group()):
        model = DistributedDataParallel(nn.Linear(64, 8, bias=False), process_group=group)
        with torch.no_grad():
            model.module.weight.zero_()
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + rank)
            (model(torch.randint(-4, 5, (8, 64), generator=generator).float())).sum().backward()
        found.append([model.module.weight.grad])
    return torch.equal(found[0][0], found[1][0]) and same_at_all_ranks(found[0])


class _Branches(nn.Module):
    """Uses one of two layers, by rank if it is told so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(20, 5), nn.Linear(20, 5)])

    def forward(self, inputs: torch.Tensor, used: int) -> Any:
        return self.layers[used](inputs)


def features() -> list[str]:
    """Train with what DDP can do; return what differs from Gloo, or between ranks."""
    rank, _ = begin()
    wrong = []
    for name, run in _FEATURES.items():
        found = [[tensor.detach().clone() for tensor in run(rank, group)] for group in (None, gloo_group())]
        close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*found, strict=True))
        wrong += [f"{name}: another result than Gloo's"] * (not close)
        wrong += [f"{name}: ranks differ"] * (not same_at_all_ranks(found[0]))
    dist.destroy_process_group()
    return wrong


def _find_unused(rank: int, group: Any) -> list[torch.Tensor]:
    model = DistributedDataParallel(_Branches(), process_group=group, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(batch(rank, step)[0], (rank + step) % 2 if step < 4 else 0).pow(2).mean().backward()
        optimizer.step()
    return list(model.parameters())


def _static_graph(rank: int, group: Any) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), process_group=group, static_graph=True)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 6)


def _no_sync(rank: int, group: Any) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), process_group=group, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(3):
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                inputs, labels = batch(rank, 3 * step + part)
                nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return list(model.parameters())


def _uneven(rank: int, group: Any) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        train(model, optimizer, rank, 3 + 2 * rank)
    return list(model.parameters())


def _autocast(rank: int, group: Any) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), process_group=group)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 4)


def _bfloat16(rank: int, group: Any) -> list[torch.Tensor]:
    """Gradients of bfloat16, whose sums are rounded otherwise than Gloo's: so small numbers alone."""
    model = DistributedDataParallel(nn.Linear(4, 2, bias=False).to(torch.bfloat16), process_group=group)
    model(torch.full((1, 4), 4.0 * rank, dtype=torch.bfloat16)).sum().backward()
    return [model.module.weight.grad]


def _compiled(rank: int, group: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    model = DistributedDataParallel(network(), process_group=group)
    return train(
        torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters(), lr=0.1), rank, 3
    )


_FEATURES: dict[str, Callable[[int, Any], list[torch.Tensor]]] = {
    "find_unused_parameters": _find_unused,
    "static_graph": _static_graph,
    "no_sync and accumulation": _no_sync,
    "uneven inputs": _uneven,
    "autocast": _autocast,
    "bfloat16": _bfloat16,
    "torch.compile": _compiled,
}


def shards(folder: str) -> list[str]:
    """Train with FSDP2, save a checkpoint and load it; return what is wrong."""
    rank, size = begin()
    wrong = []
    plain, sharded = network(), network()
    for layer in sharded.children():
        fully_shard(layer)
    fully_shard(sharded)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        inputs, labels = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(sharded(inputs), labels).backward()
        optimizer.step()
        reference.zero_grad()  # all ranks' batches in one process
        for each in range(size):
            inputs, labels = batch(each, step)
            (nn.functional.cross_entropy(plain(inputs), labels) / size).backward()
        reference.step()
    for (name, shard), expected in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        full: Any = shard
        wrong += [name] * (not torch.allclose(full.full_tensor(), expected, rtol=1e-4, atol=1e-6))
    state = {"model": sharded.state_dict()}
    save(state, checkpoint_id=folder)
    kept = [parameter.detach().clone() for parameter in sharded.parameters()]
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    load(state, checkpoint_id=folder)
    sharded.load_state_dict(state["model"])
    for one, other in zip(sharded.parameters(), kept, strict=True):
        found: Any = one
        before: Any = other
        wrong += ["checkpoint"] * (not torch.equal(found.to_local(), before.to_local()))
    dist.destroy_process_group()
    return wrong


def functional() -> list[str]:
    """Collectives of compiled programs; return what is wrong."""
    from torch.distributed import _functional_collectives as calls

    rank, size = begin()
    wrong = []
    group: Any = dist.group.WORLD
    mine = torch.full((2, 3), float(rank))
    every = torch.stack([torch.full((2, 3), float(each)) for each in range(size)])
    summed = calls.all_reduce(mine, "sum", group)
    wrong += ["all_reduce"] * (not torch.equal(summed + 0, every.sum(0)))
    wrong += ["not in place"] * (not bool((mine == rank).all()))
    gathered = calls.all_gather_tensor(mine, 0, group)
    wrong += ["all_gather_tensor"] * (not torch.equal(gathered + 0, every.reshape(-1, 3)))
    scattered = calls.reduce_scatter_tensor(torch.ones(2 * size, 3), "avg", 0, group)
    wrong += ["reduce_scatter_tensor"] * (not torch.equal(scattered + 0, torch.ones(2, 3)))
    swapped = calls.all_to_all_single(torch.arange(float(size)) + 10 * rank, None, None, group)
    right = torch.tensor([float(10 * each + rank) for each in range(size)])
    wrong += ["all_to_all_single"] * (not torch.equal(swapped + 0, right))
    wrong += ["broadcast"] * (not bool((calls.broadcast(mine, 1, group) + 0 == 1).all()))
    several = calls.all_reduce_coalesced([mine, mine + 1], "max", group)
    wrong += ["all_reduce_coalesced"] * ([float(one.max()) for one in several] != [size - 1, size])

    def step(tensor: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = calls.all_reduce(tensor * 2, "sum", group)
        return summed + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    wrong += ["a compiled call"] * (not torch.equal(compiled(mine), 2 * every.sum(0) + 1))
    dist.destroy_process_group()
    return wrong


def _batch_norm() -> str:
    """Return what PyTorch says to SyncBatchNorm on the CPU."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    try:
        DistributedDataParallel(model)(torch.ones(2, 4))
    except ValueError as error:
        return str(error)
    return ""
