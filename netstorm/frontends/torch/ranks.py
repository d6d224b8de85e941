"""The ranks of a process group or a site, as local updates need them: sums, averages, settings."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from netstorm.errors import Disagreement, UsageError, WaitTimeout
from netstorm.frontends.torch.member import ProcessGroupMember
from netstorm.frontends.torch.plain_values import PlainValue, exchange_values
from netstorm.frontends.torch.process_group import NetStormProcessGroup
from netstorm.kvstore.calls import Sites
from netstorm.kvstore.forms import Array
from netstorm.kvstore.operations import Done
from netstorm.kvstore.process.runtime import future_end
from netstorm.training.sites import SiteLead, SiteTensor

__all__ = [
    "ElasticRanks",
    "ProcessGroupRanks",
    "Ranks",
    "Settings",
    "SiteAverages",
    "Waitable",
    "check_agreement",
    "differences",
]


# The ranks of a process group, as far as local updates need them: sums, maxima, an exchange of settings.

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
        self.rank: Final = dist.get_rank(group)
        if self.rank < 0:
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


# Ranks compare their settings once: with different ones, sums would mix what does not belong together.

Settings: TypeAlias = Mapping[str, object]
"""What ranks must agree on, by the name that the script knows it by."""


def check_agreement(what: str, settings: Sequence[Settings]) -> None:
    """Raise `Disagreement`, at all ranks alike, if ranks differ from the first one.

    Args:
        what: the class, for the message.
        settings: of each rank, in order of ranks.
    """
    for rank, others in enumerate(settings):
        differing = differences(settings[0], others)
        if differing:
            raise Disagreement(
                f"{what}: "
                + "; ".join(
                    f"{name} is {first} at rank 0 and {other} at rank {rank}"
                    for name, first, other in differing
                )
                + ": all ranks must be given the same"
            )


def differences(first: Settings, second: Settings) -> list[tuple[str, object, object]]:
    """Return name and both values of what differs; what one side lacks is None there."""
    names = dict.fromkeys([*first, *second])
    return [
        (name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)
    ]


# Averages and copies within a site of an elastic job, among the ranks that have begun it.

_SLICE_S: Final = 0.2
"""Waits are cut into slices, so that Python's signal handlers run and a failure of the job is noticed."""


class SiteAverages:
    """The averages of one training's vectors within one site. Who has joined later, or left, is in none of
    them: a rank that joins later is a site of its own.
    """

    def __init__(
        self, member: ProcessGroupMember, vectors: Sequence[tuple[int, torch.dtype]], *, is_newcomer: bool
    ) -> None:
        """Begin; all ranks of the job make as many of these, in the same order.

        Args:
            member: this process in the default group.
            vectors: their elements and types, which are float16, float32 or float64.
            is_newcomer: it has joined later.
        """
        runtime = member.runtime
        self._member: Final = member
        sites = Sites.of(runtime.node.live.first_members, runtime.rank)
        tensors = [
            SiteTensor(f"averages of site: vector {number}", elements, np.dtype(str(dtype).split(".")[1]))
            for number, (elements, dtype) in enumerate(vectors)
        ]
        self._lead: Final = SiteLead(
            tensors,
            sites.without_others() if is_newcomer else sites,
            register=functools.partial(runtime.register, runtime.open_namespace()),
            submit=runtime.submit,
            elastic=True,
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the site that are left of those that have begun the job, as the last result says."""
        return self._lead.ranks

    @property
    def leader(self) -> int:
        """The one that speaks for all."""
        return self._lead.leader

    def average(self, vectors: Sequence[torch.Tensor]) -> None:
        """Replace vectors, which are contiguous, by their averages over the ranks of the site; blocks.

        Raises:
            WaitTimeout: another rank of the site has not called for as long as the group's time-out.
            NetStormError: the job has failed.
        """
        self._run(self._lead.average, vectors)

    def share(self, vectors: Sequence[torch.Tensor]) -> bool:
        """Replace vectors by the leader's; blocks. Return False if it has died: then another one leads, and
        the vectors have any values. Errors are those of `average`.
        """
        leader = self.leader
        self._run(self._lead.copy, vectors)
        return self.leader == leader

    def _run(
        self, begin: Callable[[Sequence[Array], str, int, Done], None], vectors: Sequence[torch.Tensor]
    ) -> None:
        hosts = [vector.cpu() for vector in vectors]
        end, done = future_end()
        begin([host.numpy() for host in hosts], "vectors of the model", 0, done)
        timeout = self._member.timeout.total_seconds()
        for _ in range(int(timeout / _SLICE_S) + 1):
            if concurrent.futures.wait([end], _SLICE_S).done:
                end.result()
                break
            self._member.runtime.check()
        else:
            raise WaitTimeout(
                "the average of the site has not come within the process group's time-out, "
                f"{timeout:g} s: another rank of the site has not called"
            )
        for host, vector in zip(hosts, vectors, strict=True):
            if host is not vector:
                vector.copy_(host)
