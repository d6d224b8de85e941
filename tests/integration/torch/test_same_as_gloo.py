"""Trainings over NetStorm give what they give over Gloo in the same processes, with all that DDP can do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.integration.torch.begin import begin, error_of, gloo_group, same_at_all_ranks
from tests.integration.torch.ranks import on_ranks


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


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], float]] = {
    "SGD": (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 1e-5),
    "AdamW": (lambda parameters: torch.optim.AdamW(parameters, lr=0.01), 2e-4),
}
"""With the rounding of parameters of about 1 after 50 steps; AdamW divides by the root of tiny gradients."""


@on_ranks(4)
def test_fifty_steps_end_as_over_gloo_with_the_same_bits_at_all_ranks_and_whole_numbers_with_gloos() -> None:
    rank, _ = begin()
    gloo = gloo_group()
    for make, rounding in OPTIMIZERS.values():
        found = []
        for group in (None, gloo):
            model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.01)
            found.append(train(model, make(model.parameters()), rank, 50))
        assert max(float((one - other).abs().max()) for one, other in zip(*found, strict=True)) < rounding
        assert same_at_all_ranks(found[0])
    found = []
    for group in (None, gloo):
        model = DistributedDataParallel(nn.Linear(64, 8, bias=False), process_group=group)
        with torch.no_grad():
            model.module.weight.zero_()
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + rank)
            (model(torch.randint(-4, 5, (8, 64), generator=generator).float())).sum().backward()
        found.append([model.module.weight.grad])
    assert torch.equal(found[0][0], found[1][0])
    assert same_at_all_ranks(found[0])
    # PyTorch itself has no synchronised batch norm on the CPU.
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    said = error_of(lambda: DistributedDataParallel(synchronised)(torch.ones(2, 4)))
    assert said == "ValueError: SyncBatchNorm layers only work with GPU modules"
    dist.destroy_process_group()


class _Branches(nn.Module):
    """Uses one of two layers, by rank if it is told so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(20, 5), nn.Linear(20, 5)])

    def forward(self, inputs: torch.Tensor, used: int) -> Any:
        return self.layers[used](inputs)


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


def _shards(rank: int, size: int, folder: str) -> None:
    """Train with FSDP2, save a checkpoint and load it."""
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
        assert torch.allclose(full.full_tensor(), expected, rtol=1e-4, atol=1e-6), name
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
        assert torch.equal(found.to_local(), before.to_local()), "checkpoint"


def _functional(rank: int, size: int) -> None:
    """Collectives of compiled programs."""
    group: Any = dist.group.WORLD
    mine = torch.full((2, 3), float(rank))
    every = torch.stack([torch.full((2, 3), float(each)) for each in range(size)])
    summed = functional.all_reduce(mine, "sum", group)
    assert torch.equal(summed + 0, every.sum(0)), "all_reduce"
    assert bool((mine == rank).all()), "not in place"
    gathered = functional.all_gather_tensor(mine, 0, group)
    assert torch.equal(gathered + 0, every.reshape(-1, 3)), "all_gather_tensor"
    scattered = functional.reduce_scatter_tensor(torch.ones(2 * size, 3), "avg", 0, group)
    assert torch.equal(scattered + 0, torch.ones(2, 3)), "reduce_scatter_tensor"
    swapped = functional.all_to_all_single(torch.arange(float(size)) + 10 * rank, None, None, group)
    right = torch.tensor([float(10 * each + rank) for each in range(size)])
    assert torch.equal(swapped + 0, right), "all_to_all_single"
    assert bool((functional.broadcast(mine, 1, group) + 0 == 1).all()), "broadcast"
    several = functional.all_reduce_coalesced([mine, mine + 1], "max", group)
    assert [float(one.max()) for one in several] == [size - 1, size], "all_reduce_coalesced"

    def step(tensor: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = functional.all_reduce(tensor * 2, "sum", group)
        return summed + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(mine), 2 * every.sum(0) + 1), "a compiled call"


@pytest.mark.slow
@on_ranks(3)
def test_all_that_ddp_fsdp_and_compiled_collectives_can_do_gives_what_it_gives_over_gloo(folder: str) -> None:
    rank, size = begin()
    gloo = gloo_group()
    for name, run in _FEATURES.items():
        ours, theirs = ([tensor.detach().clone() for tensor in run(rank, group)] for group in (None, gloo))
        close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
        assert close, name
        assert same_at_all_ranks(ours), name
    _shards(rank, size, f"{folder}/checkpoint")
    _functional(rank, size)
    dist.destroy_process_group()
