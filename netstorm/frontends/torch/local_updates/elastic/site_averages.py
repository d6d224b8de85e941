"""Averages and copies within a site of an elastic job, among the ranks that have begun it."""

from __future__ import annotations

import concurrent.futures
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch

from netstorm.errors import WaitTimeout
from netstorm.frontends.torch.process_group.member import Member
from netstorm.kvstore.calls import Sites, SiteSums, run_in_turn, set_memory
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation
from netstorm.protocol.codecs import COLLECTIVE
from netstorm.protocol.frames import ranks_in

__all__ = ["SiteAverages"]

_SLICE_S: Final = 0.2
"""Waits are cut into slices, so that Python's signal handlers run and a failure of the job is noticed."""


_End: TypeAlias = concurrent.futures.Future[int]
"""Its result is the bit set of the ranks that are in all parts of a result."""


class SiteAverages:
    """The averages of one training within one site. Who has joined later, or left, is in none of them: a rank
    that joins later is a site of its own.
    """

    def __init__(self, member: Member, *, is_newcomer: bool) -> None:
        """Begin; all ranks of the job make as many of these, in the same order.

        Args:
            member: this process in the default group.
            is_newcomer: it has joined later.
        """
        runtime = member.runtime
        self._member: Final = member
        self._namespace: Final = runtime.open_namespace()
        sites = Sites.of(runtime.node.requests.live.first_members, runtime.rank)
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
