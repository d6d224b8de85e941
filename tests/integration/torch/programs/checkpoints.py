"""Programs of ranks that save and load checkpoints."""

from __future__ import annotations

import hashlib
import json
import signal
from typing import Any

import torch
import torch.distributed as dist

from netstorm.checkpoint.jobs import wait_for_last_saving
from netstorm.frontends.torch import checkpoint
from tests.integration.torch.programs.begin import begin, error_of


def _model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 40), torch.nn.BatchNorm1d(40), torch.nn.Dropout(0.2), torch.nn.Linear(40, 1)
    )


def _digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in model.parameters():
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def train(path: str, steps: int, save_at: int = -1) -> Any:
    """Train from the newest checkpoint, if there is one; return digests of each step from then on.

    A job that saves a checkpoint waits at its end, to be killed.
    """
    rank, _ = begin()
    model = _model()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    torch.manual_seed(100 + rank)
    loaded = checkpoint.load(path, missing_ok=True)
    first = 0
    if loaded is not None:
        loaded.restore(objects)
        first = loaded.state["step"] + 1
        if loaded.own is not None:
            torch.set_rng_state(loaded.own["rng"])
    digests = []
    for step in range(first, steps):
        data = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        ddp(data).square().mean().backward()
        optimizer.step()
        schedule.step()
        digests.append(_digest(model))
        if step == save_at:
            own = {"rng": torch.get_rng_state()}
            checkpoint.save(path, {**objects, "step": step}, own=own, step=step)
    if save_at >= 0:
        wait_for_last_saving()
        print(json.dumps(digests), "are the digests", flush=True)
        signal.pause()
    dist.destroy_process_group()
    return {"first": first, "own": loaded is not None and loaded.own is not None, "digests": digests}


def misuse(path: str) -> Any:
    """Try what is refused."""
    rank, _ = begin()
    same = {"weight": torch.arange(1000.0)}
    found = {
        "none": error_of(lambda: checkpoint.load(path)),
        "plain": error_of(lambda: checkpoint.save(path, {**same, "epoch": rank})),
        "shapes": error_of(lambda: checkpoint.save(path, {"weight": torch.zeros(rank + 1)})),
        "step": error_of(lambda: checkpoint.save(path, same, step=rank)),
        "sparse": error_of(lambda: checkpoint.save(path, {"weight": torch.eye(3).to_sparse()})),
        "own": error_of(lambda: checkpoint.save(path, same, own={}, shares=False)),
        "keep": error_of(lambda: checkpoint.save(path, same, keep=0)),
    }
    # Ranks whose folders differ, as without a file system in common.
    apart = f"{path}/apart{rank}"
    saving = checkpoint.save(apart, same, timeout_s=0.5)
    found["apart"] = error_of(saving.wait)
    checkpoint.save(apart, same, shares=False).wait()
    dist.barrier()
    found["alone"] = error_of(lambda: checkpoint.load(apart))
    loaded = checkpoint.load(apart, broadcast=True)
    assert loaded is not None
    found["sent"] = loaded.state["weight"].sum().item()
    checkpoint.save(path, {"mean": torch.full((3,), float(rank)), **same}).wait()
    loaded = checkpoint.load(path)
    assert loaded is not None
    found["mean"] = loaded.state["mean"].tolist()
    dist.destroy_process_group()
    return found
