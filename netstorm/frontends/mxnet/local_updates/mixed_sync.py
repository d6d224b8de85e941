"""MixedSync: synchronous within a site, asynchronous between sites (GeoMX)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays.gil_calls import is_dense
from netstorm.frontends.mxnet.arrays.staging import StagingBuffer
from netstorm.frontends.mxnet.asynchronous.calls import Freshness, Number, Target
from netstorm.frontends.mxnet.asynchronous.entry import AsyncEntry
from netstorm.frontends.mxnet.asynchronous.owner import Owner
from netstorm.frontends.mxnet.asynchronous.store import AsynchronousKVStore
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors
from netstorm.frontends.mxnet.local_updates.entry import check_averages, site_sums
from netstorm.frontends.mxnet.store.gradient_compression import GradientCompression
from netstorm.frontends.mxnet.store.key_table import AnyEntry, Given
from netstorm.kvstore.calls import SiteLead, Sites
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import UNBOUNDED, Done
from netstorm.kvstore.process.runtime import Runtime

__all__ = ["MixedSync"]


class _MixedEntry(AsyncEntry):
    """A dense key whose gradients are summed within the site before one rank, the leader, pushes them.

    Sums and pulls of the site are made one after the other. Which rank leads may depend on the one before, so
    pushes and pulls take their numbers when they are made.
    """

    __slots__ = ("_lead", "_turn")

    def __init__(self, runtime: Runtime, key: Key, user_key: int | str) -> None:
        super().__init__(runtime, key, user_key)
        self._turn: Final = StagingBuffer((1,), np.uint8)
        """What the ranks of the site do together writes it."""
        self._lead: SiteLead | None = None

    @property
    def lead(self) -> SiteLead:
        """Who pushes and pulls."""
        assert self._lead is not None
        return self._lead

    def join_site(self, sites: Sites) -> None:
        """Begin; called once, before the key is used."""
        runtime, key = self._runtime, self.key
        sums = None if len(sites.local) == 1 or key.elements == 0 else site_sums(runtime, key, sites)
        self._lead = SiteLead(runtime.rank, sites.local, sums, runtime.submit)

    def push_to_owners(
        self,
        values: Sequence[NDArray],
        owner: Owner,
        *,
        clock: int,
        priority: int,
        compression: GradientCompression | None = None,
    ) -> None:
        """Sum `values` over devices and the site, and have its leader push the sum."""
        if not all(is_dense(value) for value in values):
            raise UsageError(f"push of key {self.user_key!r}: MixedSync sums dense gradients within a site")
        super().push_to_owners(values, owner, clock=clock, priority=priority, compression=compression)

    def pull_from_owners(self, outs: Sequence[NDArray], owner: Owner | None, freshness: Freshness) -> None:
        """Have the site's leader pull the newest value and give it to the others; copy it to `outs`."""
        stored, calls, name = self._stored, self.calls, self.key.name

        def begin(done: Done) -> None:
            values = self._flat(stored)

            def pull(pulled: Done) -> None:
                calls.pull_now(Target(values), owner, freshness, pulled)

            self.lead.share(values, name, freshness.priority, pull, done)

        arrays = (stored.array, self._turn.array)
        calls.queue(begin, arrays, "netstorm_pull", freshness.priority, owed=f"a pull of key {name!r}")
        self.pull(outs)

    def pull_states(self, owner: Owner) -> tuple[NDArray, dict[int, bytes]]:
        """Return the owners' states; see `AsyncEntry.pull_states`. Waits until pushes have their numbers."""
        self._turn.array.wait_to_read()
        return super().pull_states(owner)

    def _number_of(self, gradient: StagingBuffer, owner: Owner, priority: int) -> Number:
        """Queue the sum of the site's gradients; return what has the number of the push if this rank leads.

        A rank that has just begun to lead pulls first: owners correct late gradients by what has changed
        since a rank's last pull, and know nothing of this one.
        """
        calls, key, taken = self.calls, self.key, list[int]()

        def begin(done: Done) -> None:
            lead = self.lead
            led = lead.leads

            def take(error: Exception | None) -> None:
                if error is None and lead.leads:
                    taken.append(calls.take_number())
                done(error)

            def summed(error: Exception | None) -> None:
                if error is None and lead.leads and not led:
                    dropped = Target(np.empty(key.elements, key.dtype))
                    calls.pull_now(dropped, owner, Freshness(None, counted=False, priority=priority), take)
                else:
                    take(error)

            lead.sum(self._flat(gradient), f"gradients of {key.name}", priority, summed)

        arrays = (gradient.array, self._turn.array)
        calls.queue(begin, arrays, "netstorm_site", priority, owed=f"a sum of key {key.name!r}")
        return lambda: taken[0] if taken else None


@methods_raise_mxnet_errors
class MixedSync(AsynchronousKVStore):
    """An asynchronous store of sites: their ranks stay in step, and no site waits for another one.

    A push sums the gradients of a site, and its lowest rank pushes the sum to the owners, which apply it at
    once. A pull gives all ranks of the site the value that this rank gets. The ranks of a site push and pull
    the same keys in the same order. Sites are those of NETSTORM_SITE, or hosts.

    In an elastic job a site goes on without ranks that have left; if its lowest rank has, the next one pushes
    and pulls, and a push under way may be lost with the former. A rank that joins later is a site of its own.

    Where NETSTORM_STALENESS bounds how far sites may be apart, all ranks call `clock` after each step.
    """

    _entry_type = _MixedEntry

    _owners_count_pushes = False
    """Of most ranks there are none: clocks are those that scripts count."""

    def __init__(self) -> None:
        """Join the job, as `NetStormKVStore` does.

        Raises:
            UsageError: NETSTORM_STALENESS is 0; or an elastic job has a store already in this process.
        """
        super().__init__()
        if self._staleness == 0:
            raise UsageError(
                "MixedSync with NETSTORM_STALENESS=0, which keeps all ranks in step: use dist_sync_netstorm"
            )
        live = self._runtime.node.requests.live
        members = live.first_members if self._is_elastic else self._runtime.node.members
        sites = Sites.of(members, self.rank)
        self._sites: Final = sites.without_others() if self._newcomer.waits else sites

    @property
    def sites(self) -> Sites:
        """Which ranks are at which site. In an elastic job those that have begun it, whether they are still
        there or not; on a rank that has joined later, this one alone.
        """
        return self._sites

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's site; in an elastic job those that are left of it, as results say that
        have come so far.
        """
        left = set(self._sites.local)
        for entry in self._all():
            assert isinstance(entry, _MixedEntry)
            left.intersection_update(entry.lead.ranks)
        return tuple(sorted(left))

    def init(self, key: object, value: object) -> None:
        """Make keys known and give them rank 0's values, on all ranks. See `NetStormKVStore.init`.

        Raises:
            UsageError: also of a key that is row-sparse or of whole numbers.
        """
        check_averages("MixedSync", key, value)
        super().init(key, value)

    def _push_and_update(self, pushed: Given, priority: int) -> None:
        if self._staleness != UNBOUNDED and self._clock == 0:
            self._check_first_clock(pushed)
        super()._push_and_update(pushed, priority)

    def _check_first_clock(self, pushed: Given) -> None:
        for entry, _ in pushed:
            assert isinstance(entry, _MixedEntry)
            if entry.calls.called:
                raise UsageError(
                    f"push of key {entry.user_key!r} for the second time, and no clock() before, under "
                    f"NETSTORM_STALENESS={self._staleness}: only one rank of a site pushes, so the store "
                    "cannot tell steps by pushes: call clock() after each step, on all ranks"
                )

    def _initialise(self, entry: AnyEntry, initial: NDArray) -> None:
        assert isinstance(entry, _MixedEntry)
        entry.join_site(self._sites)
        super()._initialise(entry, initial)
