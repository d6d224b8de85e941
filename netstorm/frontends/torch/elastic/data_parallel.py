"""DistributedDataParallel in jobs that ranks may leave and join."""

# Annotations are not postponed here: DDP compares those of a hook with its own classes.
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from netstorm.errors import UsageError
from netstorm.frontends.torch.gradient_codecs.averages import Descriptions
from netstorm.frontends.torch.gradient_codecs.hook import CodecHookState, codec_hook
from netstorm.frontends.torch.gradient_codecs.unedited import hook_state_of
from netstorm.frontends.torch.process_group.group import NetStormProcessGroup

__all__ = ["average_hook", "data_parallel"]

Average: TypeAlias = torch.futures.Future[torch.Tensor]

_FIXED = {
    "init_sync": "a newcomer would wait for calls that the others have made long ago; ElasticState gives all "
    "ranks the same values",
    "broadcast_buffers": "rank 0 may not be in the job; each rank has its own buffers",
    "forward_sync_buffers": "rank 0 may not be in the job; each rank has its own buffers",
    "find_unused_parameters": "without it, DDP chooses other buckets after the first step, and a newcomer's "
    "would differ from those of the others",
    "static_graph": "with it, DDP chooses other buckets after the first step, and a newcomer's would differ "
    "from those of the others",
}


def data_parallel(
    module: nn.Module, *, codec: Descriptions | None = None, **options: Any
) -> DistributedDataParallel:
    """Return a module whose gradients are averaged over the ranks that are in the job.

    It is PyTorch's DistributedDataParallel, made so that a rank which joins later makes the same calls as the
    others: nothing is exchanged at its construction, buckets never change, and each bucket's average is one
    over those who contributed. Buffers, such as BatchNorm's, stay each rank's own. Every step also sums one
    number for each parameter, which says whether it was used.

    PyTorch warns once that `find_unused_parameters` may be turned off. It may not: see above.

    Args:
        module: with the same parameters at all ranks; `ElasticState` makes their values equal.
        codec: how gradients travel, as `CodecHookState` takes it; None: as they are, or by
            NETSTORM_GRADIENT_CODEC. What a codec keeps of a rank's gradients goes with the rank.
        options: of DistributedDataParallel, apart from those that have to be as they are.

    Raises:
        UsageError: one of those, or a wrong codec.
    """
    for name, value in options.items():
        if name in _FIXED:
            raise UsageError(f"{name}={value!r}: leave it out, since {_FIXED[name]}")
    model = DistributedDataParallel(
        module,
        init_sync=False,
        forward_sync_buffers=False,
        find_unused_parameters=True,
        **{"gradient_as_bucket_view": True, **options},
    )
    if codec is not None:
        state = CodecHookState(codec, module, options.get("process_group"))
        model.register_comm_hook(state, codec_hook)
    elif hook_state_of(model) is None:
        model.register_comm_hook(options.get("process_group"), average_hook)
    return model


def average_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Average:
    """Average a bucket over the ranks that contribute to it, in place, and return at once.

    A later bucket has gradients of earlier layers, which the next forward pass needs first: it overtakes the
    buckets before it.
    """
    gradients = bucket.buffer()
    group = process_group or dist.group.WORLD
    if isinstance(group, NetStormProcessGroup):
        work: Any = group.allreduce_with_priority(gradients, bucket.index(), average=True)
    else:
        gradients.div_(dist.get_world_size(process_group))
        work = dist.all_reduce(gradients, group=group, async_op=True)

    def averaged(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        done.value()  # raises what the average has failed with
        return gradients

    return cast("Average", work.get_future().then(averaged))
