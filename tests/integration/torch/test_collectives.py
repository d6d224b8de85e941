"""Every collective call of PyTorch's, on real ranks, against results that each process computes by itself."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

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


def test_every_call_is_right_for_every_type_and_shape_and_what_is_refused_leaves_the_group_in_order(ranks):
    """Reductions, copies, tensors that lie in memory in any way, sparse and several ones, Python objects."""
    ranks.start(collectives.every_call, 3)
    for wrong, refused in ranks.answers():
        assert wrong == []
        assert [error[: len(start)] for error, start in zip(refused, REFUSED, strict=True)] == list(REFUSED)
