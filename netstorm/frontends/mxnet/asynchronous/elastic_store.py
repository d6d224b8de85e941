"""The part of an asynchronous store that belongs to elastic jobs: who is in, and ranks that join later."""

from __future__ import annotations

from typing import Final

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.asynchronous.calls import Freshness
from netstorm.frontends.mxnet.asynchronous.entry import AsyncEntry, AsyncRowEntry
from netstorm.frontends.mxnet.asynchronous.owner import Owner
from netstorm.frontends.mxnet.elastic.round_results import RoundResults
from netstorm.frontends.mxnet.elastic.script_states import Get, Set
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors
from netstorm.frontends.mxnet.store.key_table import AnyEntry
from netstorm.frontends.mxnet.store.store import NetStormKVStore
from netstorm.kvstore.process.enough_nodes import wait_for_enough_nodes
from netstorm.kvstore.process.newcomer import Newcomer

__all__ = ["ElasticOwnersStore", "owners_entry"]


@methods_raise_mxnet_errors
class ElasticOwnersStore(NetStormKVStore):
    """A store of owners as elastic jobs see it. In other jobs its methods say what is known from the start.

    Blocks move to other owners by themselves. A rank that joins later gets the owners' values, and takes part
    from its first push on.
    """

    _entry_type = AsyncEntry

    _row_entry_type = AsyncRowEntry

    _is_replicated = False

    def __init__(self) -> None:
        """Join the job, as `NetStormKVStore` does.

        Raises:
            UsageError: an elastic job has a store already in this process.
        """
        super().__init__()
        self._is_elastic: Final = self._runtime.node.requests.live.is_elastic
        if self._is_elastic and self._namespace > 0:
            raise UsageError(
                "an elastic job (NETSTORM_ELASTIC) has one store a process, with which a rank that joins "
                "later takes part: use one store for all keys"
            )
        self._newcomer: Final = Newcomer(self._runtime)
        self._owner: Owner | None = None

    @property
    def num_workers(self) -> int:
        """How many nodes the job has; in an elastic job, at this moment."""
        return len(self.live_ranks)

    @property
    def live_ranks(self) -> tuple[int, ...]:
        """The ranks that are in the job now."""
        return self._runtime.node.requests.live.ranks if self._is_elastic else super().live_ranks

    def attach_state(self, name: str, get: Get, set: Set) -> None:  # noqa: A002 -- as in `ElasticStore`
        """Do nothing: the job is not elastic.

        Raises:
            UsageError: it is. Ranks are in different steps, so no rank's state would fit a newcomer.
        """
        if self._is_elastic:
            raise UsageError(
                f"attach_state({name!r}): in an asynchronous store a rank that joins an elastic job later "
                "gets the values from their owners, and nothing else; leave the call out"
            )
        super().attach_state(name, get, set)

    def _check_checkpoint(self, what: str) -> None:
        super()._check_checkpoint(what)
        if self._is_elastic:
            raise UsageError(
                f"{what}: in an elastic job (NETSTORM_ELASTIC) ranks of an asynchronous store may join "
                "later, and have no step in common with the others: pull the values on one rank and save "
                "them with save_parameters, and the states with save_optimizer_states"
            )
        if what == "load_checkpoint" and self._owner is not None:
            raise UsageError(
                "load_checkpoint: the owners of an asynchronous store hold its values already: load before "
                "set_optimizer (and before the first step of a Trainer)"
            )

    def _barrier(self) -> None:
        """Wait until all ranks are here. A rank that has joined later skips those before its first push."""
        if not self._newcomer.waits:
            super()._barrier()

    # ------------------------------------------------------------------------------------------ for the store

    def _initialise(self, entry: AnyEntry, initial: NDArray) -> None:
        """Begin the round in which all ranks get the same value. A newcomer gets the present one from owners:
        nobody else will tell it what blocks are that have not been updated yet.
        """
        newcomer = self._newcomer
        if newcomer.waits:
            newcomer.begin_key(entry.key)
            entry.restore(initial, None, 0)
            owners_entry(entry).pull_from_owners((), self._owner, Freshness(0, counted=False, priority=0))
        elif newcomer.knows(entry.key):
            raise UsageError(
                f"init of key {entry.user_key!r} after a push, on a rank that has joined later: the others "
                "have it already; initialise all keys before the first push"
            )
        elif self._is_elastic:
            entry.elastic = RoundResults(self._runtime.size, rescales=False)
            entry.initialise(initial)
        else:
            super()._initialise(entry, initial)

    def _before_push(self) -> None:
        """Wait in an elastic job for enough nodes, and on a newcomer for all values; then it takes part."""
        if not self._is_elastic:
            return
        self._check()
        if self._newcomer.waits:
            for entry in self._all():
                entry.value.wait_to_read()
            self._newcomer.take_part()
        wait_for_enough_nodes(self._runtime)

    def _all(self) -> list[AsyncEntry | AsyncRowEntry]:
        return [owners_entry(entry) for entry in self._keys.entries()]


def owners_entry(entry: AnyEntry) -> AsyncEntry | AsyncRowEntry:
    """Return an entry as what `_entry_type` and `_row_entry_type` make it."""
    assert isinstance(entry, (AsyncEntry, AsyncRowEntry))
    return entry
