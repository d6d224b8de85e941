"""The asynchronous KVStore: `mx.kv.create('dist_async_netstorm')`.

Every push is applied at once by the owners of the key, a pull gives their newest values. How far ranks may be
apart is NETSTORM_STALENESS: without bound; by so many clocks (stale synchronous parallel, as in MLNET,
HotCloud'15); or, with 0, not at all. Then it *is* the synchronous store under another name: the sums of a
clock are formed along the trees, which sends far less than N gradients to each owner would.
"""

from __future__ import annotations

from typing import Any, Final

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays.arguments import check_dense, grouped
from netstorm.frontends.mxnet.asynchronous.calls import Wanted
from netstorm.frontends.mxnet.asynchronous.collected_states import Collected
from netstorm.frontends.mxnet.asynchronous.entry import AsyncEntry, AsyncRowEntry
from netstorm.frontends.mxnet.asynchronous.owned_rule import OwnedRule
from netstorm.frontends.mxnet.asynchronous.owner import Owner
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors, raises_mxnet_errors
from netstorm.frontends.mxnet.store.store import NetStormKVStore
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule
from netstorm.kvstore.operations.asynchronous import UNBOUNDED
from netstorm.kvstore.process.lifetime import runtime_of_this_process

__all__ = ["AsynchronousKVStore", "create_asynchronous"]

_TYPE: Final = "dist_async_netstorm"

_NO_OPTIMISER: Final = (
    "{what} to an asynchronous store without an optimizer: the owners of a key must know what to do with a "
    "gradient; call set_optimizer first (gluon.Trainer and Module do, with update_on_kvstore)"
)


@raises_mxnet_errors
def create_asynchronous() -> NetStormKVStore:
    """Return an asynchronous store, or with NETSTORM_STALENESS=0 one that keeps all ranks together."""
    settings = runtime_of_this_process().settings
    return InStepKVStore() if settings.staleness == 0 else AsynchronousKVStore()


@methods_raise_mxnet_errors
class InStepKVStore(NetStormKVStore):
    """An asynchronous store whose ranks may not be apart: the synchronous one."""

    @property
    def type(self) -> str:
        """The name that `gluon.Trainer` and `Module` look for "dist" and "async" in."""
        return _TYPE

    def clock(self) -> None:
        """Do nothing: each push of a key is a clock, as long as nobody may be ahead."""
        self._check()

    def _push_and_update(self, pushed: Any, priority: int) -> None:
        if self._rule is None:
            raise UsageError(_NO_OPTIMISER.format(what="push"))
        super()._push_and_update(pushed, priority)


@methods_raise_mxnet_errors
class AsynchronousKVStore(NetStormKVStore):
    """A distributed key-value store whose values are each kept by one rank, which applies pushes at once."""

    _entry_type = AsyncEntry

    _row_entry_type = AsyncRowEntry

    def __init__(self) -> None:
        """Join the job, as `NetStormKVStore` does."""
        super().__init__()
        self._owner: Owner | None = None
        self._staleness: Final = self._runtime.settings.staleness
        self._clock = 0

    @property
    def type(self) -> str:
        """The name that `gluon.Trainer` and `Module` look for "dist" and "async" in."""
        return _TYPE

    def statistics(self) -> dict[str, float]:
        """Return what this node has done so far; in addition to what `NetStormKVStore` says, of all blocks
        that it has pushed: `staleness_mean` and `staleness_max`, the updates by other ranks between the value
        that a gradient was computed on and its application.
        """
        found = super().statistics()
        pushes = found.get("pushes_of_blocks", 0)
        found["staleness_mean"] = found.get("staleness_total", 0.0) / pushes if pushes else 0.0
        found.setdefault("staleness_max", 0.0)
        return found

    def init(self, key: Any, value: Any) -> None:
        """Make keys known and give them rank 0's values, on all ranks. See `NetStormKVStore.init`."""
        known = set(self._entries)
        super().init(key, value)
        if self._owner is not None:
            for user_key in [one for one in self._entries if one not in known]:
                self._of(user_key).own(self._owner)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """`init`, and give the initial values to `out`."""
        self.init(key, value)
        for entry, outs in self._found(grouped(key, out, "broadcast"), "broadcast"):
            entry.pull(outs)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy the newest values of owners to one or several arrays each: with all that this rank has pushed
        before, whatever the others have pushed by then, and at least what NETSTORM_STALENESS says of it.

        Before this rank has an optimizer they are the initial values. Arguments and errors are those of
        `NetStormKVStore.pull`.
        """
        with self._short_call():
            self._pull_all(self._pulled(key, out, ignore_sparse=ignore_sparse), priority)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push`, then `pull` to `out` (`value` itself if None)."""
        with self._short_call():
            pushed = self._found(grouped(key, value, "pushpull"), "pushpull")
            pulled = pushed if out is None else self._found(grouped(key, out, "pushpull"), "pushpull")
            self._push_and_update(pushed, priority)
            self._pull_all(pulled, priority)

    def clock(self) -> None:
        """End a clock of this rank: what it has pushed since the last one belongs to it (MLNET).

        From the first call on, NETSTORM_STALENESS counts these clocks. A script that never calls it has one
        for each push of a key.

        Raises:
            UsageError: a first call after a key has been pushed twice: those were two clocks.
        """
        self._check()
        calls = [entry.calls for entry in self._all()]
        twice = next((one for one in calls if self._clock == 0 and one.pushes.total > 1), None)
        if twice is not None:
            raise UsageError(
                f"clock() for the first time after {twice.pushes.total} pushes of key {twice.key.name!r}, "
                "which have counted as clocks: call it after the first step, and after each that follows "
                "(or once before the first push)"
            )
        self._clock += 1
        clock, namespace, whole = self._clock, self._namespace, self._owner and self._owner.rule.whole
        pushes = {one.key: one.pushes.in_clock for one in calls if one.pushes.in_clock}
        for one in calls:
            one.pushes.in_clock = 0
        if self._staleness != UNBOUNDED:
            self._runtime.post(
                lambda node, _: node.owners().clock(namespace, clock, pushes, whole=bool(whole))
            )

    # -------------------------------------------------------------------------------------------------
    # updating

    def set_optimizer(self, optimizer: Any) -> None:
        """Have owners update their blocks with `optimizer`: every rank makes a copy of it for what it owns.

        A learning rate that a script changes later, and the scale of gradients, go with each push. A learning
        rate scheduler counts the updates of a block, by all ranks, as MXNet's does. A second optimizer waits
        for all ranks.

        Raises:
            UsageError: not an optimizer; or one that needs whole tensors after one that does not, or the
                other way round.
        """
        self._use(UpdateRule.of_optimizer(optimizer))

    def _set_updater(self, updater: Any) -> None:
        """Have owners update keys with `updater(key, gradient, stored)`, called on a thread of its own."""
        self._use(UpdateRule.of_function(updater))

    def _use(self, rule: UpdateRule) -> None:
        self._check()
        owned = OwnedRule(rule)
        if self._owner is None:
            self._owner = Owner(self._runtime, owned)
            for entry in self._all():
                entry.own(self._owner)
        else:
            if owned.whole != self._owner.rule.whole and self._entries:
                raise UsageError(
                    f"{owned.text} after {self._owner.rule.text}: one of them needs whole tensors, and the "
                    "values are where the first one put them; make another store"
                )
            mx.nd.waitall()  # all of this rank's pushes have been applied, and then everybody's have
            self._barrier()
            self._owner.rule = owned
            self._barrier()
        self._rule = rule
        self._updater = rule.updater

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Collect the optimiser's states from their owners, and write them to a file. Any rank may, alone,
        and waits for it; all of its own pushes are in them.

        The file is one of `NetStormKVStore.save_optimizer_states`, and either kind of store reads it. With
        `dump_optimizer` the optimiser is in it, too, with its counts of updates.
        """
        self._check()
        if self._rule is None or not self._rule.has_states or self._owner is None:
            raise UsageError(
                "save_optimizer_states: call set_optimizer first; there are no states without an optimizer"
            )
        asked = [(entry, *entry.pull_states(self._owner)) for entry in self._all()]
        collected = Collected()
        for entry, array, found in asked:
            array.wait_to_read()
            collected.add(entry.user_key, entry.key.spec.shape, found)
        collected.save(fname, self._rule.updater.optimizer, dump_optimizer=dump_optimizer)

    def load_optimizer_states(self, fname: str) -> None:
        """Read what `save_optimizer_states` wrote, in a job of however many nodes; each rank takes what it
        owns. Every rank must call it, and waits for the others.

        Raises:
            UsageError: the file is damaged; or no optimiser has been set.
            OSError: it cannot be read.
        """
        self._check()
        super().load_optimizer_states(fname)
        assert self._rule is not None
        self._use(self._rule)

    # --------------------------------------------------------------------------------------------------
    # helpers

    def _push_and_update(self, pushed: Any, priority: int) -> None:
        owner = self._owner
        if owner is None:
            raise UsageError(_NO_OPTIMISER.format(what="push"))
        compression = self._compression
        if compression is not None:
            for entry, values in pushed:
                compression.check_key(entry.key, "push")
                check_dense(values, entry.key, "push under gradient compression")
        for entry, values in pushed:
            entry.push_to_owners(values, owner, clock=self._clock, priority=priority, compression=compression)

    def _pull_all(self, pulled: Any, priority: int) -> None:
        for entry, outs in pulled:
            if self._owner is None:
                entry.pull(outs)
                continue
            entry.pull_from_owners(outs, self._owner, self._wanted(entry, priority))

    def _pull_rows(self, entry: Any, out: Any, row_ids: Any, priority: int) -> None:
        if self._owner is None:
            entry.pull_rows(out, row_ids)
        else:
            entry.pull_rows_from_owners(out, row_ids, self._owner, self._wanted(entry, priority))

    def _wanted(self, entry: AsyncEntry | AsyncRowEntry, priority: int) -> Wanted:
        """Return what a pull must have in it now."""
        clock = self._clock or entry.calls.pushes.total
        least = 0 if self._staleness == UNBOUNDED else clock - self._staleness
        return Wanted(least, self._clock > 0, priority)

    def _all(self) -> list[AsyncEntry | AsyncRowEntry]:
        return [self._of(user_key) for user_key in self._entries]

    def _of(self, user_key: int | str) -> AsyncEntry | AsyncRowEntry:
        entry = self._entries[user_key]
        assert isinstance(entry, (AsyncEntry, AsyncRowEntry))
        return entry
