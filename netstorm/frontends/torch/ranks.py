"""The ranks of a process group or a site, as local updates need them: sums, averages, settings."""

from __future__ import annotations

import concurrent.futures
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import torch
import torch.distributed as dist

from netstorm.errors import Disagreement, UsageError, WaitTimeout
from netstorm.frontends.torch.member import ProcessGroupMember
from netstorm.frontends.torch.plain_values import PlainValue, exchange_values
from netstorm.frontends.torch.process_group import NetStormProcessGroup
from netstorm.kvstore.calls import Sites, SiteSums, run_in_turn, set_memory
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation
from netstorm.protocol.codecs import COLLECTIVE
from netstorm.protocol.frames import ranks_in

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


_End: TypeAlias = concurrent.futures.Future[int]
"""Its result is the bit set of the ranks that are in all parts of a result."""


class SiteAverages:
    """The averages of one training within one site. Who has joined later, or left, is in none of them: a rank
    that joins later is a site of its own.
    """

    def __init__(self, member: ProcessGroupMember, *, is_newcomer: bool) -> None:
        """Begin; all ranks of the job make as many of these, in the same order.

        Args:
            member: this process in the default group.
            is_newcomer: it has joined later.
        """
        runtime = member.runtime
        self._member: Final = member
        self._namespace: Final = runtime.open_namespace()
        sites = Sites.of(runtime.node.live.first_members, runtime.rank)
        self._sites: Final = None if is_newcomer or len(sites.local) == 1 else sites
        self._sums: Final[dict[int, SiteSums]] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the site that have begun the job, whether they are still there or not."""
        return (self._member.runtime.rank,) if self._sites is None else self._sites.local

    def average(self, vectors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Replace vectors by their averages over the ranks of the site that contribute; blocks.

        Args:
            vectors: contiguous, of float16, float32 or float64, the same at all ranks of the site. Each has a
                number, its place.

        Returns:
            the ranks that are in all averages, ascending; the same at all of them.

        Raises:
            WaitTimeout: another rank of the site has not called for as long as the group's time-out.
            NetStormError: the job has failed.
        """
        return self._each(vectors, lambda sums, text: sums.average_within(text))

    def copy_from(self, leader: int, vectors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Replace vectors by those of one rank of the site; blocks.

        Args:
            leader: the rank.
            vectors: as of `average`.

        Returns:
            as `average`. If `leader` is not among them, it has died, and the vectors have any values.

        Raises:
            WaitTimeout: as `average`.
            NetStormError: the job has failed.
        """
        return self._each(vectors, lambda sums, text: sums.from_leader(text, leader=leader))

    def _each(
        self, vectors: Sequence[torch.Tensor], operations: Callable[[SiteSums, str], list[Operation]]
    ) -> tuple[int, ...]:
        if self._sites is None:
            return self.ranks
        ends = [
            self._begin(number, vector, self._sites, operations)
            for number, vector in enumerate(vectors)
            if len(vector)
        ]
        return tuple(ranks_in(functools.reduce(operator.and_, map(self._wait, ends))))

    def _begin(
        self,
        number: int,
        vector: torch.Tensor,
        sites: Sites,
        operations: Callable[[SiteSums, str], list[Operation]],
    ) -> _End:
        end: _End = concurrent.futures.Future()
        host = vector.cpu()
        values, runtime = host.numpy(), self._member.runtime
        sums = self._sums.get(number)
        if sums is None:
            sums = self._sums[number] = SiteSums(
                f"averages of site: vector {number}",
                len(values),
                values.dtype,
                sites,
                register=self._register,
                of_all=False,
            )
        (operation,) = operations(sums, f"vector {number} of the model")
        set_memory([operation], values)

        def done(error: Exception | None) -> None:
            if error is not None:
                end.set_exception(error)
                return
            if host is not vector:
                vector.copy_(host)
            everyone = sum(1 << rank for rank in sites.local)
            end.set_result(functools.reduce(operator.and_, operation.contributors, everyone))

        run_in_turn([operation], runtime.submit, done)
        return end

    def _register(self, name: str, elements: int, members: tuple[int, ...]) -> Key:
        return self._member.runtime.register(
            self._namespace, name, (elements,), "float32", form=COLLECTIVE, members=members
        )

    def _wait(self, end: _End) -> int:
        timeout = self._member.timeout.total_seconds()
        for _ in range(int(timeout / _SLICE_S) + 1):
            if concurrent.futures.wait([end], _SLICE_S).done:
                return end.result()
            self._member.runtime.check()
        raise WaitTimeout(
            f"the average of the site has not come within the process group's time-out, {timeout:g} s: "
            "another rank of the site has not called"
        )
