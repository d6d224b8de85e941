"""The asynchronous KVStore: `mx.kv.create('dist_async_netstorm')`.

Every push is applied at once by the owners of the key, a pull gives their newest values. How far ranks may be
apart is NETSTORM_STALENESS: without bound; by so many clocks (stale synchronous parallel, as in MLNET,
HotCloud'15); or, with 0, not at all. Then it *is* the synchronous store under another name: the sums of a
clock are formed along the trees, which sends far less than N gradients to each owner would.
"""

from __future__ import annotations

from typing import Any, Final

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arguments import grouped
from netstorm.frontends.mxnet.async_entry import AsyncEntry
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.owned_rule import OwnedRule
from netstorm.frontends.mxnet.owner import Owner
from netstorm.frontends.mxnet.quick import kind_of
from netstorm.frontends.mxnet.store import NetStormKVStore
from netstorm.frontends.mxnet.update_rule import UpdateRule
from netstorm.kvstore.async_operation import UNBOUNDED
from netstorm.kvstore.lifetime import runtime_of_this_process

__all__ = ["AsynchronousKVStore", "create_asynchronous"]

_TYPE: Final = "dist_async_netstorm"

_NO_OPTIMISER: Final = (
    "{what} to an asynchronous store without an optimizer: the owners of a key must know what to do with a "
    "gradient; call set_optimizer first (gluon.Trainer and Module do, with update_on_kvstore)"
)


_DENSE_ONLY: Final = (
    "an asynchronous store has dense values only; use dense parameters, or dist_sync_netstorm (or "
    "NETSTORM_STALENESS=0)"
)


def create_asynchronous() -> NetStormKVStore:
    """Return an asynchronous store, or with NETSTORM_STALENESS=0 one that keeps all ranks together."""
    settings = runtime_of_this_process().settings
    return InStepKVStore() if settings.staleness == 0 else AsynchronousKVStore()


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


class AsynchronousKVStore(NetStormKVStore):
    """A distributed key-value store whose values are each kept by one rank, which applies pushes at once."""

    _entry_type = AsyncEntry

    _takes_rows = False

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
        for user_key, values in grouped(key, value, "init"):
            _require_dense(values, user_key, "init")
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
        self._check()
        self._pull_all(self._pulled(key, out, ignore_sparse=ignore_sparse), priority)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push`, then `pull` to `out` (`value` itself if None)."""
        self._check()
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
        entries = [self._of(user_key) for user_key in self._entries]
        twice = next((entry for entry in entries if self._clock == 0 and entry.pushes.total > 1), None)
        if twice is not None:
            raise UsageError(
                f"clock() for the first time after {twice.pushes.total} pushes of key {twice.key.name!r}, "
                "which have counted as clocks: call it after the first step, and after each that follows "
                "(or once before the first push)"
            )
        self._clock += 1
        clock, namespace, whole = self._clock, self._namespace, self._owner and self._owner.rule.whole
        pushes = {entry.key: entry.pushes.in_clock for entry in entries if entry.pushes.in_clock}
        for entry in entries:
            entry.pushes.in_clock = 0
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
            for user_key in self._entries:
                self._of(user_key).own(self._owner)
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

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Refuse: owners apply plain gradients."""
        raise UsageError(
            f"gradient compression {compression_params!r}: an asynchronous store sends plain gradients; "
            "leave compression_params out, or use dist_sync_netstorm (or NETSTORM_STALENESS=0)"
        )

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Refuse: owners have dense values only."""
        raise UsageError(f"row_sparse_pull: {_DENSE_ONLY}")

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Refuse: each owner has the states of its own blocks."""
        raise UsageError(
            "save_optimizer_states: the states of an asynchronous store are spread over the ranks (MXNet "
            "refuses, too); with dist_sync_netstorm every rank has them all"
        )

    def load_optimizer_states(self, fname: str) -> None:
        """Refuse, as `save_optimizer_states` does."""
        raise UsageError("load_optimizer_states: an asynchronous store cannot; see save_optimizer_states")

    # --------------------------------------------------------------------------------------------------
    # helpers

    def _push_and_update(self, pushed: Any, priority: int) -> None:
        owner = self._owner
        if owner is None:
            raise UsageError(_NO_OPTIMISER.format(what="push"))
        for entry, values in pushed:
            _require_dense(values, entry.user_key, "push")
        for entry, values in pushed:
            entry.push_to_owners(values, owner, clock=self._clock, priority=priority)

    def _pull_all(self, pulled: Any, priority: int) -> None:
        for entry, outs in pulled:
            if self._owner is None:
                entry.pull(outs)
                continue
            clock = self._clock or entry.pushes.total
            least = 0 if self._staleness == UNBOUNDED else clock - self._staleness
            entry.pull_from_owners(outs, self._owner, least=least, counted=self._clock > 0, priority=priority)

    def _of(self, user_key: int | str) -> AsyncEntry:
        entry = self._entries[user_key]
        assert isinstance(entry, AsyncEntry)
        return entry


def _require_dense(values: list[Any], key: int | str, what: str) -> None:
    if not all(kind_of(value).dense for value in values):
        raise UsageError(f"{what} of key {key!r} with a sparse array: {_DENSE_ONLY}")
