"""What we use of PyTorch that it calls private, in one place: a new release is checked here.

`RELEASES` says which releases of PyTorch have each name; a test looks them all up in the installed one. Other
modules take the names from here. Not listed is what PyTorch calls, by private names, of a process group
(`process_group`) and of its work (`member`): those are an interface, if an undocumented one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined] # PyTorch's stubs lack the last one
    Backend,
    ErrorType,
    GradBucket,
    HashStore,
    Store,
    TCPStore,
    _create_work_from_future,
)

__all__ = [
    "RELEASES",
    "Backend",
    "ErrorType",
    "GradBucket",
    "HashStore",
    "Store",
    "TCPStore",
    "as_accelerator",
    "begin_counting_calls",
    "call_at_end_of_backward",
    "default_timeout",
    "device_kinds",
    "import_compiler",
    "is_in_backward",
    "mark_stepped",
    "never_traced",
    "post_accumulate_hooks",
    "replace_backward",
    "replace_create_store",
    "replace_set_pg_timeout",
    "set_members_of_world",
    "set_timeout_of_options",
    "work_of_future",
]

RELEASES: Final[dict[str, tuple[str, str]]] = {
    "torch._C._current_graph_task_id": ("2.13", ""),
    "torch._C._distributed_c10d.Backend": ("2.13", ""),
    "torch._C._distributed_c10d.Backend._set_sequence_number_for_group": ("2.13", ""),
    "torch._C._distributed_c10d.ErrorType": ("2.13", ""),
    "torch._C._distributed_c10d.GradBucket": ("2.13", ""),
    "torch._C._distributed_c10d.HashStore": ("2.13", ""),
    "torch._C._distributed_c10d.Store": ("2.13", ""),
    "torch._C._distributed_c10d.TCPStore": ("2.13", ""),
    "torch._C._distributed_c10d._create_work_from_future": ("2.13", ""),
    "torch._C._distributed_c10d._DistributedBackendOptions.enable_reconfigure": ("2.14", ""),
    "torch._C._dynamo.eval_frame._FrameAction.SKIP": ("2.13", ""),
    "torch._C._dynamo.eval_frame._FrameExecStrategy": ("2.13", ""),
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": ("2.13", ""),
    "torch._C._get_accelerator": ("2.13", ""),
    "torch.Tensor._post_accumulate_grad_hooks": ("2.13", ""),
    "torch.autograd._engine_run_backward": ("2.13", ""),
    "torch.autograd.Variable._execution_engine": ("2.13", ""),
    "torch.distributed.ProcessGroup._device_types": ("2.13", ""),
    "torch.distributed._get_reconfigure_handle": ("2.14", ""),
    "torch.distributed._reconfigure": ("2.14", ""),
    "torch.distributed.distributed_c10d._get_default_timeout": ("2.13", ""),
    "torch.distributed.distributed_c10d._set_pg_timeout": ("2.13", ""),
    "torch.distributed.distributed_c10d._world.pg_group_ranks": ("2.13", ""),
    "torch.distributed.rendezvous._create_c10d_store": ("2.13", ""),
}
"""By name: the first release with it of those that we know, and the last one; empty: it is still there."""

work_of_future: Final[Callable[[Any], Any]] = _create_work_from_future
"""Returns the `Work` of a future: of what several calls end with."""


def default_timeout(backend: str) -> timedelta:
    """Return the time-out of groups of a backend whose program gives none."""
    timeout: timedelta = dist.distributed_c10d._get_default_timeout(dist.Backend(backend))
    return timeout


def replace_set_pg_timeout(make: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Replace what sets the time-out of a group by what `make` returns, given that."""
    replaced = make(dist.distributed_c10d._set_pg_timeout)
    for module in (dist, dist.distributed_c10d):
        module._set_pg_timeout = replaced  # type: ignore[attr-defined]


def set_members_of_world(group: Any, size: int) -> None:
    """Tell PyTorch how many members a group has, whose size has changed, if it is the default one."""
    if group is dist.group.WORLD:
        ranks: dict[Any, dict[int, int]] = dist.distributed_c10d._world.pg_group_ranks
        ranks[group] = {rank: rank for rank in range(size)}


def device_kinds(group: Any) -> list[str]:
    """Return where a group's collectives take tensors: kinds of devices."""
    return [device.type for device in group._device_types]


def as_accelerator() -> str:
    """Return the kind of device for which PyTorch chooses a backend on this machine."""
    kind: str = torch._C._get_accelerator().type
    return kind


def begin_counting_calls(group: Any) -> None:
    """Let a group of PyTorch's own number its calls, as PyTorch does when it makes one."""
    group._set_sequence_number_for_group()


def set_timeout_of_options(options: Any, timeout: timedelta) -> None:
    """Set the time-out in the options of PyTorch's own NCCL."""
    options._timeout = timeout


def replace_create_store(make: Callable[[Callable[..., Any]], Callable[..., Any] | None]) -> None:
    """Replace what makes the store of `init_process_group` by what `make` returns, given that; None: keep."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original = getattr(rendezvous, "_create_c10d_store", None)
    replaced = None if original is None else make(original)
    if replaced is not None:
        rendezvous._create_c10d_store = replaced


def replace_backward(make: Callable[[Callable[..., Any]], Callable[..., Any] | None]) -> None:
    """Replace what runs a backward pass by what `make` returns, given that; None: keep."""
    original: Any = getattr(torch.autograd, "_engine_run_backward", None)
    replaced = None if original is None else make(original)
    if replaced is not None:
        torch.autograd._engine_run_backward = replaced  # type: ignore[attr-defined]


def is_in_backward() -> bool:
    """Return whether a backward pass is under way in this thread."""
    return torch._C._current_graph_task_id() >= 0


def call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Have `function` called at the end of the backward pass that is under way."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def post_accumulate_hooks(parameter: torch.Tensor) -> list[Any]:
    """Return the hooks that are called when a parameter has a gradient."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell an optimizer's schedulers, which would warn, that it has made a step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def import_compiler() -> None:
    """Import what DDP imports at its construction, which takes seconds."""
    importlib.import_module("torch._dynamo.utils")


# What torch.compiler.disable does in the end. That itself would import the compiler.
_frames: Final[Any] = torch._C._dynamo.eval_frame
_SKIP: Final = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def never_traced(function: Any) -> None:
    """Keep torch.compile out of a function and of what it calls."""
    function._torchdynamo_disable = True
    _frames.set_code_exec_strategy(function.__code__, _SKIP)
