"""MixedSync: synchronous within a site, asynchronous between sites (GeoMX)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays.gil_calls import is_dense
from netstorm.frontends.mxnet.arrays.staging import StagingBuffer
from netstorm.frontends.mxnet.asynchronous.calls import Freshness
from netstorm.frontends.mxnet.asynchronous.entry import AsyncEntry
from netstorm.frontends.mxnet.asynchronous.owner import Owner
from netstorm.frontends.mxnet.asynchronous.store import AsynchronousKVStore
from netstorm.frontends.mxnet.engine.operations import Completion, NDArray, push_async
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors
from netstorm.frontends.mxnet.local_updates.entry import check_averages, site_sums
from netstorm.frontends.mxnet.store.gradient_compression import GradientCompression
from netstorm.kvstore.operations.allreduce import Operation
from netstorm.kvstore.operations.asynchronous import UNBOUNDED
from netstorm.kvstore.operations.site_sums import SiteSums, run_in_turn, set_memory
from netstorm.kvstore.operations.sites import Sites
from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.values.key import Key

__all__ = ["MixedSync"]


class _MixedEntry(AsyncEntry):
    """A dense key whose gradients are summed within the site before one rank pushes them."""

    __slots__ = ("_site_sum", "_sites", "_sums")

    def __init__(self, runtime: Runtime, key: Key, user_key: int | str) -> None:
        super().__init__(runtime, key, user_key)
        self._sites: Final = Sites.of(runtime.node.members, runtime.rank)
        self._sums: SiteSums | None = None
        self._site_sum: StagingBuffer | None = None

    def push_to_owners(
        self,
        values: Sequence[NDArray],
        owner: Owner,
        *,
        clock: int,
        priority: int,
        compression: GradientCompression | None = None,
    ) -> None:
        """Sum `values` over devices and the site, and have one of its ranks push the sum."""
        if not all(is_dense(value) for value in values):
            raise UsageError(f"push of key {self.user_key!r}: MixedSync sums dense gradients within a site")
        if self._site_sum is None:
            self._site_sum = StagingBuffer(self.key.spec.shape, self.key.dtype)
        summed = self._site_sum
        summed.sum_of(values, self.last)
        self._queue(summed, self._of_site.within(f"gradients of {self.key.name}", priority), priority)
        if self._sites.is_leader:
            super().push_to_owners(
                [summed.array], owner, clock=clock, priority=priority, compression=compression
            )

    def pull_from_owners(self, outs: Sequence[NDArray], owner: Owner | None, freshness: Freshness) -> None:
        """Have one rank of the site pull the newest value and give it to the others; copy it to `outs`."""
        if self._sites.is_leader:
            super().pull_from_owners((), owner, freshness)
        priority = freshness.priority
        self._queue(self._stored, self._of_site.from_leader(self.key.name, priority), priority)
        self.pull(outs)

    @property
    def _of_site(self) -> SiteSums:
        if self._sums is None:
            self._sums = site_sums(self._runtime, self.key, self._sites)
        return self._sums

    def _queue(self, array: StagingBuffer, operations: list[Operation], priority: int) -> None:
        """Queue operations of the site on `array`."""
        if not operations or self.key.elements == 0:
            return
        runtime, dtype = self._runtime, self.key.dtype

        def start(completion: Completion) -> None:
            set_memory(operations, np.frombuffer(array.memory(), dtype))
            run_in_turn(operations, runtime.submit, completion.end)

        push_async(
            start,
            reads=(),
            writes=(array.array,),
            name="netstorm_site",
            priority=priority,
            skipped=lambda: self._skip(array, operations[0].round),
        )


@methods_raise_mxnet_errors
class MixedSync(AsynchronousKVStore):
    """An asynchronous store of sites: their ranks stay in step, and no site waits for another one.

    A push sums the gradients of a site, and its lowest rank pushes the sum to the owners, which apply it at
    once. A pull gives all ranks of the site the value that this rank gets. The ranks of a site push and pull
    the same keys in the same order. Sites are those of NETSTORM_SITE, or hosts.
    """

    _entry_type = _MixedEntry

    def __init__(self) -> None:
        """Join the job, as `NetStormKVStore` does.

        Raises:
            UsageError: the job is elastic; or NETSTORM_STALENESS is set: only one rank of a site pushes, so
                the others' clocks stop.
        """
        super().__init__()
        if self._is_elastic:
            raise UsageError(
                "MixedSync in an elastic job (NETSTORM_ELASTIC): the ranks of a site push together, and "
                "cannot go on without one of them; use dist_async_netstorm, or a fixed number of nodes"
            )
        staleness = self._runtime.settings.staleness
        if staleness != UNBOUNDED:
            raise UsageError(
                f"MixedSync with NETSTORM_STALENESS={staleness}: sites wait for nobody; leave it out, or use "
                "dist_async_netstorm, whose ranks it bounds"
            )
        self._sites: Final = Sites.of(self._runtime.node.members, self.rank)

    @property
    def sites(self) -> Sites:
        """Which ranks are at which site."""
        return self._sites

    def init(self, key: object, value: object) -> None:
        """Make keys known and give them rank 0's values, on all ranks. See `NetStormKVStore.init`.

        Raises:
            UsageError: also of a key that is row-sparse or of whole numbers.
        """
        check_averages("MixedSync", key, value)
        super().init(key, value)
