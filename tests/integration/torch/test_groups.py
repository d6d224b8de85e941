"""Groups of some of the ranks, messages between two, and errors that name both sides, on real ranks."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from netstorm.addresses import split_host_port
from tests.integration.jobs import Job, free_port
from tests.integration.torch.begin import PATIENCE, begin, error_of, gloo_group, store
from tests.integration.torch.ranks import on_ranks


def summed(tensor: torch.Tensor, group: Any = None) -> list[float]:
    dist.all_reduce(tensor, group=group)
    found: list[float] = tensor.unique().tolist()
    return found


@on_ranks(4)
def test_groups_may_overlap_have_any_order_and_be_used_at_once() -> None:
    rank, size = begin()
    members = [[0, 2, 3], [1, 2], [3], list(range(size))]
    groups: list[Any] = [dist.new_group(ranks) for ranks in members]
    works: list[Any] = []
    for ranks, group in zip(members, groups, strict=True):
        if rank in ranks:
            tensor = torch.full((50,), float(rank))
            works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, sum(ranks)))
    for work, tensor, expected in reversed(works):
        work.wait()
        assert (tensor == expected).all()

    order = [3, 1, 0]
    reverse: Any = dist.new_group(order, sort_ranks=False)
    if rank != 2:
        place = order.index(rank)
        assert dist.get_rank(reverse) == place
        outputs, tensor, part = (
            [torch.empty(1) for _ in range(3)],
            torch.tensor([float(rank)]),
            torch.empty(1),
        )
        dist.all_gather(outputs, tensor, group=reverse)
        assert torch.cat(outputs).tolist() == order
        dist.broadcast(tensor, src=1, group=reverse)
        assert tensor.item() == 1
        dist.reduce_scatter(part, [torch.tensor([float(place)]) for place in range(3)], group=reverse)
        assert part.item() == 3 * place

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    mine = torch.tensor([float(rank)])
    assert summed(mine.clone(), mesh.get_group("inner")) == [1 if rank < 2 else 5]
    assert summed(mine.clone(), mesh.get_group("outer")) == [2 if rank % 2 == 0 else 4]
    dist.destroy_process_group()


@on_ranks(3)
def test_a_group_works_beside_one_of_gloo_and_members_with_different_pasts_find_each_other() -> None:
    for backend, other in (("gloo", "netstorm"), ("netstorm", "gloo"), ("cpu:netstorm", "netstorm")):
        rank, size = begin(backend, store=backend)
        group: Any = dist.new_group(backend=other, timeout=timedelta(seconds=50))
        for place in range(3):
            tensor = torch.full((9,), float(rank + place))
            same = tensor.clone()
            work: Any = dist.all_reduce(tensor, async_op=True)
            dist.all_reduce(same, group=group)
            work.wait()
            assert torch.equal(tensor, same), (backend, other)
            assert tensor[0].item() == sum(range(size)) + place * size
        dist.barrier()
        dist.destroy_process_group()
    after_others([[0, 1], [0, 1], [1, 2], [0, 1, 2]])


def after_others(members: list[list[int]]) -> None:
    """Groups whose members have been in different groups before."""
    rank, _ = begin("gloo")
    for ranks in members:
        group: Any = dist.new_group(ranks, backend="netstorm", timeout=PATIENCE)
        if rank in ranks:
            assert summed(torch.ones(3), group) == [len(ranks)]
            dist.destroy_process_group(group)
        dist.barrier()
    dist.destroy_process_group()


def test_a_group_of_some_ranks_is_a_job_of_its_own_beside_that_of_the_named_scheduler(ranks, tmp_path):
    (tmp_path / "scheduler").mkdir()
    with Job(tmp_path / "scheduler", 3) as job:
        host, port = split_host_port(job.address)
        named = {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port, "DMLC_NUM_WORKER": 3}
        ranks.start(after_others, 3, members=[[1, 2], [0, 1, 2]], **named)
        ranks.answers()
        assert job.end(-1).code == 0


@on_ranks(3)
def test_a_group_that_some_members_cannot_make_is_an_error_at_all_of_them() -> None:
    """A group of all while a pair still has one."""
    begin("gloo")
    _pair: Any = dist.new_group([1, 2], backend="netstorm", timeout=PATIENCE)
    error = error_of(lambda: dist.new_group(backend="netstorm", timeout=PATIENCE))
    assert "ranks [0] are not in the first NetStorm group, of ranks [1, 2]" in error
    assert "create a group of all ranks first" in error
    dist.barrier()
    dist.destroy_process_group()


def begin_and_make_groups() -> None:
    begin()
    same_name_again()


def test_the_address_of_the_store_may_be_one_of_ipv6(ranks):
    ranks.start(begin_and_make_groups, 2, STORE="env://", MASTER_ADDR="::1", MASTER_PORT=free_port())
    ranks.answers()


def same_name_again() -> None:
    """A group whose name comes back in a job that goes on is a new one."""
    for number in range(3):
        if dist.get_rank() < 2:
            group: Any = dist.new_group([0, 1], timeout=PATIENCE, use_local_synchronization=True)
            assert summed(torch.full((3 + number,), 1.0 + number), group) == [2 + 2 * number]
            dist.destroy_process_group(group)
    dist.barrier()


@on_ranks(3)
def test_messages_and_monitored_barriers_are_right_and_one_that_does_not_fit_is_an_error() -> None:
    """Messages are matched by rank, tag and order, and may come from anybody. One that does not fit is an
    error that names both sides. A monitored barrier names who is missing, and the next one is passed.
    """
    rank, size = begin()
    messages(rank, size)
    message_mismatch(rank, size)
    monitored_barriers(rank)
    same_name_again()
    dist.destroy_process_group()


def messages(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    kinds = ["float32", "int8", "bool", "complex64", "bfloat16", "float8_e4m3fn"]
    for dtype in (getattr(torch, kind) for kind in kinds):
        for shape in ((), (0,), (5,), (2, 3)):
            given = torch.ones(shape).mul(rank % 2).to(dtype)
            got = torch.zeros(shape).to(dtype)
            works: list[Any] = [dist.isend(given, after), dist.irecv(got, before)]
            for work in works:
                work.wait()
            assert (got.float() == before % 2).all(), (dtype, shape)
    # By tag, and not in the order of sending.
    if rank == 0:
        sent: list[Any] = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in range(5)]
        for work in sent:
            work.wait()
    elif rank == 1:
        for tag in (3, 0, 4, 2, 1):
            got = torch.empty(1)
            assert dist.recv(got, 0, tag=tag) == 0
            assert got.item() == tag
    # From anybody.
    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            got = torch.empty(2)
            sources.add(source := dist.recv(got))
            assert got.tolist() == [source, source]
        assert sources == set(range(1, size))
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    dist.barrier()  # what follows is not for those who receive from anybody
    # A transposed one into a strided one.
    rows = torch.zeros(4, 6)
    if rank == 0:
        dist.send(torch.arange(6.0).reshape(2, 3).t(), 1)
    elif rank == 1:
        dist.recv(rows[:3, ::3], 0)
        assert rows[:3, ::3].tolist() == [[0, 3], [1, 4], [2, 5]]
    got, big = torch.empty(100_000), torch.full((100_000,), float(rank))
    both = [dist.P2POp(dist.isend, big, after), dist.P2POp(dist.irecv, got, before)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    assert (got == before).all()
    gloo: Any = gloo_group()
    if rank < 2:
        mine = torch.tensor([float(rank)])
        dist.send(mine, 1, group=gloo) if rank == 0 else dist.recv(mine, 0, group=gloo)
        assert mine.item() == 0, "a message over Gloo beside it"
    found = error_of(lambda: dist.all_reduce(torch.ones(1).expand(5)))
    assert found.startswith("UsageError: a result for float32 (5,) with strides (0,)")
    dist.barrier()


def message_mismatch(rank: int, size: int) -> None:
    """Rank 0 sends rank 1 more than it expects, at last where it expects nothing."""
    errors = []
    if rank == 0:
        dist.isend(torch.ones(3), 1)
    elif rank == 1:
        errors.append(error_of(lambda: dist.recv(torch.ones(2), 0)))
    given, taken = [3 if rank == 0 else 0, *[0] * (size - 1)], [0] * size
    taken[0] = 3 if rank == 0 else 0
    given[1] = 2 if rank == 0 else 0
    output, source = torch.empty(sum(taken)), torch.ones(sum(given))
    errors.append(error_of(lambda: dist.all_to_all_single(output, source, taken, given)))
    assert summed(torch.ones(2)) == [3]
    if rank == 1:
        for error, sent, wanted in zip(errors, (3, 2), (2, 0), strict=True):
            assert f"rank 0 sends float32 ({sent},), {4 * sent} bytes, to rank 1" in error
            assert f"rank 1 expects float32 ({wanted},), {4 * wanted} bytes" in error
    else:
        assert errors == [""]


def monitored_barriers(rank: int) -> None:
    """A barrier that all pass, one that rank 2 does not reach, and one more."""
    dist.monitored_barrier(timeout=timedelta(seconds=50))
    if rank == 2:
        store().wait(["heard 0", "heard 1"])
    else:
        store().set(f"calls {rank}", "yes")
        store().wait(["calls 0", "calls 1"])  # or rank 1 could fail to pass it, too
        error = error_of(lambda: dist.monitored_barrier(timeout=timedelta(seconds=3)))
        assert (
            "Rank 2 failed to pass monitoredBarrier in 3000 ms",
            "Rank 1 successfully reached monitoredBarrier, but received errors",
        )[rank] in error
        store().set(f"heard {rank}", "yes")
    dist.monitored_barrier(timeout=timedelta(seconds=50), wait_all_ranks=True)


def a_sum(size: int) -> Any:
    return lambda: dist.all_reduce(torch.ones(size))


def a_broadcast(size: int, root: int) -> Any:
    return lambda: dist.broadcast(torch.ones(size), root)


def a_scatter(size: int) -> Any:
    return lambda: dist.scatter(torch.empty(size), [torch.empty(size)] * 3 if dist.get_rank() == 0 else None)


def a_gather(size: int) -> Any:
    return lambda: dist.all_gather([torch.empty(size)] * 3, torch.ones(size))


SUM = "all_reduce(SUM) of float32 (2,)"

MISMATCHES: dict[str, tuple[Any, Any, str, str]] = {
    "shape": (a_sum(3), a_sum(2), "all_reduce(SUM) of float32 (3,)", SUM),
    "order": (dist.barrier, a_sum(2), "barrier()", SUM),
    "root": (a_broadcast(2, 1), a_broadcast(2, 0), "cast from rank 1 of", "cast from rank 0 of"),
    "receiver": (
        lambda: dist.reduce(torch.ones(2), 0), a_sum(2), "reduce(SUM) to rank 0 of float32 (2,)", SUM,
    ),
    "empty sum": (a_sum(0), a_sum(3), "float32 (0,)", "float32 (3,)"),
    "empty gather": (a_gather(0), a_gather(3), "float32 (0,)", "float32 (3,)"),
    "empty at the root": (a_broadcast(0, 1), a_broadcast(3, 1), "float32 (0,)", "float32 (3,)"),
    "empty at another": (a_broadcast(0, 0), a_broadcast(3, 0), "float32 (0,)", "float32 (3,)"),
    "empty scatter": (a_scatter(0), a_scatter(3), "float32 (0,)", "float32 (3,)"),
}  # fmt: skip
"""What rank 1 calls, what the others do, and how errors name both. More that differs is in unit tests."""


def mismatches() -> None:
    """Have a call of rank 1 not fit those of the others, in a job for each kind."""
    for kind, (odd, other, of_odd, of_others) in MISMATCHES.items():
        os.environ["NETSTORM_JOB"] = kind.replace(" ", "-")
        rank, _ = begin(store=f" for {kind}")

        def calls(call: Any = odd if rank == 1 else other) -> None:
            dist.all_reduce(torch.ones(0))  # empty everywhere is nothing wrong
            call()  # the others may have failed by now, and this rank with them before it is here

        error = error_of(calls)
        assert error.startswith("Disagreement: "), (kind, error)
        assert of_odd in error, (kind, error)
        assert of_others in error, (kind, error)
        assert "rank 1" in error, (kind, error)
        dist.destroy_process_group()


def test_calls_that_do_not_fit_together_fail_at_all_ranks_and_name_both_sides(ranks, tmp_path):
    (tmp_path / "scheduler").mkdir()
    with Job(tmp_path / "scheduler", 3, NETSTORM_JOBS=0) as job:
        host, port = split_host_port(job.address)
        named = {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port, "DMLC_NUM_WORKER": 3}
        ranks.start(mismatches, 3, **named)
        assert [ranks.answer(rank) for rank in range(3)] == [None] * 3
