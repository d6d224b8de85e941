"""Two sites of two ranks: meshes, sums over Gloo inside and NetStorm across, DDP and HSDP over them."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from netstorm.frontends.torch.site_mesh import site_mesh
from netstorm.frontends.torch.site_sums import hierarchical_all_reduce, site_hook
from tests.integration.torch.begin import begin, error_of, same_at_all_ranks
from tests.integration.torch.ranks import Ranks, on_ranks

SITES = "abab"


def begin_at(sites: str) -> int:
    """Create a default group over Gloo; return this process's rank, whose site is that of its place."""
    os.environ["NETSTORM_SITE"] = sites[int(os.environ["RANK"])]
    return begin("gloo")[0]


def mesh_of_sites() -> Any:
    return site_mesh(outer_backend="netstorm")


@on_ranks(4)
def test_sums_over_sites_are_those_over_all_ranks_whatever_the_shape_and_type() -> None:
    rank = begin_at(SITES)
    mesh = mesh_of_sites()
    assert mesh.mesh.tolist() == [[0, 2], [1, 3]]
    groups = [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("site", "local")]
    assert groups == [[[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]]
    for dtype in (
        torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8,
    ):  # fmt: skip
        for shape in ((4,), (3, 5), (), (0,), (1,)):
            for op, expected in (("SUM", 10), ("MAX", 4), ("MIN", 1), ("PRODUCT", 24)):
                tensor = torch.full(shape, rank + 1).to(dtype)
                hierarchical_all_reduce(tensor, mesh, getattr(dist.ReduceOp, op))
                assert (tensor == expected).all(), (dtype, shape, op, tensor)

    rows = torch.ones(4, 6).t()[::2] * (rank + 1)  # not contiguous
    hierarchical_all_reduce(rows, mesh, dist.ReduceOp.AVG)
    assert rows.unique().tolist() == [2.5]

    tensors = [torch.arange(1001.0) * (rank + 1) + i for i in range(40)]
    works = [hierarchical_all_reduce(tensor, mesh, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work is not None
        work.wait()
    for place, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.arange(1001.0) * 10 + 4 * place)

    for bad, *others in (
        (torch.ones(2), mesh, dist.ReduceOp.BAND),
        (torch.ones(2, dtype=torch.int64), mesh, dist.ReduceOp.AVG),
        (torch.ones(2, dtype=torch.complex64), mesh),
        (torch.ones(2).to_sparse(), mesh),
        (torch.ones(2), mesh["local"]),
    ):
        assert error_of(hierarchical_all_reduce, bad, *others).startswith("UsageError"), (bad, others)
    dist.destroy_process_group()


@on_ranks(4)
def test_ddp_with_the_hook_and_hsdp_on_the_mesh_have_ddps_own_gradients() -> None:
    rank = begin_at(SITES)
    _compare_gradients(rank, mesh_of_sites())
    # DDP's models are gone here. A model that has the last reference to a group over Gloo joins its threads
    # when it is deleted, with Python's lock held, which one of them may be waiting for (pytorch#56297).
    dist.destroy_process_group()


def _compare_gradients(rank: int, mesh: Any) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))
    own = DistributedDataParallel(copy.deepcopy(net))
    hooked = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=0.001)
    hooked.register_comm_hook(mesh, site_hook)
    sharded: Any = copy.deepcopy(net)
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    torch.manual_seed(rank)
    for _ in range(2):
        data = torch.randn(8, 10)
        for model in (own, hooked, sharded):
            model(data).pow(2).sum().backward()
    expected = [parameter.grad for parameter in own.parameters()]

    def furthest(found: list[Any]) -> float:
        return max(
            float((a - b).abs().max() / b.abs().max())
            for a, b in zip(found, expected, strict=True)
            if b is not None
        )

    by_hook: list[Any] = [parameter.grad for parameter in hooked.parameters()]
    assert furthest(by_hook) < 1e-5
    assert furthest([parameter.grad.full_tensor() for parameter in sharded.parameters()]) < 1e-5
    assert same_at_all_ranks(by_hook)


def lost_rank() -> str:
    """Sum twice; the last rank ends before the second sum. Return the others' error."""
    rank = begin_at(SITES)
    mesh = mesh_of_sites()
    hierarchical_all_reduce(torch.ones(1000), mesh)
    return "" if rank == len(SITES) - 1 else error_of(hierarchical_all_reduce, torch.ones(1000), mesh)


def test_a_rank_that_is_lost_fails_the_sum_at_all_others(ranks: Ranks) -> None:
    ranks.start(lost_rank, 4)
    errors = [ranks.answer(rank) for rank in range(4)]
    assert all(errors[:3])
    assert "rank 3" in errors[2]  # rank 3's own site hears of it from Gloo, which names nobody
    # A failed job never ends with exit code 0, even if the program has caught the error.
    assert any(ranks.end(rank).code for rank in range(4)), [ranks.end(rank).text for rank in range(4)]


@on_ranks(4)
def test_sites_of_different_sizes_are_an_error_at_all_ranks_that_lists_them() -> None:
    begin_at("abaa")
    assert error_of(mesh_of_sites).partition(". ")[0] == (
        "UsageError: the sites have different numbers of ranks: a: 3 ranks (0, 2, 3); b: 1 rank (1)"
    )
