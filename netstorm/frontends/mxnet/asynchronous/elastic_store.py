"""The part of an asynchronous store that belongs to elastic jobs: who is in, and ranks that join later."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from netstorm.checkpoint.files import claim_step
from netstorm.checkpoint.jobs import SaveOptions, Saving, wait_for_last_saving
from netstorm.errors import UsageError
from netstorm.frontends.mxnet.asynchronous.calls import Freshness
from netstorm.frontends.mxnet.asynchronous.entry import AsyncEntry, AsyncRowEntry
from netstorm.frontends.mxnet.asynchronous.owner import Owner
from netstorm.frontends.mxnet.asynchronous.saved_entries import collect_entries
from netstorm.frontends.mxnet.checkpoint import SavedEntry
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.elastic.round_results import RoundResults
from netstorm.frontends.mxnet.elastic.script_states import Get, Set
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors
from netstorm.frontends.mxnet.store.key_table import AnyEntry
from netstorm.frontends.mxnet.store.store import NetStormKVStore
from netstorm.kvstore.process.enough_nodes import wait_for_enough_nodes
from netstorm.kvstore.process.newcomer import Newcomer
from netstorm.kvstore.process.owners_snapshot import SavingRank

__all__ = ["ElasticOwnersStore", "owners_entry"]

_log = logging.getLogger(__name__)


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

    def save_checkpoint(
        self,
        path: str | Path,
        *,
        step: int | None = None,
        extra: object = None,
        shares: bool = True,
        keep: int | None = None,
        timeout_s: float = 600.0,
    ) -> Saving:
        """Begin to write a checkpoint; see `CheckpointedStore.save_checkpoint`.

        In an elastic job ranks have no step in common, so nobody waits for the others: each rank calls this
        when it likes, and one of them writes, alone: the lowest that takes part and whose script has not
        ended. At the others this does nothing. The writer asks the owners for values and states, with all of
        its own pushes. Each block's are of one moment; others may have been updated a little more or less
        often. `extra` is the writer's, and `step` the least number: it becomes larger if the folder has that
        one. `shares` is of no effect, and what gradient compression has kept is not saved.
        """
        if not self._is_elastic:
            return super().save_checkpoint(
                path, step=step, extra=extra, shares=shares, keep=keep, timeout_s=timeout_s
            )
        self._check_checkpoint("save_checkpoint")
        options = SaveOptions(step=step, shares=False, keep=keep, timeout_s=timeout_s, compares_tensors=False)
        ranks, rule = SavingRank(self._runtime), self._rule
        if not ranks.is_due:
            return Saving(step or 0, Path(path))
        wait_for_last_saving()
        options = replace(options, step=claim_step(path, step))
        entries: Sequence[SavedEntry] = self._keys.entries()
        if self._owner is not None and rule is not None:
            mx.nd.waitall()  # all pushes of this rank have their numbers
            entries, rule = collect_entries(self._runtime, self._all(), self._owner, rule)
        return self._checkpoints.save(path, entries, rule, extra, options, ranks=ranks)

    def _skips_checkpoint(self) -> bool:
        if not self._newcomer.waits:
            return super()._skips_checkpoint()
        _log.warning("load_checkpoint: nothing is loaded, since the owners have newer values")
        return True

    def _check_checkpoint(self, what: str) -> None:
        super()._check_checkpoint(what)
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
            owners_entry(entry).pull_from_owners((), self._owner, Freshness(None, counted=False, priority=0))
        elif newcomer.knows(entry.key):
            raise UsageError(
                f"init of key {entry.user_key!r} after a push, on a rank that has joined later: the others "
                "have it already; initialise all keys before the first push"
            )
        elif self._is_elastic:
            entry.elastic = RoundResults(self._runtime.size, rescales=False)
            entry.initialise(initial)
            self._checkpoints.initialised(entry)
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
