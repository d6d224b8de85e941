"""Sites that train asynchronously, each in step."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[4] / "examples"))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from digits.data import load
from digits.shards import Shard
from netstorm.frontends.torch import elastic
from netstorm.frontends.torch.asynchronous import MixedSync
from tests.integration.torch.programs.begin import PATIENCE, begin, error_of, same_at_all_ranks


def sites_in_turn(sites: list[str]) -> dict[str, Any]:
    """Site a takes three steps while site b takes none, and then b one; return the values after each."""
    rank = int(os.environ["RANK"])
    os.environ["NETSTORM_SITE"] = sites[rank]
    begin()
    model = nn.Linear(500, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(float(rank + 1))
    training = MixedSync(model, lr=1.0, lamda=0.0)
    values, same = [], []
    site_group = dist.new_subgroups_by_enumeration(
        [[rank for rank, of in enumerate(sites) if of == site] for site in sorted(set(sites))]
    )[0]
    for site, steps in (("a", 3), ("b", 1)):
        for _ in range(steps if sites[rank] == site else 0):
            model.weight.grad = torch.full_like(model.weight, float(rank + 1))
            training.step()
            values.append(float(model.weight[0, -1]))
            same.append(same_at_all_ranks([model.weight], site_group))
        dist.barrier()
    training.pull()
    return {
        "values": values,
        "same": all(same),
        "end": float(model.weight[0, 0]),
        "leads": training.is_leader,
        "steps": training.steps,
    }


def bounded(sites: list[str], steps: int, staleness: int) -> list[int]:
    """Site b waits before each of its steps, and site a does not.

    Returns:
        by how many steps site a was ahead before each of site b's; what else is wrong, as numbers from 100.
    """
    rank = int(os.environ["RANK"])
    os.environ["NETSTORM_SITE"] = sites[rank]
    begin()
    store = dist.distributed_c10d._get_default_store()
    model = nn.Linear(500, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    training = MixedSync(model, lr=1.0, lamda=0.0)
    ahead = []
    for step in range(steps):
        if sites[rank] == "b":
            time.sleep(0.1)
            ahead.append(store.add("steps of a", 0) - step)
        model.weight.grad = torch.full_like(model.weight, -1.0)
        training.step()
        if sites[rank] == "a" and training.is_leader:
            store.add("steps of a", 1)
        least = step + 1 + max(0, step + 1 - staleness)  # its own, and those of the other site
        ahead += [100 + step] * (float(model.weight.min()) < least)
    dist.barrier()
    training.pull()
    ahead += [1000] * (float(model.weight[0, 0]) != 2 * steps)
    return ahead


def digits(sites: list[str], slow: str, factor: int, epochs: int) -> dict[str, Any]:
    """Train on digits in step with DDP, and then with MixedSync, where one site takes a step only once the
    others have taken `factor` more.
    """
    rank = int(os.environ["RANK"])
    os.environ["NETSTORM_SITE"] = sites[rank]
    begin()
    store = dist.distributed_c10d._get_default_store()
    found: dict[str, Any] = {}
    ddp = DistributedDataParallel(_net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for images, labels in _batches(epochs):
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(images), labels).backward()
        optimizer.step()
    found["in step"] = _accuracy(ddp)
    net = _net()
    training = MixedSync(net, lr=0.1)
    counted = next(place for place, site in enumerate(sites) if site != slow)  # the rank whose steps count
    for images, labels in _batches(epochs):
        if sites[rank] == slow and not _reached(store, factor * (training.steps + 1)):
            break
        net.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        training.step()
        if rank == counted:
            store.add("steps", 1)
    if rank == counted:
        store.set("all steps", "taken")
    found["steps"] = training.steps
    dist.barrier()
    training.pull()
    found["mixed"] = _accuracy(net)
    return found


PLACES = 8
"""Elements that are one process's each; the last one says that the job is to end."""


def elastic_sites(folder: str, number: int, site: str) -> dict[str, Any]:
    """Train until all know that the file "end" is in `folder`. Each process adds one to its own elements in
    each step, divided by how many are in the average of its site.

    Args:
        folder: of the test.
        number: of this process.
        site: where it is.
    """
    os.environ["NETSTORM_SITE"] = site
    elastic.init_process_group(PATIENCE)
    model = nn.Linear(PLACES, 4000, bias=False)
    nn.init.zeros_(model.weight)
    training = MixedSync(model, lr=1.0, lamda=0.0)
    seen: tuple[int, ...] = ()
    ending = 0.0
    while ending <= 0:
        ends = (Path(folder) / "end").exists()
        before = model.weight.detach().clone()
        model.weight.grad = torch.zeros_like(model.weight)
        model.weight.grad[:, number] = -1
        model.weight.grad[:, -1] = -float(ends)
        training.step()
        after = model.weight.detach()
        assert (after >= before).all(), "what was pushed is lost"
        assert (after[:, number] == after[0, number]).all()
        ending = after[0, -1].item()
        if training.ranks != seen:
            seen = training.ranks
            print(f"site of {list(seen)}, leads: {training.is_leader}", flush=True)
    (Path(folder) / f"ended {number}").touch()
    while not (Path(folder) / "all ended").exists():
        time.sleep(0.02)
    training.pull()
    values = model.weight.detach()[0].tolist()
    dist.destroy_process_group()
    return {"steps": training.steps, "values": values}


def group_in_an_elastic_job(folder: str) -> str:
    """Return the error for a group in an elastic job."""
    elastic.init_process_group(PATIENCE)
    found = error_of(lambda: MixedSync(_net(), lr=0.1, site_group=dist.group.WORLD))
    dist.destroy_process_group()
    return found


def _reached(store: Any, steps: int) -> bool:
    """Wait until the fast site has taken so many steps; return False if it takes no more."""
    while store.add("steps", 0) < steps:
        if store.check(["all steps"]):
            return bool(store.add("steps", 0) >= steps)
        time.sleep(0.005)
    return True


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _batches(epochs: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    data = load("digits", None)
    shard = Shard(data.train, rank=dist.get_rank(), ranks=dist.get_world_size(), batch_size=16, seed=1)
    for epoch in range(epochs):
        for images, labels in shard.batches(epoch):
            yield _pixels(images, data.white), torch.from_numpy(labels).long()


@torch.no_grad()
def _accuracy(net: nn.Module) -> float:
    data = load("digits", None)
    right = net(_pixels(data.test.images, data.white)).argmax(1) == torch.from_numpy(data.test.labels)
    return float(right.float().mean())


def _pixels(images: Any, white: int) -> torch.Tensor:
    return torch.from_numpy(images.reshape(len(images), -1)).float() / white
