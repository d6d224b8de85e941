"""Makes a tensor's values reachable for the node, wherever they are."""

from __future__ import annotations

import torch

from netstorm.frontends.torch.process_group.cuda import StagedOnGpu
from netstorm.frontends.torch.process_group.memory import Staged

__all__ = ["staged"]


def staged(tensor: torch.Tensor, *, read: bool = True, write: bool = True) -> Staged:
    """Return a tensor ready for a call.

    Args:
        tensor: dense; of the CPU or a CUDA device.
        read: its present values are needed.
        write: it gets a result.

    Raises:
        NotImplementedError: a tensor of another device, or that is not dense.
    """
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"the netstorm backend takes sparse tensors (COO) in all_reduce with SUM alone; this one is "
            f"{tensor.layout}: call to_dense() first"
        )
    if tensor.is_cpu:
        return Staged(tensor, read=read, write=write)
    if tensor.is_cuda:
        return StagedOnGpu(tensor, read=read, write=write)
    raise NotImplementedError(
        f"the netstorm backend takes tensors of the CPU and of CUDA devices; this one is on {tensor.device}"
    )
