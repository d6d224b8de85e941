"""Every collective call of PyTorch's, on real ranks, against results that each process computes by itself.

The values are whole numbers, small enough that every type holds every result: so all results are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist

from tests.integration.torch.begin import begin, error_of, same_at_all_ranks
from tests.integration.torch.ranks import on_ranks

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3, 5), (2, 0, 3), (1025,))

REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...], salt: int = 0) -> torch.Tensor:
    """Return what a rank gives: whole numbers from 0 to 3."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    found = torch.randint(0, 4, shape, generator=generator)
    return (found % 2 if dtype is torch.bool else found).to(dtype)


def reduced(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    """Return what a reduction of these is."""
    if name == "AVG":
        return reduced(tensors, "SUM") / len(tensors)
    if tensors[0].dtype is torch.bool:  # as Gloo's: a truth value is 0 or 1
        numbers = [tensor.to(torch.uint8) for tensor in tensors]
        return reduced(numbers, "BOR" if name == "SUM" else name).to(torch.bool)
    return reduce(REDUCTIONS[name], tensors)


def kinds() -> Iterator[tuple[torch.dtype, str]]:
    """Yield each type with each reduction that it has."""
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, torch.bool):
        for name in (*REDUCTIONS, "AVG"):
            bitwise = name in {"BAND", "BOR", "BXOR"}
            if dtype.is_complex and name not in {"SUM", "AVG"}:
                continue
            if (bitwise and dtype.is_floating_point) or (name == "AVG" and dtype in {*INTEGERS, torch.bool}):
                continue
            yield dtype, name


def reductions(rank: int, size: int) -> list[str]:
    """All-reduce, reduce and reduce-scatter; return what is wrong."""
    wrong = []
    for dtype, name in kinds():
        op = getattr(dist.ReduceOp, name)
        for shape in SHAPES if name == "SUM" else SHAPES[-1:]:  # what is reduced knows no shape
            given = [values(each, dtype, shape) for each in range(size)]
            expected = reduced(given, name)
            case = f"{name} {dtype} {shape}"

            every = given[rank].clone()
            dist.all_reduce(every, op)
            wrong += [f"all_reduce {case}"] * (not torch.allclose(every, expected))
            if shape == SHAPES[-1]:
                wrong += [f"all_reduce {case}: other bits elsewhere"] * (not same_at_all_ranks([every]))

            one = given[rank].clone()
            dist.reduce(one, size - 1, op)
            right = expected if rank == size - 1 else given[rank]
            wrong += [f"reduce {case}"] * (not torch.allclose(one, right))

            parts = [[values(each, dtype, shape, salt) for salt in range(size)] for each in range(size)]
            output = torch.empty(shape, dtype=dtype)
            dist.reduce_scatter(output, parts[rank], op)
            mine = reduced([each[rank] for each in parts], name)
            wrong += [f"reduce_scatter {case}"] * (not torch.allclose(output, mine))
            if shape:
                output = torch.empty(shape, dtype=dtype)
                dist.reduce_scatter_tensor(output, torch.cat(parts[rank]), op)
                wrong += [f"reduce_scatter_tensor {case}"] * (not torch.allclose(output, mine))
    return wrong


def copies(rank: int, size: int) -> list[str]:
    """Broadcast, all-gather, gather, scatter and all-to-all; return what is wrong."""
    wrong: list[str] = []
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, torch.bool):
        for shape in SHAPES if dtype is torch.float32 else SHAPES[-1:]:  # a copy knows no type
            given = [values(each, dtype, shape) for each in range(size)]
            for call, check in _copies(rank, size, dtype, shape, given):
                wrong += [f"{call} {dtype} {shape}"] * (not check)
    return wrong


def _copies(
    rank: int, size: int, dtype: torch.dtype, shape: tuple[int, ...], given: list[torch.Tensor]
) -> Iterator[tuple[str, bool]]:
    def empties() -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype) for _ in range(size)]

    tensor = given[rank].clone()
    dist.broadcast(tensor, 1)
    yield "broadcast", torch.equal(tensor, given[1])

    outputs = empties()
    dist.all_gather(outputs, given[rank])
    yield "all_gather", _equal(outputs, given)

    if shape:
        whole = torch.empty((size * shape[0], *shape[1:]), dtype=dtype)
        dist.all_gather_into_tensor(whole, given[rank])
        yield "all_gather_into_tensor", torch.equal(whole, torch.cat(given))

    outputs = empties()
    dist.gather(given[rank], outputs if rank == 1 else None, dst=1)
    yield "gather", rank != 1 or _equal(outputs, given)

    tensor = torch.empty(shape, dtype=dtype)
    dist.scatter(tensor, given if rank == 1 else None, src=1)
    yield "scatter", torch.equal(tensor, given[rank])

    outputs = empties()
    dist.all_to_all(outputs, [values(each, dtype, shape, rank) for each in range(size)])
    yield "all_to_all", _equal(outputs, [values(rank, dtype, shape, each) for each in range(size)])

    if shape:
        whole = torch.empty((size * shape[0], *shape[1:]), dtype=dtype)
        dist.all_to_all_single(whole, torch.cat([values(each, dtype, shape, rank) for each in range(size)]))
        right = torch.cat([values(rank, dtype, shape, each) for each in range(size)])
        yield "all_to_all_single", torch.equal(whole, right)


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def layouts(rank: int, size: int) -> list[str]:
    """Tensors that do not lie in memory as they are indexed; return what is wrong."""
    wrong = []
    layouts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda tensor: tensor.t(),
        "strided": lambda tensor: tensor[::2, 1:],
        "one column": lambda tensor: tensor[:, 1],
        "channels last": lambda tensor: tensor.reshape(1, 2, 2, -1).to(memory_format=torch.channels_last),
        "leaf": lambda tensor: tensor.clone().requires_grad_(),
    }
    for name, layout in layouts.items():

        def mine(each: int = rank, layout: Callable[[torch.Tensor], torch.Tensor] = layout) -> torch.Tensor:
            return layout(values(each, torch.float32, (4, 6)))

        given = [mine(each).detach().clone() for each in range(size)]
        tensor = mine()
        with torch.no_grad():
            dist.all_reduce(tensor)
        wrong += [f"all_reduce {name}"] * (not torch.equal(tensor.detach(), reduced(given, "SUM")))
        tensor = mine()
        with torch.no_grad():
            dist.broadcast(tensor, 2)
        wrong += [f"broadcast {name}"] * (not torch.equal(tensor.detach(), given[2]))
        outputs = [torch.zeros_like(each) for each in given]
        dist.all_gather(outputs, mine().detach())
        wrong += [f"all_gather {name}"] * (not _equal(outputs, given))
        outputs = [torch.zeros(4, 6).t()[:, :3] for _ in range(size)]
        dist.all_gather(outputs, values(rank, torch.float32, (6, 3)))
        right = [values(each, torch.float32, (6, 3)) for each in range(size)]
        wrong += [f"all_gather into {name}"] * (not _equal(outputs, right))
    rows = torch.zeros(4, 9)
    dist.all_to_all_single(rows.t()[:size], values(rank, torch.float32, (size, 4)))
    wrong += ["all_to_all_single into a part"] * (not torch.equal(rows[:, size:], torch.zeros(4, 9 - size)))
    return wrong


def sparse_sums(rank: int, size: int) -> list[str]:
    """All-reduce of sparse tensors; return what is wrong."""
    wrong = []

    def given(each: int, dtype: torch.dtype, dense: tuple[int, ...]) -> torch.Tensor:
        indices = torch.tensor([[each, each + 1, each], [0, 1, 0]])  # not coalesced
        return torch.sparse_coo_tensor(indices, torch.ones((3, *dense), dtype=dtype), (size + 1, 2, *dense))

    for dtype in (torch.float32, torch.float64, torch.int64):
        for dense in ((), (3,), (2, 2)):
            tensor = given(rank, dtype, dense)
            dist.all_reduce(tensor)
            expected = sum(given(each, dtype, dense).to_dense() for each in range(size))
            wrong += [f"{dtype} {dense}"] * (not torch.equal(tensor.to_dense(), torch.as_tensor(expected)))
    nothing = torch.sparse_coo_tensor(torch.empty((1, 0), dtype=torch.int64), torch.empty(0), (5,))
    dist.all_reduce(nothing)
    wrong += ["nothing"] * bool(nothing.to_dense().any())
    some = torch.sparse_coo_tensor(torch.arange(rank)[None], torch.ones(rank), (5,))
    dist.all_reduce(some)
    expected = torch.tensor([float(size - 1 - place) if place < size else 0.0 for place in range(5)])
    wrong += [f"nothing at one rank: {some.to_dense()}"] * (
        not torch.equal(some.to_dense(), expected.clamp(0))
    )
    return wrong


def coalesced(rank: int, size: int) -> list[str]:
    """Several tensors in one call; return what is wrong."""
    wrong = []
    group: Any = dist.group.WORLD
    shapes: tuple[tuple[int, ...], ...] = ((3,), (2, 2), (1,))
    given = [[values(each, torch.float32, shape) for shape in shapes] for each in range(size)]
    sums = [reduced(list(each), "SUM") for each in zip(*given, strict=True)]
    mine = [tensor.clone() for tensor in given[rank]]
    dist.all_reduce_coalesced(mine)
    wrong += ["all_reduce_coalesced"] * (not _equal(mine, sums))
    lists = [[torch.empty(shape) for shape in shapes] for _ in range(size)]
    dist.all_gather_coalesced(lists, given[rank])
    wrong += ["all_gather_coalesced"] * (not all(map(_equal, lists, given)))
    works = [tensor.clone() for tensor in given[rank]]
    with dist._coalescing_manager(group, async_ops=True) as together:  # type: ignore[attr-defined]
        for tensor in works:
            dist.all_reduce(tensor)
    together.wait()
    wrong += ["the coalescing manager: all_reduce"] * (not _equal(works, sums))
    whole = [torch.empty((size * shape[0], *shape[1:])) for shape in shapes]
    with dist._coalescing_manager(group, async_ops=True) as together:  # type: ignore[attr-defined]
        for output, tensor in zip(whole, given[rank], strict=True):
            dist.all_gather_into_tensor(output, tensor)
    together.wait()
    right = [torch.cat([each[place] for each in given]) for place in range(len(shapes))]
    wrong += ["the coalescing manager: all_gather"] * (not _equal(whole, right))
    parts = [torch.empty(shape) for shape in shapes]
    with dist._coalescing_manager(group, async_ops=True) as together:  # type: ignore[attr-defined]
        for output, tensor in zip(parts, right, strict=True):
            dist.reduce_scatter_tensor(output, tensor)
    together.wait()
    wrong += ["the coalescing manager: reduce_scatter"] * (
        not _equal(parts, [size * tensor for tensor in given[rank]])
    )
    return wrong


def objects(rank: int, size: int) -> list[str]:
    """Collectives of Python objects; return what is wrong."""
    wrong = []
    mine = {"rank": rank, "text": "x" * 1000 * rank}
    everybody: list[Any] = [{"rank": each, "text": "x" * 1000 * each} for each in range(size)]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, mine)
    wrong += ["all_gather_object"] * (found != everybody)
    found = [None] * size
    dist.gather_object(mine, found if rank == 2 else None, dst=2)
    wrong += ["gather_object"] * (found != (everybody if rank == 2 else [None] * size))
    several: list[Any] = [mine, None, "text"] if rank == 1 else [None] * 3
    dist.broadcast_object_list(several, src=1)
    wrong += ["broadcast_object_list"] * (several != [everybody[1], None, "text"])
    one: list[Any] = [None]
    dist.scatter_object_list(one, everybody if rank == 0 else None, src=0)
    wrong += ["scatter_object_list"] * (one != [mine])
    if rank == 0:
        dist.send_object_list([mine, 3], dst=1)
    elif rank == 1:
        got: list[Any] = [None, None]
        dist.recv_object_list(got, src=0)
        wrong += ["send_object_list"] * (got != [everybody[0], 3])
    return wrong


def refusals(size: int) -> dict[str, Callable[[], Any]]:
    """Return calls that are not supported, or are wrong in themselves, by what they say."""
    ones = torch.ones(4)
    return {
        "NotImplementedError: the netstorm backend has no and of float32; bitwise reductions take": (
            lambda: dist.all_reduce(ones, dist.ReduceOp.BAND)
        ),
        "ValueError: all_reduce does not support RedOpType.MAX on complex tensors": (
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX)
        ),
        "NotImplementedError: the netstorm backend cannot reduce tensors of float8_e4m3fn; convert": (
            lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))
        ),
        "NotImplementedError: the netstorm backend sums sparse tensors in COO layout; this one is": (
            lambda: dist.all_reduce(torch.eye(3).to_sparse_csr())
        ),
        "NotImplementedError: the netstorm backend has SUM of sparse tensors, not MAX: call": (
            lambda: dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX)
        ),
        "UsageError: all_gather: the tensor of rank 0 is float32 (3,), and this rank's float32 (4,)": (
            lambda: dist.all_gather([torch.ones(3) for _ in range(size)], ones)
        ),
        "UsageError: all_gather_into_tensor: an output of float32 (5,) for an input of float32 (4,)": (
            lambda: dist.all_gather_into_tensor(torch.ones(5), ones)
        ),
        "UsageError: reduce_scatter: 1 tensors for 3 ranks; give one a rank": (
            lambda: dist.reduce_scatter(ones, [ones])
        ),
        "UsageError: all_to_all_single: the input has 4 rows, which 3 ranks cannot share equally": (
            lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size + 1))
        ),
        "UsageError: all_to_all_single: input_split_sizes=[2, 2, 2]: expected 3 numbers": (
            lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size), [1] * size, [2] * size)
        ),
        "NotImplementedError: the netstorm backend takes tensors of the CPU and of CUDA devices; this one": (
            lambda: dist.all_reduce(torch.ones(2, device="meta"))
        ),
    }


@on_ranks(3)
def test_every_call_is_right_for_every_type_and_shape_and_what_is_refused_leaves_the_group_in_order() -> None:
    """Reductions, copies, tensors that lie in memory in any way, sparse and several ones, Python objects."""
    rank, size = begin()
    for said, call in refusals(size).items():
        assert (error := error_of(call)).startswith(said), error
    checks = (reductions, copies, layouts, sparse_sums, coalesced, objects)
    assert [f"{check.__name__}: {what}" for check in checks for what in check(rank, size)] == []
    dist.destroy_process_group()
