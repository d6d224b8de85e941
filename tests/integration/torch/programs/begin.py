"""What the programs of ranks have in common."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=60)


def begin(backend: str = "netstorm", timeout: timedelta = PATIENCE) -> tuple[int, int]:
    """Create the default group; return this process's rank and how many there are."""
    dist.init_process_group(
        backend,
        init_method=os.environ["STORE"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
    )
    return dist.get_rank(), dist.get_world_size()


def gloo_group() -> Any:
    """Return a group of all ranks over PyTorch's own Gloo, to compare with."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def same_at_all_ranks(tensors: list[torch.Tensor], group: Any = None) -> bool:
    """Return whether all ranks have the same bits."""
    whole = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    others = [torch.empty_like(whole) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, whole, group=group)
    return all(torch.equal(whole, other) for other in others)


def error_of(call: Any) -> str:
    """Return the class and message of the error that a call raises; "" if it raises none."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 -- which it is, is what tests ask
        return f"{type(error).__name__}: {error}"
    return ""
