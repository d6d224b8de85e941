"""Every collective call of PyTorch's, on real ranks, against results that each process computes by itself."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from tests.integration.torch.ranks import Ranks

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import collectives

REFUSED = (
    "NotImplementedError: the netstorm backend has no and of float32; bitwise reductions take whole numbers",
    "ValueError: all_reduce does not support RedOpType.MAX on complex tensors",
    "NotImplementedError: the netstorm backend cannot reduce tensors of float8_e4m3fn; convert",
    "NotImplementedError: the netstorm backend sums sparse tensors in COO layout; this one is",
    "NotImplementedError: the netstorm backend has SUM of sparse tensors, not MAX: call to_dense() first",
    "UsageError: all_gather: the tensor of rank 0 is float32 (3,), and this rank's float32 (4,)",
    "UsageError: all_gather_into_tensor: an output of float32 (5,) for an input of float32 (4,)",
    "UsageError: reduce_scatter: 1 tensors for 3 ranks; give one a rank",
    "UsageError: all_to_all_single: the input has 4 rows, which 3 ranks cannot share equally",
    "UsageError: all_to_all_single: input_split_sizes=[2, 2, 2]: expected 3 numbers",
    "NotImplementedError: the netstorm backend takes tensors of the CPU and of CUDA devices; this one",
)


def check(ranks: Ranks, program: Callable[[], list[str]], count: int = 3) -> None:
    """Assert that a program finds nothing wrong at any rank."""
    ranks.start(program, count)
    assert ranks.answers() == [[]] * count


def test_every_reduction_of_every_type_and_shape_is_right_at_every_rank(ranks):
    check(ranks, collectives.reductions)


def test_every_copy_of_every_type_and_shape_is_right(ranks):
    check(ranks, collectives.copies)


def test_tensors_may_lie_in_memory_in_any_way(ranks):
    check(ranks, collectives.layouts)


def test_sparse_tensors_are_summed_whatever_each_rank_has(ranks):
    check(ranks, collectives.sparse_sums)


def test_several_tensors_go_in_one_call(ranks):
    check(ranks, collectives.coalesced)


def test_python_objects_of_any_size_are_gathered_scattered_broadcast_and_sent(ranks):
    check(ranks, collectives.objects)


def test_what_is_not_supported_or_wrong_says_so_and_leaves_the_group_in_order(ranks):
    ranks.start(collectives.refusals, 3)
    for found in ranks.answers():
        assert [error[: len(start)] for error, start in zip(found, REFUSED, strict=True)] == list(REFUSED)
