"""A communication hook for DDP that goes on without gradients that come too late (NETSTORM_LOSS_BOUND).

```python
model.register_comm_hook(BoundedLossState(), bounded_loss_hook)
```

What a result does not contain stays with the rank that it is of, and is added to its next gradient of the
same bucket: all gradients count in the end. So sums are divided by all ranks, not by those that are in them.
"""

# Annotations are not postponed here: DDP compares those of a hook with its own classes.
import logging
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from netstorm.frontends.torch.internals import GradBucket
from netstorm.frontends.torch.member import future_of
from netstorm.frontends.torch.process_group import netstorm_group

__all__ = ["BoundedLossState", "bounded_loss_hook"]

_log = logging.getLogger(__name__)

_FIRST: Final = 2
"""Steps in which all gradients count: DDP makes its final buckets after the first."""

Average: TypeAlias = torch.futures.Future[torch.Tensor]


@dataclass(slots=True)
class BoundedLossState:
    """What `bounded_loss_hook` is registered with.

    Attributes:
        process_group: over which gradients are averaged, of backend netstorm; None is the default group.
        steps: how many have been made.
        uncounted: by bucket: what has not been counted of this rank's gradients, divided by the ranks.
    """

    process_group: dist.ProcessGroup | None = None
    uncounted: dict[int, torch.Tensor] = field(default_factory=dict)
    steps: int = 0

    def with_uncounted(self, bucket: GradBucket, gradients: torch.Tensor) -> torch.Tensor:
        """Return a bucket's gradients, and what came too late of those before, in memory of its own."""
        kept = self.uncounted.get(bucket.index())
        if kept is None or kept.numel() != gradients.numel():
            if kept is not None and kept.any():
                _log.warning("bucket %d has changed: what was late of it is dropped", bucket.index())
            kept = torch.zeros(gradients.numel(), dtype=gradients.dtype)
            self.uncounted[bucket.index()] = kept
        kept.add_(gradients.reshape(-1).to("cpu"))
        return kept


def bounded_loss_hook(state: BoundedLossState, bucket: GradBucket) -> Average:
    """Average a bucket over all ranks, in place, and return at once; late gradients count in a later step.

    Without NETSTORM_LOSS_BOUND, and in the first two steps, all gradients are waited for.
    """
    group, gradients = netstorm_group(state.process_group, "bounded_loss_hook"), bucket.buffer()
    terms = group.loss_terms if state.steps >= _FIRST else None
    if bucket.is_last():
        state.steps += 1
    gradients.mul_(1.0 / dist.get_world_size(group))
    if terms is None or not gradients.is_floating_point():
        work = group.allreduce_with_priority(gradients, bucket.index())
    else:
        kept = state.with_uncounted(bucket, gradients)
        work = group.allreduce_with_loss(kept, gradients, terms, bucket.index())
    return future_of(work, gradients)
