"""What ranks of all tests do."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=60)


def begin(backend: str = "netstorm", store: str = "") -> tuple[int, int]:
    """Create the default group; return this process's rank and how many there are.

    Args:
        backend: of the group.
        store: after the store's name, for one more job of the same processes after one that has failed.
    """
    dist.init_process_group(
        backend,
        init_method=os.environ["STORE"] + store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=PATIENCE,
    )
    return dist.get_rank(), dist.get_world_size()


def gloo_group() -> Any:
    """Return a group of all ranks over PyTorch's own Gloo, to compare with."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def store() -> Any:
    """Return the store of the default group, by which ranks tell each other what is none of NetStorm's."""
    return dist.distributed_c10d._get_default_store()


def same_at_all_ranks(tensors: Iterable[torch.Tensor], group: Any = None) -> bool:
    """Return whether all ranks have the same bits."""
    whole = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    others = [torch.empty_like(whole) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, whole, group=group)
    return all(torch.equal(whole, other) for other in others)


def digest(model: torch.nn.Module) -> str:
    """Return what tells parameters of other bits apart."""
    parameters = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    return hashlib.sha256(parameters).hexdigest()


def error_of(call: Any, *arguments: Any, **named: Any) -> str:
    """Return the class and message of the error that a call raises; "" if it raises none."""
    try:
        call(*arguments, **named)
    except Exception as error:  # noqa: BLE001 -- which it is, is what tests ask
        return f"{type(error).__name__}: {error}"
    return ""
