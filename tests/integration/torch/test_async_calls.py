"""Asynchronous calls of PyTorch's on real ranks: futures, errors in them, time-outs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netstorm.errors import NetStormError, WaitTimeout
from netstorm.frontends.torch.bounded_loss import BoundedLossState, bounded_loss_hook
from tests.integration.torch.begin import begin, error_of, gloo_group, store
from tests.integration.torch.ranks import Ranks, on_ranks


def summing(tensor: torch.Tensor) -> Any:
    return dist.all_reduce(tensor, async_op=True)


@on_ranks(3)
def test_works_and_futures_of_many_calls_end_in_any_order() -> None:
    rank, size = begin()
    tensors = [torch.full((100 * place + 1,), float(rank + place)) for place in range(30)]
    works = [summing(tensor) for tensor in tensors]
    doubled = [work.get_future().then(lambda done: done.value()[0] * 2) for work in works]
    for place in reversed(range(30)):
        works[place].wait()
        expected = float(sum(range(size)) + size * place)
        assert (tensors[place] == expected).all(), place
        assert (doubled[place].wait() == 2 * expected).all(), place
        assert works[place].is_completed()
        assert works[place].is_success()
        assert works[place].result()[0].data_ptr() == tensors[place].data_ptr()
    assert torch.equal(works[3].get_future().wait()[0], tensors[3])  # asked for late
    chained = works[4].get_future().then(lambda _: 1).then(lambda done: done.value() + 1)
    assert chained.wait() == 2
    assert len(torch.futures.collect_all([work.get_future() for work in works]).wait()) == 30

    def fails(_: Any) -> None:
        raise ValueError("of the continuation")

    assert "of the continuation" in error_of(works[5].get_future().then(fails).wait)

    def again(_: Any) -> Any:
        """Make another call and wait for its future, as PowerSGD does; and one more in its continuation."""
        return summing(torch.ones(3, 2).t()).get_future().then(third).wait()

    def third(done: Any) -> Any:
        return summing(done.value()[0]).get_future().wait()[0]

    answer = summing(torch.ones(1)).get_future().then(again).wait()
    assert answer.tolist() == [[size * size] * 3] * 2
    others: list[Any] = [dist.barrier(async_op=True), dist.broadcast(torch.ones(2), 0, async_op=True)]
    assert all(work.wait(timedelta(seconds=50)) for work in others)
    # A wait that is given up leaves its call under way.
    if rank == 0:
        work = summing(torch.ones(2))
        found = error_of(lambda: work.wait(timedelta(milliseconds=50)))
        assert "all_reduce(SUM) of float32 (2,) has not completed within" in found
        store().set("timed out", "yes")
        work.wait()
    else:
        store().wait(["timed out"])
        dist.all_reduce(torch.ones(2))
    dist.barrier()
    dist.destroy_process_group()


@on_ranks(3, fails=True)
def test_the_time_out_of_a_group_ends_the_job_and_names_who_is_missing() -> None:
    rank, _ = begin()
    group = dist.new_group(timeout=timedelta(seconds=3))
    if rank == 1:
        store().wait(["heard 0", "heard 2"])
        assert "not made it" in error_of(lambda: dist.all_reduce(torch.ones(2), group=group))
        return
    store().set(f"calls {rank}", "yes")
    store().wait(["calls 0", "calls 2"])  # or one could be waited for, too
    with pytest.raises(WaitTimeout) as caught:
        dist.all_reduce(torch.ones(2), group=group)
    store().set(f"heard {rank}", "yes")
    assert isinstance(caught.value, dist.DistBackendError)
    assert "all_reduce(SUM) of float32 (2,)" in str(caught.value)
    assert str(caught.value).endswith("rank 1 has not made it")


def one_raises() -> list[str]:
    """Rank 1 raises while others hold futures, and train; return what they hear."""
    rank, _ = begin()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    model(torch.ones(2, 8)).sum().backward()
    backward = model(torch.ones(2, 8)).sum().backward
    if rank == 1:
        store().wait(["ready 0", "ready 2"])
        raise ValueError("rank 1 has run out of data")
    work = summing(torch.ones(2))
    future: Any = work.get_future()
    after = future.then(lambda done: done.value())
    store().set(f"ready {rank}", "yes")
    found = [error_of(call) for call in (future.wait, after.wait, work.wait, backward)]
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), NetStormError)
    return found


def test_an_error_of_another_rank_is_in_all_futures_and_comes_out_of_ddps_backward_pass(ranks: Ranks) -> None:
    ranks.start(one_raises, 3)
    assert "ValueError: rank 1 has run out of data" in ranks.end(1).err
    for rank in (0, 2):
        *of_futures, of_ddp = ranks.answer(rank)
        assert all("ValueError: rank 1 has run out of data" in error for error in of_futures)
        assert of_ddp.startswith("NodeFailed: rank 1")  # no RuntimeError with PyTorch's stack
        assert of_ddp.endswith("ValueError: rank 1 has run out of data")


@on_ranks(3, NETSTORM_LOSS_BOUND=0.7, NETSTORM_DEADLINE=3)
def test_ddp_goes_on_without_gradients_that_come_too_late_and_counts_them_in_the_next_step() -> None:
    """In the third step the last rank is late, and in all others they begin together."""
    values = 40_000
    rank, size = begin()
    gloo = gloo_group()
    model = DistributedDataParallel(nn.Linear(values, 1, bias=False))
    state = BoundedLossState()
    model.register_comm_hook(state, bounded_loss_hook)
    found = []
    for step in range(5):
        model.zero_grad()
        loss = model(torch.full((1, values), 10.0**rank)).sum()
        if step != 2 or rank == size - 1:
            dist.barrier(group=gloo)
        loss.backward()
        if step == 2 and rank != size - 1:
            dist.barrier(group=gloo)
        gradient = model.module.weight.grad * size
        found.append(sorted(set(gradient.round().reshape(-1).tolist())))
    assert found == [[111.0], [111.0], [11.0], [211.0], [111.0]]
    assert sum(one.abs().sum() for one in state.uncounted.values()) == 0
