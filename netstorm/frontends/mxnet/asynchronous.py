"""The asynchronous KVStore: `mx.kv.create('dist_async_netstorm')`.

The owners of a key apply every push at once, and a pull returns their newest values. NETSTORM_STALENESS
bounds how far ranks may be apart: without a bound; by so many clocks (stale synchronous parallel, as in
MLNET, HotCloud'15); or, with 0, not at all. With 0 it *is* the synchronous store under another name: the sums
of a clock are formed along the trees, which sends far less than N gradients to each owner.
"""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays.arguments import grouped
from netstorm.frontends.mxnet.arrays.staging import StagingBuffer
from netstorm.frontends.mxnet.asynchronous.calls import Freshness
from netstorm.frontends.mxnet.asynchronous.collected_states import CollectedStates
from netstorm.frontends.mxnet.asynchronous.elastic_store import ElasticOwnersStore, owners_entry
from netstorm.frontends.mxnet.asynchronous.entry import AsyncEntry, AsyncRowEntry
from netstorm.frontends.mxnet.asynchronous.owned_rule import OwnedRule
from netstorm.frontends.mxnet.asynchronous.owner import Owner
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import Completion, NDArray, push_async
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors, raises_mxnet_errors
from netstorm.frontends.mxnet.store.gradient_compression import compression_of
from netstorm.frontends.mxnet.store.key_table import Given
from netstorm.frontends.mxnet.store.row_entry import RowEntry
from netstorm.frontends.mxnet.store.store import NetStormKVStore
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import UNBOUNDED
from netstorm.kvstore.process.runtime import describe_compression, runtime_of_this_process

__all__ = ["AsynchronousKVStore", "create_asynchronous"]

_TYPE: Final = "dist_async_netstorm"

_NO_OPTIMIZER: Final = (
    "{what} to an asynchronous store without an optimizer: the owners of a key must know what to do with a "
    "gradient; call set_optimizer first (gluon.Trainer and Module do, with update_on_kvstore)"
)


@raises_mxnet_errors
def create_asynchronous() -> NetStormKVStore:
    """Return an asynchronous store, or with NETSTORM_STALENESS=0 one that keeps all ranks together."""
    settings = runtime_of_this_process(framework="MXNet").settings
    return InStepKVStore() if settings.staleness == 0 else AsynchronousKVStore()


@methods_raise_mxnet_errors
class InStepKVStore(NetStormKVStore):
    """An asynchronous store whose ranks stay in the same step: the synchronous one."""

    @property
    def type(self) -> str:
        """The name that `gluon.Trainer` and `Module` look for "dist" and "async" in."""
        return _TYPE

    def clock(self) -> None:
        """Do nothing: as no rank may be ahead, each push of a key is a clock."""
        self._check()

    def _push_and_update(self, pushed: Given, priority: int) -> None:
        if self._rule is None:
            raise UsageError(_NO_OPTIMIZER.format(what="push"))
        super()._push_and_update(pushed, priority)


@methods_raise_mxnet_errors
class AsynchronousKVStore(ElasticOwnersStore):
    """A distributed key-value store whose values are each kept by one rank, which applies pushes at once."""

    _owners_count_pushes: ClassVar[bool] = True
    """Owners know by the number of a rank's pushes how far it is."""

    def __init__(self) -> None:
        """Join the job, as `ElasticOwnersStore` does."""
        super().__init__()
        self._runtime.refuse_if_reproducible("an asynchronous store")
        self._staleness: Final = self._runtime.settings.staleness
        self._clock = 0
        self._clocks_gate: Final = StagingBuffer((1,), np.uint8)
        """Written by what announces clocks, so that they end in their order."""

    @property
    def type(self) -> str:
        """The name that `gluon.Trainer` and `Module` look for "dist" and "async" in."""
        return _TYPE

    def statistics(self) -> dict[str, float]:
        """Return what this node has done so far, with the staleness of all blocks that it has pushed.

        `staleness_mean` and `staleness_max` count the updates by other ranks between the value that a
        gradient was computed on and the update with that gradient.
        """
        found = super().statistics()
        pushes = found.get("pushes_of_blocks", 0)
        found["staleness_mean"] = found.get("staleness_total", 0.0) / pushes if pushes else 0.0
        found.setdefault("staleness_max", 0.0)
        return found

    def init(self, key: object, value: object) -> None:
        """Make keys known and give them rank 0's values, on all ranks. See `NetStormKVStore.init`.

        In an elastic job they get those of the lowest rank that is there; a rank that joins later gets the
        owners' present ones.

        Raises:
            UsageError: also if the others had a key when this rank joined, and it has pushed already.
        """
        known = len(self._keys.entries())
        super().init(key, value)
        if self._owner is not None:
            for entry in self._all()[known:]:
                entry.own(self._owner)

    def broadcast(self, key: object, value: object, out: object, priority: int = 0) -> None:
        """`init`, and give the initial values to `out`."""
        self.init(key, value)
        for entry, outs in self._keys.find(grouped(key, out, "broadcast"), "broadcast"):
            entry.pull(outs)

    def push(self, key: object, value: object, priority: int = 0) -> None:
        """Have the owners update their blocks with the sum of values over all devices of this rank.

        Arguments and errors are those of `NetStormKVStore.push`.

        Raises:
            WaitTimeout: an elastic job has had too few nodes for too long.
        """
        self._before_push()
        super().push(key, value, priority)

    def pull(self, key: object, out: object = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy the owners' newest values to one or several arrays each.

        They have all earlier pushes of this rank, what the others have pushed by then, and at least the
        pushes that NETSTORM_STALENESS demands. Before this rank has an optimizer they are the initial values.
        Arguments and errors are those of `NetStormKVStore.pull`.
        """
        with self._short_call():
            self._pull_all(self._pulled(key, out, ignore_sparse=ignore_sparse), priority)

    def pushpull(self, key: object, value: object, out: object = None, priority: int = 0) -> None:
        """`push`, then `pull` to `out` (`value` itself if None)."""
        self._before_push()
        with self._short_call():
            pushed = self._keys.find(grouped(key, value, "pushpull"), "pushpull")
            pulled = pushed if out is None else self._keys.find(grouped(key, out, "pushpull"), "pushpull")
            self._push_and_update(pushed, priority)
            self._pull_all(pulled, priority)

    def clock(self) -> None:
        """End a clock of this rank: the pushes since the last call belong to it (MLNET).

        From the first call on, NETSTORM_STALENESS counts these clocks. In a script that never calls this,
        each push of a key is a clock.

        Raises:
            UsageError: the first call comes after a key has been pushed twice, which were two clocks.
        """
        self._check()
        calls = [entry.calls for entry in self._all()]
        twice = next((call for call in calls if self._clock == 0 and call.called > 1), None)
        if twice is not None:
            raise UsageError(
                f"clock() for the first time after {twice.called} pushes of key {twice.key.name!r}, "
                "which have counted as clocks: call it after the first step, and after each that follows "
                "(or once before the first push)"
            )
        self._clock += 1
        pushes = {call.key: call.pushes.in_clock for call in calls if call.pushes.in_clock}
        for call in calls:
            call.pushes.in_clock = 0
        if self._staleness == UNBOUNDED:
            return
        if self._owners_count_pushes and not self._is_elastic:
            self._announce_clock(self._clock, pushes)
        else:
            self._announce_clock_once_applied(self._clock)

    # -------------------------------------------------------------------------------------------------
    # updating

    def set_optimizer(self, optimizer: object) -> None:
        """Have owners update their blocks with `optimizer`: every rank makes a copy of it for its blocks.

        The learning rate and the scale of gradients, which a script may change later, are sent with each
        push. A learning rate scheduler counts the updates of a block by all ranks, as MXNet's does. Setting a
        second optimizer waits for all ranks.

        Raises:
            UsageError: not an optimizer; or one that needs whole tensors after one that does not, or the
                other way round.
        """
        self._check()
        rule = UpdateRule.of_optimizer(optimizer)
        self._checkpoints.optimizer_set(rule)
        self._use(rule)

    def _set_updater(self, updater: object) -> None:
        """Have owners update keys with `updater(key, gradient, stored)`, called on a thread for updates."""
        self._use(UpdateRule.of_function(updater))

    def _use(self, rule: UpdateRule) -> None:
        self._check()
        owned = OwnedRule(rule, elastic=self._is_elastic)
        if self._owner is None:
            self._owner = Owner(self._runtime, owned)
            for entry in self._all():
                entry.own(self._owner)
        else:
            if self._is_elastic and any(entry.calls.called for entry in self._all()):
                raise UsageError(
                    f"{owned.fingerprint} after pushes in an elastic job: other ranks keep states of "
                    f"{self._owner.rule.fingerprint}; set optimizers and load their states before the first "
                    "push"
                )
            if owned.whole != self._owner.rule.whole and self._keys.entries():
                raise UsageError(
                    f"{owned.fingerprint} after {self._owner.rule.fingerprint}: one of them needs whole "
                    "tensors, and the values are where the first one put them; make another store"
                )
            mx.nd.waitall()  # this rank's pushes have been applied, and after the barrier all ranks'
            self._barrier()
            self._owner.rule = owned
            self._barrier()
        self._rule = rule
        self._updater = rule.updater

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Collect the optimizer's states from their owners, and write them to a file.

        One rank may call this alone. It waits for the states, which have all pushes of this rank. The file is
        like those of `NetStormKVStore.save_optimizer_states`, and either kind of store reads it. With
        `dump_optimizer` it has the optimizer, too, with its counts of updates.

        Raises:
            UsageError: no optimizer has been set.
        """
        self._check()
        optimizer = None if self._rule is None else self._rule.optimizer
        if optimizer is None or self._owner is None:
            raise UsageError(
                "save_optimizer_states: call set_optimizer first; there are no states without an optimizer"
            )
        self._collect_states(self._owner).save(fname, optimizer, dump_optimizer=dump_optimizer)

    def load_optimizer_states(self, fname: str) -> None:
        """Read what `save_optimizer_states` wrote, in a job of however many nodes; each rank takes the states
        of its blocks. Every rank must call it, and waits for the others.

        Raises:
            UsageError: the file is damaged; or no optimizer has been set.
            OSError: it cannot be read.
        """
        self._check()
        super().load_optimizer_states(fname)
        assert self._rule is not None
        self._use(self._rule)

    def set_gradient_compression(self, compression_params: object) -> None:
        """Push one of +t, 0 and -t for each value from now on, and keep the rest for the next push.

        Args:
            compression_params: {'type': '2bit', 'threshold': t}; t is 0.5 if not given.

        Raises:
            UsageError: another type, or a threshold that is not greater than 0.
        """
        self._check()
        bound = self._runtime.settings.size_lower_bound
        compression = compression_of(compression_params, size_lower_bound=bound)
        compression.check_for_owners()
        self._compression = compression
        describe_compression(self._runtime, compression.description)

    # --------------------------------------------------------------------------------------------------
    # helpers

    def _announce_clock(self, clock: int, pushes: dict[Key, int]) -> None:
        """Have owners know that a clock of this rank has ended once they have applied so many pushes."""
        namespace, whole = self._namespace, self._owner is not None and self._owner.rule.whole
        self._runtime.post(
            lambda node, _: node.requests.asynchronous.clock(namespace, clock, pushes, whole=whole)
        )

    def _announce_clock_once_applied(self, clock: int) -> None:
        """Have owners know that a clock has ended, once all pushes until now have been applied."""

        def start(completion: Completion) -> None:
            self._announce_clock(clock, {})
            completion.succeed()

        applied = [entry.calls.applied for entry in self._all()]
        push_async(start, reads=applied, writes=(self._clocks_gate.array,), name="netstorm_clock")

    def _collect_states(self, owner: Owner) -> CollectedStates:
        """Return the optimizer's states of all keys, with all pushes of this rank."""
        asked = [(entry, *entry.pull_states(owner)) for entry in self._all()]
        collected = CollectedStates()
        for entry, array, found in asked:
            array.wait_to_read()
            collected.add(entry.user_key, entry.key.spec.shape, found)
        return collected

    def _collected_rule(self) -> UpdateRule | None:
        """Get all values and states from their owners, the same at all ranks: nobody pushes meanwhile."""
        owner, rule = self._owner, self._rule
        if owner is None or rule is None:
            return rule
        mx.nd.waitall()  # as in `_use`: after the barrier all ranks' pushes have been applied
        self._barrier()
        for entry in self._all():
            entry.pull_from_owners((), owner, Freshness(None, counted=False, priority=0))
        optimizer = rule.optimizer
        if optimizer is not None:
            rule = self._collect_states(owner).rule(optimizer)
        for entry in self._all():
            entry.value.wait_to_read()
        self._barrier()
        return rule

    def _push_and_update(self, pushed: Given, priority: int) -> None:
        owner = self._owner
        if owner is None:
            raise UsageError(_NO_OPTIMIZER.format(what="push"))
        self._checkpoints.pushed()
        compression = self._compression
        if compression is not None:
            self._check_compressed(pushed, compression)
        for entry, values in pushed:
            owners_entry(entry).push_to_owners(
                values, owner, clock=self._clock, priority=priority, compression=compression
            )

    def _pull_all(self, pulled: Given, priority: int) -> None:
        for entry, outs in pulled:
            if self._owner is None:
                entry.pull(outs)
                continue
            owned = owners_entry(entry)
            owned.pull_from_owners(outs, self._owner, self._freshness(owned, priority))

    def _pull_rows(self, entry: RowEntry, out: NDArray, row_ids: NDArray, priority: int) -> None:
        if self._owner is None:
            entry.pull_rows(out, row_ids)
        else:
            assert isinstance(entry, AsyncRowEntry)
            entry.pull_rows_from_owners(out, row_ids, self._owner, self._freshness(entry, priority))

    def _freshness(self, entry: AsyncEntry | AsyncRowEntry, priority: int) -> Freshness:
        """Return which pushes a pull must have now."""
        counted = self._clock > 0 or not self._owners_count_pushes
        clock = self._clock if counted else entry.calls.called
        least = None if self._staleness == UNBOUNDED else clock - self._staleness
        return Freshness(least, counted, priority)
