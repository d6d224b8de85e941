"""Ranks of several sites: sums over Gloo inside a site and NetStorm across, DDP and HSDP over them."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from netstorm.errors import UsageError
from netstorm.frontends.torch.site_mesh import site_mesh
from netstorm.frontends.torch.site_sums import hierarchical_all_reduce, site_hook
from tests.integration.torch.programs.begin import begin, error_of, same_at_all_ranks


def begin_at(sites: list[str]) -> int:
    """Create a default group over Gloo; return this process's rank, whose site is that of its place."""
    os.environ["NETSTORM_SITE"] = sites[int(os.environ["RANK"])]
    return begin("gloo")[0]


def mesh_of_sites() -> Any:
    return site_mesh(outer_backend="netstorm")


def sums(sites: list[str]) -> dict[str, Any]:
    """Sum tensors of all kinds; return what is wrong, and what the mesh is."""
    rank = begin_at(sites)
    mesh = mesh_of_sites()
    wrong = []
    for dtype in (
        torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8,
    ):  # fmt: skip
        for shape in ((4,), (3, 5), (), (0,), (1,)):
            for op, expected in (("SUM", 10), ("MAX", 4), ("MIN", 1), ("PRODUCT", 24)):
                tensor = torch.full(shape, rank + 1).to(dtype)
                hierarchical_all_reduce(tensor, mesh, getattr(dist.ReduceOp, op))
                if not bool((tensor == expected).all()):
                    wrong.append([str(dtype), shape, op, tensor.tolist()])

    rows = torch.ones(4, 6).t()[::2] * (rank + 1)  # not contiguous
    hierarchical_all_reduce(rows, mesh, dist.ReduceOp.AVG)

    tensors = [torch.arange(1001.0) * (rank + 1) + i for i in range(40)]
    works = [hierarchical_all_reduce(tensor, mesh, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work is not None
        work.wait()
    many = all(torch.equal(tensor, torch.arange(1001.0) * 10 + 4 * i) for i, tensor in enumerate(tensors))

    refused = [
        error_of(bad).startswith("UsageError")
        for bad in (
            lambda: hierarchical_all_reduce(torch.ones(2), mesh, dist.ReduceOp.BAND),
            lambda: hierarchical_all_reduce(torch.ones(2, dtype=torch.int64), mesh, dist.ReduceOp.AVG),
            lambda: hierarchical_all_reduce(torch.ones(2, dtype=torch.complex64), mesh),
            lambda: hierarchical_all_reduce(torch.ones(2).to_sparse(), mesh),
            lambda: hierarchical_all_reduce(torch.ones(2), mesh["local"]),
        )
    ]
    groups = [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("site", "local")]
    dist.destroy_process_group()
    return {
        "mesh": mesh.mesh.tolist(),
        "groups": groups,
        "wrong": wrong,
        "rows": rows.unique().tolist(),
        "many": many,
        "refused": refused,
    }


def gradients(sites: list[str]) -> dict[str, Any]:
    """Return how far gradients of DDP with the hook and of HSDP on the mesh are from DDP's own."""
    rank = begin_at(sites)
    answer = _gradients(rank, mesh_of_sites())
    # DDP's models are gone here. A model that has the last reference to a group over Gloo joins its threads
    # when it is deleted, with Python's lock held, which one of them may be waiting for (pytorch#56297).
    dist.destroy_process_group()
    return answer


def _gradients(rank: int, mesh: Any) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

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
    return {
        "hooked": furthest(by_hook),
        "sharded": furthest([parameter.grad.full_tensor() for parameter in sharded.parameters()]),
        "same": same_at_all_ranks(by_hook),
    }


def lost_rank(sites: list[str]) -> str:
    """Sum twice; the last rank ends before the second sum. Return the others' error."""
    rank = begin_at(sites)
    mesh = mesh_of_sites()
    tensor = torch.ones(1000)
    hierarchical_all_reduce(tensor, mesh)
    if rank == len(sites) - 1:
        return ""
    try:
        hierarchical_all_reduce(tensor, mesh)
    except RuntimeError as error:
        return str(error)
    return ""


def uneven(sites: list[str]) -> str:
    """Return the error of a mesh whose sites differ in size."""
    begin_at(sites)
    try:
        mesh_of_sites()
    except UsageError as error:
        return str(error)
    return ""
