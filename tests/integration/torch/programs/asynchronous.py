"""Asynchronous calls: their work, their futures, their errors and time-outs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netstorm.errors import NetStormError, WaitTimeout
from tests.integration.torch.programs.begin import begin, error_of


def futures() -> list[str]:
    """Works and futures of many calls; return what is wrong."""
    rank, size = begin()
    wrong = []
    tensors = [torch.full((100 * place + 1,), float(rank + place)) for place in range(30)]
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    total = sum(range(size))
    doubled = [work.get_future().then(lambda done: done.value()[0] * 2) for work in works]
    for place in reversed(range(30)):
        works[place].wait()
        found, expected = tensors[place], float(total + size * place)
        wrong += [f"sum {place}: {found[0]}"] * (not bool((found == expected).all()))
        found = doubled[place].wait()
        wrong += [f"continuation {place}"] * (not bool((found == 2 * expected).all()))
        wrong += [f"state {place}"] * (not (works[place].is_completed() and works[place].is_success()))
        wrong += [f"result {place}"] * (works[place].result()[0].data_ptr() != tensors[place].data_ptr())
    late = works[3].get_future()
    wrong += ["a future that is asked for late"] * (not torch.equal(late.wait()[0], tensors[3]))
    chained = works[4].get_future().then(lambda _: 1).then(lambda done: done.value() + 1)
    wrong += ["a chain"] * (chained.wait() != 2)
    together = torch.futures.collect_all([work.get_future() for work in works])
    wrong += ["all together"] * (len(together.wait()) != 30)

    def fails(_: Any) -> None:
        raise ValueError("of the continuation")

    failed = works[5].get_future().then(fails)
    wrong += ["an error in a continuation"] * ("of the continuation" not in error_of(failed.wait))

    def again(_: Any) -> torch.Tensor:
        """Make another call and wait for its future, as PowerSGD does; and one more in its continuation."""
        work: Any = dist.all_reduce(torch.ones(3, 2).t(), async_op=True)
        found: torch.Tensor = work.get_future().then(third).wait()
        return found

    def third(done: Any) -> torch.Tensor:
        work: Any = dist.all_reduce(done.value()[0], async_op=True)
        found: torch.Tensor = work.get_future().wait()[0]
        return found

    outer: Any = dist.all_reduce(torch.ones(1), async_op=True)
    answer = outer.get_future().then(again).wait()
    wrong += ["a call in a continuation"] * (answer.tolist() != [[size * size] * 3] * 2)
    for work in (dist.barrier(async_op=True), dist.broadcast(torch.ones(2), 0, async_op=True)):
        assert work is not None
        wrong += ["wait"] * (not work.wait(timedelta(seconds=50)))
    dist.destroy_process_group()
    return wrong


def waits() -> list[str]:
    """A wait with a limit leaves the call under way; return the errors that came."""
    rank, _ = begin()
    found = []
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        found.append(error_of(lambda: work.wait(timedelta(milliseconds=50))))
        dist.distributed_c10d._get_default_store().set("timed out", "yes")
        work.wait()
    else:
        dist.distributed_c10d._get_default_store().wait(["timed out"])
        dist.all_reduce(torch.ones(2))
    dist.barrier()
    dist.destroy_process_group()
    return found


def group_timeout() -> list[str]:
    """Rank 1 does not make a call; return what the others' errors say."""
    rank, _ = begin()
    group = dist.new_group(timeout=timedelta(seconds=1))
    tensor = torch.ones(2)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["heard 0", "heard 2"])
        return [error_of(lambda: dist.all_reduce(tensor, group=group))]
    try:
        dist.all_reduce(tensor, group=group)
    except NetStormError as error:
        store.set(f"heard {rank}", "yes")
        assert isinstance(error, WaitTimeout), type(error)
        assert isinstance(error, dist.DistBackendError)
        return [str(error)]
    return []


def error_through_ddp() -> str:
    """A rank leaves in the midst of a training; return the error of the others' backward passes."""
    rank, _ = begin()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    model(torch.ones(2, 8)).sum().backward()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["stepped 0", "stepped 2"])
        raise ValueError("rank 1 has run out of data")
    store.set(f"stepped {rank}", "yes")
    found = ""
    for _ in range(3):
        found = found or error_of(lambda: model(torch.ones(2, 8)).sum().backward())
    return found


def error_in_future() -> list[str]:
    """A rank fails while others hold futures; return what these say."""
    rank, _ = begin()
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["ready 0", "ready 2"])
        raise ValueError("rank 1 fails")
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    future: Any = work.get_future()
    after = future.then(lambda done: done.value())
    dist.distributed_c10d._get_default_store().set(f"ready {rank}", "yes")
    found = [error_of(future.wait), error_of(after.wait), error_of(work.wait)]
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), NetStormError)
    return found
