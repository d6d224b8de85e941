"""The ranks of a process group, as far as local updates need them: sums, maxima, an exchange of settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from netstorm.errors import UsageError
from netstorm.frontends.torch.local_updates.agreement import Settings
from netstorm.frontends.torch.plain_values import PlainValue, exchange_values
from netstorm.frontends.torch.process_group.group import NetStormProcessGroup

__all__ = ["ElasticRanks", "ProcessGroupRanks", "Ranks", "Waitable"]

_WITH_INT16 = frozenset({"netstorm", "mpi"})
"""Backends that sum int16; Gloo and NCCL do not."""


class Waitable(Protocol):
    """A collective under way, as `torch.distributed.Work`."""

    def wait(self) -> object:
        """Return when the result is in its tensor; raises what the backend raises, or its time-out."""


class Ranks(Protocol):
    """What a codec may ask of the ranks. All ranks must ask for the same, in the same order."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def short_integers(self) -> bool:
        """Whether int16 can be summed."""

    def begin_sum(self, tensor: torch.Tensor) -> Waitable:
        """Begin to replace `tensor` by the sum over all ranks; it is not to be touched meanwhile."""

    def begin_max(self, tensor: torch.Tensor) -> Waitable:
        """Begin to replace `tensor` by the largest values over all ranks."""


class ProcessGroupRanks:
    """The ranks of a `torch.distributed` process group.

    Raises:
        UsageError: there is no process group, or this process is not in `group`.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError(
                "torch.distributed has no process group: call torch.distributed.init_process_group first"
                " (with world_size=1 to train alone)"
            )
        self._group = group
        self._rank = dist.get_rank(group)
        if self._rank < 0:
            raise UsageError(
                f"rank {dist.get_rank()} is not a member of the given group: only its members may use it here"
            )
        self._size = dist.get_world_size(group)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> ProcessGroupRanks:
        """Return the ranks of a group. Those of an elastic job's default group come and go.

        Raises:
            UsageError: see above; or the group is one of some ranks of an elastic job.
        """
        ranks = cls(group)
        default = dist.group.WORLD
        if not isinstance(default, NetStormProcessGroup) or not default.member.runtime.settings.elastic:
            return ranks
        if group is not None and group is not default:
            raise UsageError(
                "group= in an elastic job (NETSTORM_ELASTIC): ranks that join later can only be in the "
                "default group; leave it out"
            )
        return ElasticRanks(None)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self._size

    @property
    def short_integers(self) -> bool:
        """Whether the group's backend sums int16."""
        return dist.get_backend(self._group) in _WITH_INT16

    def begin_sum(self, tensor: torch.Tensor) -> Waitable:
        """Begin to replace `tensor` by the sum over all ranks."""
        return self._begin(tensor, dist.ReduceOp.SUM)

    def begin_max(self, tensor: torch.Tensor) -> Waitable:
        """Begin to replace `tensor` by the largest values over all ranks."""
        return self._begin(tensor, dist.ReduceOp.MAX)

    def take_from_first(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by the first rank's; blocks."""
        dist.broadcast(tensor, src=self._global_rank(0), group=self._group)

    def exchange(self, settings: Settings, what: str) -> Sequence[Settings]:
        """Return every rank's settings, in order of ranks; blocks."""
        return exchange_values(dict[str, PlainValue], settings, what, self._group)

    def _begin(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> Waitable:
        work: Waitable = dist.all_reduce(tensor, op=operation, group=self._group, async_op=True)
        return work

    def _global_rank(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


class ElasticRanks(ProcessGroupRanks):
    """The ranks of an elastic job. How many values a sum has is known when it is there, part by part.

    So what `begin_sum` gives is the average over those who contribute, which counts as the sum of one rank:
    divided by `size` it is what it is elsewhere.
    """

    @property
    def size(self) -> int:
        """By what a sum is divided."""
        return 1

    def begin_sum(self, tensor: torch.Tensor) -> Waitable:
        """Begin to replace `tensor` by the average over the ranks that contribute."""
        return self._begin(tensor, dist.ReduceOp.AVG)
