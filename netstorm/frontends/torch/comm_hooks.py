"""Communication hooks for DDP: its gradients travel over another process group than its own.

For scripts that keep their default group (Gloo, NCCL, MPI) and want NetStorm for DDP's buckets alone:

```python
state = NetStormHookState(torch.distributed.new_group(backend="netstorm"))
model.register_comm_hook(state, netstorm_hook)
```

DDP calls a hook for each bucket as soon as its gradients are there, while the backward pass goes on.
"""

# Annotations are not postponed here: DDP compares those of a hook with its own classes.
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
import torch.distributed as dist

from netstorm.frontends.torch.internals import GradBucket
from netstorm.frontends.torch.member import future_of
from netstorm.frontends.torch.process_group import NetStormProcessGroup

__all__ = [
    "CommunicationHook",
    "NetStormHookState",
    "bf16_compress_wrapper",
    "fp16_compress_wrapper",
    "netstorm_hook",
]


@dataclass(frozen=True, slots=True)
class NetStormHookState:
    """What `netstorm_hook` is registered with.

    Attributes:
        process_group: over which gradients are averaged; None is the default group. It must have the same
            ranks as DDP's own group, or parameters drift apart.
    """

    process_group: dist.ProcessGroup | None = None


Average: TypeAlias = torch.futures.Future[torch.Tensor]

CommunicationHook: TypeAlias = Callable[[NetStormHookState, GradBucket], Average]
"""What DDP's `register_comm_hook` takes: it returns a future of the bucket's average."""


def netstorm_hook(state: NetStormHookState, bucket: GradBucket) -> Average:
    """Average a bucket over `state.process_group`, in place, and return at once.

    Gradients are divided before they are added, as DDP does it: then float16 sums do not overflow, and the
    result is DDP's own. A later bucket has gradients of earlier layers, which the next forward pass needs
    first: over a NetStorm group it overtakes the buckets before it.
    """
    gradients = bucket.buffer()
    gradients.mul_(1.0 / dist.get_world_size(state.process_group))
    group = state.process_group or dist.group.WORLD
    if isinstance(group, NetStormProcessGroup):
        work = group.allreduce_with_priority(gradients, bucket.index())
    else:
        work = dist.all_reduce(gradients, group=group, async_op=True)
    return future_of(work, gradients)


def fp16_compress_wrapper(hook: CommunicationHook) -> CommunicationHook:
    """Return a hook that gives `hook` the gradients as float16: half the bytes, 11 significant bits."""
    return _as_type(hook, torch.float16)


def bf16_compress_wrapper(hook: CommunicationHook) -> CommunicationHook:
    """Return a hook that gives `hook` the gradients as bfloat16: half the bytes, 8 bits, float32's range."""
    return _as_type(hook, torch.bfloat16)


def _as_type(hook: CommunicationHook, dtype: torch.dtype) -> CommunicationHook:
    def compressed_hook(state: NetStormHookState, bucket: GradBucket) -> Average:
        gradients = bucket.buffer()
        bucket.set_buffer(gradients.to(dtype))

        def decompressed(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            return gradients.copy_(done.value())

        return cast("Average", hook(state, bucket).then(decompressed))

    return compressed_hook
