"""Makes a tensor's values reachable for the node, wherever they are."""

from __future__ import annotations

import torch

from netstorm.errors import UsageError
from netstorm.frontends.torch.process_group.cuda import StagedOnGpu
from netstorm.frontends.torch.process_group.memory import Staged, described

__all__ = ["staged"]


def staged(tensor: torch.Tensor, *, read: bool = True, write: bool = True) -> Staged:
    """Return a tensor ready for a call.

    Args:
        tensor: dense; of the CPU or a CUDA device.
        read: its present values are needed.
        write: it gets a result.

    Raises:
        NotImplementedError: a tensor of another device, or that is not dense.
        UsageError: it gets a result, and several of its elements are one place in memory.
    """
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"the netstorm backend takes sparse tensors (COO) in all_reduce with SUM alone; this one is "
            f"{tensor.layout}: call to_dense() first"
        )
    if write and not tensor.is_contiguous() and 0 in _strides_of_many(tensor):
        raise UsageError(
            f"a result for {described(tensor)} with strides {tensor.stride()}: several of its elements are "
            "one place in memory, as expand() makes it; call clone() first"
        )
    if tensor.is_cpu:
        return Staged(tensor, read=read, write=write)
    if tensor.is_cuda:
        return StagedOnGpu(tensor, read=read, write=write)
    raise NotImplementedError(
        f"the netstorm backend takes tensors of the CPU and of CUDA devices; this one is on {tensor.device}"
    )


def _strides_of_many(tensor: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions that have several elements."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
