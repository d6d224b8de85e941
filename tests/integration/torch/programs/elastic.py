"""Elastic training, and every call in a job of which ranks are missing."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from netstorm.frontends.torch import checkpoint, elastic
from tests.integration.torch.programs.begin import PATIENCE
from tests.integration.torch.programs.begin import error_of as error_without_arguments


def error_of(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Return the class and message of the error that a call raises; "" if it raises none."""
    return error_without_arguments(functools.partial(call, *arguments, **named))


def train(folder: str, fails_at: int = -1) -> dict[str, Any]:
    """Train until the file "end" is in `folder`, as all ranks see at the same step.

    Args:
        folder: of the test.
        fails_at: before this step, spoil this rank's weights.
    """
    elastic.init_process_group(PATIENCE)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    labels = inputs.sum(1, keepdim=True)
    model = elastic.data_parallel(nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    sampler = elastic.ElasticSampler(len(inputs), 8)
    state = elastic.ElasticState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        sampler=sampler,
        seen=0,
        ends=torch.zeros(1),
        verify_every=5,
    )
    newcomer = elastic.is_newcomer()
    early = error_of(dist.barrier) if newcomer else ""
    while not (step := state.step(), state["ends"].item())[1]:
        if step == fails_at:
            with torch.no_grad():
                next(model.parameters()).add_(1.0)
        print(f"step {step} of {list(state.ranks)}", flush=True)
        batch = sampler.take()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        scheduler.step()
        state["seen"] += len(state.ranks)
        state["ends"].fill_((Path(folder) / "end").exists())
        dist.all_reduce(state["ends"], dist.ReduceOp.MAX)
    print("ended", flush=True)
    parameters = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    dist.destroy_process_group()
    return {
        "newcomer": newcomer,
        "early": early,
        "step": step,
        "parameters": hashlib.sha256(parameters).hexdigest(),
        "learning_rate": scheduler.get_last_lr(),
        "sampler": sampler.state_dict(),
        "seen": state["seen"],
    }


def calls(folder: str) -> dict[str, Any]:
    """Make every call once rank 2 of four has died, of which rank 3 has never come."""
    elastic.init_process_group(PATIENCE)
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    with_dead = dist.new_group([1, 2])
    dist.all_reduce(torch.ones(1))
    print("running", flush=True)
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while elastic.live_ranks() != (0, 1):
        assert time.monotonic() < deadline, elastic.live_ranks()
        time.sleep(0.01)
    mine = torch.full((2,), float(rank + 1))
    found = _reductions(mine) | _copies(mine) | _messages(rank, mine)
    total = mine.clone()
    dist.all_reduce(total, group=pair)
    found["pair"] = total.tolist()
    if rank == 1:
        alone = mine.clone()
        dist.all_reduce(alone, group=with_dead)
        found["with_dead"] = alone.tolist()
    dist.destroy_process_group()
    return found


def _reductions(mine: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for op in (
        dist.ReduceOp.SUM,
        dist.ReduceOp.AVG,
        dist.ReduceOp.MIN,
        dist.ReduceOp.MAX,
        dist.ReduceOp.PRODUCT,
    ):
        total = mine.clone()
        work = dist.all_reduce(total, op, async_op=True)
        work.wait()
        found[f"all_reduce {str(op).rpartition('.')[2]}"] = total.tolist()
        found["contributors"] = sorted(elastic.contributors(work))
    for root in (0, 2):
        total = mine.clone()
        found[f"reduce to {root}"] = error_of(dist.reduce, total, root) or total.tolist()
    part = torch.zeros(1)
    dist.reduce_scatter(part, list(torch.arange(4.0).split(1)))
    found["reduce_scatter"] = part.tolist()
    found["barrier"] = error_of(dist.barrier)
    found["monitored_barrier"] = error_of(dist.monitored_barrier, timeout=PATIENCE)
    return found


def _copies(mine: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rank = dist.get_rank()
    for root in (0, 2):
        tensor = mine.clone()
        found[f"broadcast from {root}"] = error_of(dist.broadcast, tensor, root) or tensor.tolist()
        part = torch.full((1,), -1.0)
        inputs = list(torch.arange(4.0).split(1)) if rank == root else None
        found[f"scatter from {root}"] = error_of(dist.scatter, part, inputs, root) or part.tolist()
        outputs = [torch.full((2,), -1.0) for _ in range(4)] if rank == root else None
        error = error_of(dist.gather, mine, outputs, root)
        found[f"gather to {root}"] = error or [each.tolist() for each in outputs or ()]
    gathered = [torch.full((2,), -1.0) for _ in range(4)]
    dist.all_gather(gathered, mine)
    found["all_gather"] = [each.tolist() for each in gathered]
    return found


def _messages(rank: int, mine: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dead in (2, 3):
        found[f"send to {dead}"] = error_of(dist.send, mine, dead)
        found[f"recv from {dead}"] = error_of(dist.recv, torch.zeros(2), dead)
    got = torch.zeros(2)
    if rank == 0:
        dist.send(mine, 1)
    else:
        found["source"] = dist.recv(got)
    outputs = [torch.zeros(2) for _ in range(4)]
    found["all_to_all"] = error_of(dist.all_to_all, outputs, [mine] * 4)
    found["all_to_all got"] = [each.tolist() for each in outputs[:2]]
    return found


def example(folder: str, arguments: list[str]) -> None:
    """Run the example."""
    examples = Path(__file__).parents[4] / "examples"
    sys.path.insert(0, str(examples))
    sys.argv = ["torch_elastic.py", *arguments]
    os.chdir(folder)
    importlib.import_module("torch_elastic").main()


def churn(folder: str) -> dict[str, Any]:
    """Train a model of several buckets and many chunks until the file "end" is in `folder`.

    All ranks compare their weights after every third step, and the job ends if one has others.
    """
    elastic.init_process_group(PATIENCE)
    layers = nn.Sequential(*(nn.Linear(400, 400) for _ in range(6)))
    model = elastic.data_parallel(layers, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    entries = {"model": model, "optimizer": optimizer, "ends": torch.zeros(1)}
    state = elastic.ElasticState(verify_every=3, repair=False, **entries)
    generator = torch.Generator().manual_seed(dist.get_rank())
    while not (step := state.step(), state["ends"].item())[1]:
        print(f"step {step} of {list(state.ranks)}", flush=True)
        optimizer.zero_grad()
        model(torch.randn(4, 400, generator=generator)).square().mean().backward()
        optimizer.step()
        check_sum()
        state["ends"].fill_((Path(folder) / "end").exists())
        dist.all_reduce(state["ends"], dist.ReduceOp.MAX)
    parameters = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    dist.destroy_process_group()
    return {"step": step, "parameters": hashlib.sha256(parameters).hexdigest()}


def compute(folder: str) -> int:
    """Train with steps that take as long as they have samples, and nothing else; return the last step."""
    elastic.init_process_group(PATIENCE)
    model = elastic.data_parallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = elastic.ElasticSampler(1000, 10)
    state = elastic.ElasticState(model=model, optimizer=optimizer, sampler=sampler, ends=torch.zeros(1))
    while not (step := state.step(), state["ends"].item())[1]:
        print(f"step {step} of {list(state.ranks)}", flush=True)
        batch = sampler.take()
        time.sleep(0.015 * len(batch))
        optimizer.zero_grad()
        model(torch.ones(len(batch), 1)).mean().backward()
        optimizer.step()
        state["ends"].fill_((Path(folder) / "end").exists())
        dist.all_reduce(state["ends"], dist.ReduceOp.MAX)
    dist.destroy_process_group()
    return step


def check_sum() -> None:
    """Sum over many chunks, and check that each element has every contributor once, and nobody twice."""
    marks = torch.full((100_000,), 16 ** dist.get_rank(), dtype=torch.int64)  # a digit for each rank
    work = dist.all_reduce(marks, async_op=True)
    work.wait()
    in_all = set(range(dist.get_world_size()))
    for total in marks.unique().tolist():
        digits = [total >> 4 * rank & 15 for rank in range(dist.get_world_size())]
        assert max(digits) == 1, digits
        in_all &= {rank for rank, times in enumerate(digits) if times}
    assert in_all == elastic.contributors(work), (in_all, elastic.contributors(work))


def save(folder: str) -> dict[str, Any]:
    """Train, and save a checkpoint before every third step, until the file "end" is in `folder`."""
    elastic.init_process_group(PATIENCE)
    model = elastic.data_parallel(nn.Linear(100, 100))
    optimizer = torch.optim.Adam(model.parameters())
    state = elastic.ElasticState(model=model, optimizer=optimizer, ends=torch.zeros(1))
    while not (step := state.step(), state["ends"].item())[1]:
        if step % 3 == 0:
            checkpoint.save(f"{folder}/saved", {"model": model, "optimizer": optimizer}, step=step, keep=3)
        print(f"step {step} of {list(state.ranks)}", flush=True)
        optimizer.zero_grad()
        model(torch.randn(4, 100)).square().mean().backward()
        optimizer.step()
        state["ends"].fill_((Path(folder) / "end").exists())
        dist.all_reduce(state["ends"], dist.ReduceOp.MAX)
    final = {"model": model, "optimizer": optimizer}
    checkpoint.save(f"{folder}/saved", final, step=step).wait()
    loaded = checkpoint.load(f"{folder}/saved")
    assert loaded is not None
    assert loaded.step == step
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state["model"][name], value), name
    dist.destroy_process_group()
    return {"step": step, "files": len(list(loaded.path.glob("*.safetensors")))}
