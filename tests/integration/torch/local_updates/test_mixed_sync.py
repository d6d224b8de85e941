"""MixedSync in real processes: sites train asynchronously, each in step; what a site pushes, who waits."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netstorm.frontends.torch import elastic
from netstorm.frontends.torch.asynchronous import MixedSync
from tests.integration.forking import ROOT
from tests.integration.torch.begin import PATIENCE, begin, error_of, same_at_all_ranks, store
from tests.integration.torch.elastic_ranks import ElasticRanks
from tests.integration.torch.ranks import on_ranks

sys.path.insert(0, str(ROOT / "examples"))

from digits.data import load
from digits.shards import Shard


def begin_at(sites: str) -> tuple[int, str]:
    """Create the default group; return this process's rank and site."""
    rank = int(os.environ["RANK"])
    os.environ["NETSTORM_SITE"] = sites[rank]
    begin()
    return rank, sites[rank]


@on_ranks(4)
def test_a_site_pushes_its_average_and_goes_on_while_the_other_takes_no_step() -> None:
    rank, mine = begin_at("abab")
    model = nn.Linear(500, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(float(rank + 1))
    training = MixedSync(model, lr=1.0, lamda=0.0)
    values = []
    site_group = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    for site, steps in (("a", 3), ("b", 1)):
        for _ in range(steps if mine == site else 0):
            model.weight.grad = torch.full_like(model.weight, float(rank + 1))
            training.step()
            values.append(float(model.weight[0, -1]))
            assert same_at_all_ranks([model.weight], site_group)
        dist.barrier()
    training.pull()
    # Site a has the gradients 1 and 3, site b 2 and 4; the parameters begin with rank 0's, which are 1.
    assert values == ([-1.0, -3.0, -5.0] if mine == "a" else [-8.0])
    assert float(model.weight[0, 0]) == -8.0
    assert training.is_leader == (rank < 2)
    assert training.steps == len(values)


@on_ranks(4, NETSTORM_STALENESS=1)
def test_a_site_is_ahead_of_the_slowest_by_no_more_than_the_bound() -> None:
    """Site b waits before each of its steps, and site a does not."""
    _, site = begin_at("abab")
    model, steps = nn.Linear(500, 1, bias=False), 4
    with torch.no_grad():
        model.weight.zero_()
    training = MixedSync(model, lr=1.0, lamda=0.0)
    for step in range(steps):
        if site == "b":
            time.sleep(0.1)
            assert store().add("steps of a", 0) - step <= 1
        model.weight.grad = torch.full_like(model.weight, -1.0)
        training.step()
        if site == "a" and training.is_leader:
            store().add("steps of a", 1)
        assert float(model.weight.min()) >= 2 * step + 1  # its own, and those of the other site but for one
    dist.barrier()
    training.pull()
    assert float(model.weight[0, 0]) == 2 * steps


@pytest.mark.slow
@on_ranks(3)
def test_digits_are_learnt_as_in_step_while_a_site_takes_a_quarter_of_the_others_steps() -> None:
    """Of rank 0 the steps are counted; site b takes one only once it has taken four more."""
    rank, site = begin_at("aab")
    ddp = DistributedDataParallel(_net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for images, labels in _batches(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(images), labels).backward()
        optimizer.step()
    in_step = _accuracy(ddp)
    assert in_step > 0.85
    net = _net()
    training = MixedSync(net, lr=0.1)
    for images, labels in _batches(4):
        if site == "b" and not _reached(4 * (training.steps + 1)):
            break
        net.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        training.step()
        if rank == 0:
            store().add("steps", 1)
    if rank == 0:
        store().set("all steps", "taken")
    dist.barrier()
    assert training.steps == store().add("steps", 0) // (4 if site == "b" else 1)
    training.pull()
    assert same_at_all_ranks(net.parameters())
    assert _accuracy(net) > in_step - 0.04


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
    steps = training.steps
    (Path(folder) / f"ended {number}").touch()
    while not (Path(folder) / "all ended").exists():
        model.weight.grad = torch.zeros_like(model.weight)
        training.step()  # by which others are not too far ahead to end
    training.pull()
    values = model.weight.detach()[0].tolist()
    dist.destroy_process_group()
    return {"steps": steps, "values": values}


def group_in_an_elastic_job(folder: str) -> str:
    """Return the error for a group in an elastic job."""
    elastic.init_process_group(PATIENCE)
    found = error_of(lambda: MixedSync(_net(), lr=0.1, site_group=dist.group.WORLD))
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_a_site_goes_on_without_its_leader_which_comes_back_as_a_site_of_its_own(forker, tmp_path):
    with ElasticRanks(forker, tmp_path, begin=4, elastic="1:4", NETSTORM_STALENESS=2) as job:
        for rank, site in enumerate("aabb"):
            job.start(str(rank), rank, elastic_sites, number=rank, site=site)
        job.wait_until_said("1", "site of [0, 1], leads: False")
        job.wait_until_said("3", "site of [2, 3], leads: False")
        job.kill("0")
        job.wait_until_said("1", "site of [1], leads: True")
        job.start("back", 0, elastic_sites, number=4, site="a")
        job.wait_until_said("back", "site of [0], leads: True")
        job.kill("2")
        job.wait_until_said("3", "site of [3], leads: True")
        (tmp_path / "end").touch()
        for number in (1, 3, 4):
            job.wait_until_there(f"ended {number}")
        (tmp_path / "all ended").touch()
        answers = {number: job.answer(name) for number, name in ((1, "1"), (3, "3"), (4, "back"))}
        job.end()
    values = answers[1]["values"]
    assert all(answer["values"] == values for answer in answers.values())
    # Of the step in which a leader has died the push may be lost.
    assert values[0] + values[1] in (answers[1]["steps"] - 1, answers[1]["steps"])
    assert values[2] + values[3] in (answers[3]["steps"] - 1, answers[3]["steps"])
    assert values[4] == answers[4]["steps"]
    assert values[0] > 0
    assert values[2] > 0


def test_a_group_is_refused_in_an_elastic_job(forker, tmp_path):
    with ElasticRanks(forker, tmp_path, begin=1, elastic="1:2") as job:
        job.start("only", 0, group_in_an_elastic_job)
        assert "site_group= in an elastic job (NETSTORM_ELASTIC): leave it out" in job.answer("only")
        job.end()


def _reached(steps: int) -> bool:
    """Wait until the fast site has taken so many steps; return False if it takes no more."""
    while store().add("steps", 0) < steps:
        if store().check(["all steps"]):
            return bool(store().add("steps", 0) >= steps)
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
