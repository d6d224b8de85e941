"""Who is in an elastic job, and whose values a result has."""

from __future__ import annotations

import torch.distributed as dist

from netstorm.errors import UsageError
from netstorm.frontends.torch.errors import raises_torch_errors
from netstorm.frontends.torch.process_group.group import NetStormProcessGroup
from netstorm.frontends.torch.process_group.work import CallWork
from netstorm.kvstore.process.elastic import JobState

__all__ = ["contributors", "group_of_all_ranks", "is_newcomer", "live_ranks"]


@raises_torch_errors
def live_ranks() -> tuple[int, ...]:
    """Return the ranks that are in the job now, ascending, as this process has last heard.

    Ranks hear of a change at different times: what all must decide alike has to depend on results
    (`contributors`), not on this.
    """
    return JobState(group_of_all_ranks().member.runtime).live_ranks


@raises_torch_errors
def is_newcomer() -> bool:
    """Return whether this process has joined a job that had begun, and does not have its state yet.

    It may make no collective call before `ElasticState.step()`.
    """
    return JobState(group_of_all_ranks().member.runtime).is_needed


@raises_torch_errors
def contributors(work: dist.Work) -> frozenset[int]:
    """Return the ranks, within the group, whose values are in all parts of a result; the same at all ranks.

    A rank that has left while the call was under way may be in some parts. An average of a part is one over
    those who are in it.

    Args:
        work: of a collective call with `async_op=True`, that has ended.

    Raises:
        UsageError: it has not ended, or is none of NetStorm's.
    """
    if not isinstance(work, CallWork) or work.contributors is None:
        raise UsageError(
            f"contributors({work!r}): expected the work of a collective call over the netstorm backend that "
            "has ended; all_reduce(tensor, async_op=True) returns it, and work.wait() waits for its end"
        )
    return work.contributors


def group_of_all_ranks() -> NetStormProcessGroup:
    """Return the default group.

    Raises:
        UsageError: there is none, or it is another backend's.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(group, NetStormProcessGroup):
        raise UsageError(
            "the default process group is not NetStorm's: call "
            "netstorm.frontends.torch.elastic.init_process_group() first"
        )
    return group
