"""Groups of some of the ranks, messages between two, and errors that name both sides."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.integration.torch.programs.begin import PATIENCE, begin, error_of, gloo_group


def subgroups() -> list[str]:
    """Groups that overlap, that are not ascending, that are used at once; return what is wrong."""
    rank, size = begin()
    wrong = []
    members = [[0, 2, 3], [1, 2], [3], list(range(size))]
    groups: list[Any] = [dist.new_group(ranks) for ranks in members]
    works = []
    for ranks, group in zip(members, groups, strict=True):
        if rank in ranks:
            tensor = torch.full((50,), float(rank))
            works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, sum(ranks)))
    for work, tensor, expected in reversed(works):
        assert work is not None
        work.wait()
        wrong += [f"sum {expected}"] * (not bool((tensor == expected).all()))

    reverse: Any = dist.new_group([3, 1, 0], sort_ranks=False)
    if rank != 2:
        wrong += ["rank in the group"] * (dist.get_rank(reverse) != [3, 1, 0].index(rank))
        outputs = [torch.empty(1) for _ in range(3)]
        dist.all_gather(outputs, torch.tensor([float(rank)]), group=reverse)
        wrong += ["the order of a group"] * (torch.cat(outputs).tolist() != [3, 1, 0])
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, src=1, group=reverse)
        wrong += ["a broadcast of rank 1"] * (tensor.item() != 1)
        part = torch.empty(1)
        dist.reduce_scatter(part, [torch.tensor([float(place)]) for place in range(3)], group=reverse)
        wrong += ["the parts of a group"] * (part.item() != 3 * dist.get_rank(reverse))

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mesh.get_group("inner"))
    wrong += ["the inner groups of a mesh"] * (tensor.item() != (1 if rank < 2 else 5))
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mesh.get_group("outer"))
    wrong += ["the outer groups of a mesh"] * (tensor.item() != (2 if rank % 2 == 0 else 4))
    dist.destroy_process_group()
    return wrong


def beside_gloo() -> list[str]:
    """A NetStorm group beside a default group of Gloo's, and the other way round, twice in a process."""
    wrong = []
    for backend, other in (("gloo", "netstorm"), ("netstorm", "gloo"), ("cpu:netstorm", "netstorm")):
        rank, size = begin(backend)
        group: Any = dist.new_group(backend=other, timeout=timedelta(seconds=50))
        for place in range(3):
            tensor = torch.full((9,), float(rank + place))
            same = tensor.clone()
            works = [
                dist.all_reduce(tensor, async_op=True),
                dist.all_reduce(same, group=group, async_op=True),
            ]
            for work in works:
                assert work is not None
                work.wait()
            wrong += [f"{backend} and {other}"] * (not torch.equal(tensor, same))
            wrong += ["the sum"] * (tensor[0].item() != sum(range(size)) + place * size)
        dist.barrier()
        dist.destroy_process_group()
    return wrong


def after_others(members: list[list[int]]) -> list[float]:
    """Groups whose members have been in different groups before; return the sums that this rank has seen."""
    rank, _ = begin("gloo")
    sums = []

    def use(group: Any) -> None:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        sums.append(tensor[0].item())
        dist.destroy_process_group(group)

    for ranks in members:
        group: Any = dist.new_group(ranks, backend="netstorm", timeout=PATIENCE)
        if rank in ranks:
            use(group)
        dist.barrier()
    dist.destroy_process_group()
    return sums


def beside_a_pair() -> str:
    """A group of all while a pair still has one: return the error."""
    begin("gloo")
    _pair: Any = dist.new_group([1, 2], backend="netstorm", timeout=PATIENCE)
    error = error_of(lambda: dist.new_group(backend="netstorm", timeout=PATIENCE))
    dist.barrier()
    dist.destroy_process_group()
    return error


def one_after_the_other() -> dict[str, list[Any]]:
    """Have three ranks do what follows, in one job; return what each of them returns."""
    rank, size = begin()
    calls = (messages, message_mismatch, monitored_barriers)
    found: dict[str, list[Any]] = {call.__name__: call(rank, size) for call in calls}
    found["same_name_again"] = _same_name_again(rank)
    dist.destroy_process_group()
    return found


def same_name_again() -> list[float]:
    """A group whose name comes back in a job that goes on; return the sums that this rank has seen."""
    rank, _ = begin()
    return _same_name_again(rank)


def _same_name_again(rank: int) -> list[float]:
    sums = []
    for number in range(3):
        if rank < 2:
            group: Any = dist.new_group([0, 1], timeout=PATIENCE, use_local_synchronization=True)
            tensor = torch.full((3 + number,), 1.0 + number)
            dist.all_reduce(tensor, group=group)
            sums.append(tensor[0].item())
            dist.destroy_process_group(group)
    dist.barrier()
    return sums


def messages(rank: int, size: int) -> list[str]:
    """Sends and receives; return what is wrong."""
    wrong = []
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in (
        torch.float32,
        torch.int8,
        torch.bool,
        torch.complex64,
        torch.bfloat16,
        torch.float8_e4m3fn,
    ):
        for shape in ((), (0,), (5,), (2, 3)):
            given = torch.ones(shape).mul(rank % 2).to(dtype)
            got = torch.zeros(shape).to(dtype)
            works: list[Any] = [dist.isend(given, after), dist.irecv(got, before)]
            for work in works:
                work.wait()
            wrong += [f"{dtype} {shape}"] * (not bool((got.float() == before % 2).all()))
    # by tag, and not in the order of sending
    if rank == 0:
        sent = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in range(5)]
        for one in sent:
            assert one is not None
            one.wait()
    elif rank == 1:
        for tag in (3, 0, 4, 2, 1):
            got = torch.empty(1)
            wrong += ["source"] * (dist.recv(got, 0, tag=tag) != 0)
            wrong += [f"tag {tag}: {got.item()}"] * (got.item() != tag)
    # from anybody
    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            got = torch.empty(2)
            source = dist.recv(got)
            wrong += ["any source"] * (got.tolist() != [source, source])
            sources.add(source)
        wrong += ["all sources"] * (sources != set(range(1, size)))
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    dist.barrier()  # what follows is not for those who receive from anybody
    # a transposed one into a strided one
    rows = torch.zeros(4, 6)
    if rank == 0:
        dist.send(torch.arange(6.0).reshape(2, 3).t(), 1)
    elif rank == 1:
        dist.recv(rows[:3, ::3], 0)
        wrong += ["strides"] * (rows[:3, ::3].tolist() != [[0, 3], [1, 4], [2, 5]])
    got, big = torch.empty(100_000), torch.full((100_000,), float(rank))
    both: list[Any] = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, big, after), dist.P2POp(dist.irecv, got, before)]
    )
    for work in both:
        work.wait()
    wrong += ["a batch"] * (not bool((got == before).all()))
    gloo: Any = gloo_group()
    if rank < 2:
        mine = torch.tensor([float(rank)])
        dist.send(mine, 1, group=gloo) if rank == 0 else dist.recv(mine, 0, group=gloo)
        wrong += ["a message over Gloo beside it"] * (mine.item() != 0)
    found = error_of(lambda: dist.all_reduce(torch.ones(1).expand(5)))
    wrong += [found] * (not found.startswith("UsageError: a result for float32 (5,) with strides (0,)"))
    dist.barrier()
    return wrong


def mismatch(kind: str) -> str:
    """Make a call that does not fit that of another rank; return the error."""
    rank, _ = begin()
    dist.all_reduce(torch.ones(2))
    odd = rank == 1
    calls: dict[str, Any] = {
        "shape": lambda: dist.all_reduce(torch.ones(3 if odd else 2)),
        "order": lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(2)),
        "receiver": lambda: dist.reduce(torch.ones(2), 0) if odd else dist.all_reduce(torch.ones(2)),
    }
    return error_of(calls[kind])


def empty_at_one_rank(kind: str, empty: int) -> str:
    """Make a call with an empty tensor at rank `empty` alone; return its error."""
    rank, size = begin()
    few = 0 if rank == empty else 3
    dist.all_reduce(torch.ones(0))  # empty everywhere is nothing wrong
    outputs = [torch.empty(few) for _ in range(size)]
    calls: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(few)),
        "broadcast": lambda: dist.broadcast(torch.ones(few), 0),
        "scatter": lambda: dist.scatter(torch.empty(few), outputs if rank == 0 else None),
    }
    return error_of(calls[kind])


def message_mismatch(rank: int, size: int) -> list[str]:
    """Send more than is expected, at last where nothing is; return the receiver's errors."""
    found = ["", ""]
    if rank == 0:
        dist.isend(torch.ones(3), 1)
    elif rank == 1:
        found[0] = error_of(lambda: dist.recv(torch.ones(2), 0))
    given, taken = [3 if rank == 0 else 0, *[0] * (size - 1)], [0] * size
    taken[0] = 3 if rank == 0 else 0
    given[1] = 2 if rank == 0 else 0
    output, source = torch.empty(sum(taken)), torch.ones(sum(given))
    found[1] = error_of(lambda: dist.all_to_all_single(output, source, taken, given))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3, 3]
    return found


def monitored_barriers(rank: int, size: int) -> list[str]:
    """A barrier that all pass, one that rank 2 does not reach, and one more; return the errors."""
    dist.monitored_barrier(timeout=timedelta(seconds=50))
    store = dist.distributed_c10d._get_default_store()
    found = []
    if rank == 2:
        store.wait(["heard 0", "heard 1"])
    else:
        found.append(error_of(lambda: dist.monitored_barrier(timeout=timedelta(seconds=1))))
        store.set(f"heard {rank}", "yes")
    dist.monitored_barrier(timeout=timedelta(seconds=50), wait_all_ranks=True)
    return found
