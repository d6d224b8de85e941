"""Elastic jobs of PyTorch: ranks are killed, come back and join while the others go on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn

from netstorm.frontends.torch import elastic
from tests.integration.torch.begin import PATIENCE, digest, error_of
from tests.integration.torch.elastic_ranks import Started


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
        if not newcomer:  # whose batches are small until it has caught up, so that it does
            time.sleep(0.01)
        state["seen"] += len(state.ranks)
        state["ends"].fill_((Path(folder) / "end").exists())
        dist.all_reduce(state["ends"], dist.ReduceOp.MAX)
    print("ended", flush=True)
    dist.destroy_process_group()
    return {
        "newcomer": newcomer,
        "early": early,
        "step": step,
        "parameters": digest(model),
        "learning_rate": scheduler.get_last_lr(),
        "sampler": sampler.state_dict(),
        "seen": state["seen"],
    }


def test_a_rank_is_killed_and_two_join_and_all_end_with_the_same_bits(job: Started) -> None:
    ranks = job(2, "1:3")
    for rank in range(2):
        ranks.start(f"first {rank}", rank, train)
    ranks.wait_until_said("first 0", "step 3 ")
    ranks.kill("first 1")
    ranks.wait_until_said("first 0", "of [0]")
    ranks.start("back", 1, train)
    ranks.wait_until_said("back", "rank 1 has the job's state")  # or the next would get its place
    ranks.start("new", -1, train)
    ranks.wait_until_said("new", "of [0, 1, 2]")
    ranks.wait_until_said("back", "of [0, 1, 2]")
    (ranks.folder / "end").touch()
    first, *others = [ranks.answer(name) for name in ("first 0", "back", "new")]
    ranks.end()
    assert not first.pop("newcomer")
    first.pop("early")
    for other in others:
        assert other.pop("newcomer")
        assert "does not have its state yet" in other.pop("early")
        assert other == first


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
    for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
        total = mine.clone()
        work = dist.all_reduce(total, getattr(dist.ReduceOp, name), async_op=True)
        work.wait()
        found[f"all_reduce {name}"] = total.tolist()
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


@pytest.mark.slow
def test_every_call_with_ranks_that_are_not_there_has_a_result_or_an_error_that_names_them(
    job: Started,
) -> None:
    ranks = job(3, "2:4")
    for rank in range(3):
        ranks.start(str(rank), rank, calls)
    ranks.wait_until_said("2", "running")
    ranks.wait_until_said("0", "running")
    ranks.wait_until_said("1", "running")
    ranks.kill("2")
    zero, one = ranks.answer("0"), ranks.answer("1")
    ranks.end()
    for found in (zero, one):
        assert found["all_reduce SUM"] == [3.0, 3.0]
        assert found["all_reduce AVG"] == [1.5, 1.5]
        assert found["all_reduce MIN"] == [1.0, 1.0]
        assert found["all_reduce MAX"] == [2.0, 2.0]
        assert found["all_reduce PRODUCT"] == [2.0, 2.0]
        assert found["contributors"] == [0, 1]
        assert found["barrier"] == found["monitored_barrier"] == ""
        assert found["broadcast from 0"] == [1.0, 1.0]
        assert found["all_gather"] == [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
        assert found["pair"] == [3.0, 3.0]
        for name in ("broadcast from 2", "scatter from 2"):
            assert found[name].startswith("NodeLost: "), found[name]
            assert "rank 2 is not in the job" in found[name]
        for dead in (2, 3):
            for name in (f"send to {dead}", f"recv from {dead}"):
                assert found[name].startswith("NodeLost: "), (name, found[name])
                assert f"rank {dead} " in found[name]
        assert found["all_to_all"].startswith("NodeLost: rank 2 "), found["all_to_all"]
        assert found["all_to_all got"] == [[1.0, 1.0], [2.0, 2.0]]
        assert found["gather to 2"] == []
    assert (zero["reduce to 0"], one["reduce to 0"]) == ([3.0, 3.0], [2.0, 2.0])
    assert (zero["reduce to 2"], one["reduce to 2"]) == ([1.0, 1.0], [2.0, 2.0])
    assert (zero["reduce_scatter"], one["reduce_scatter"]) == ([0.0], [2.0])
    assert (zero["scatter from 0"], one["scatter from 0"]) == ([0.0], [1.0])
    assert zero["gather to 0"] == [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    assert one["source"] == 0
    assert one["with_dead"] == [2.0, 2.0]
