"""The asynchronous KVStore: `mx.kv.create('dist_async_netstorm')`.

The owners of a key apply every push at once, and a pull returns their newest values. NETSTORM_STALENESS
bounds how far ranks may be apart: without a bound; by so many clocks (stale synchronous parallel, as in
MLNET, HotCloud'15); or, with 0, not at all. With 0 it *is* the synchronous store under another name: the sums
of a clock are formed along the trees, which sends far less than N gradients to each owner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, TypeAlias

import numpy as np

from netstorm.checkpoint.jobs import SaveOptions, Saving, save_by_one
from netstorm.compression.quantised import Signs
from netstorm.compression.sparse import Numbers, Rows
from netstorm.errors import ProtocolViolation, UsageError
from netstorm.frontends.mxnet.arrays import (
    StagingBuffer,
    empty_rows,
    filled_rows,
    grouped,
    queue_copy,
    replace_rows,
    rows_of,
)
from netstorm.frontends.mxnet.checkpoint import CollectedEntry, SavedEntry
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.elastic import Get, Set
from netstorm.frontends.mxnet.engine import Completion, NDArray, push_async
from netstorm.frontends.mxnet.entries import (
    AnyEntry,
    Entry,
    GradientCompression,
    KeyState,
    RowEntry,
    check_rows,
    compression_of,
    sorted_row_ids,
    sorted_rows,
    staged_row_ids,
    sum_rows,
)
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors, raises_mxnet_errors
from netstorm.frontends.mxnet.owner import OwnedRule, Owner, arrays_of, with_counts
from netstorm.frontends.mxnet.store import Given, NetStormKVStore
from netstorm.frontends.mxnet.updates import CalledUpdater, OptimizerUpdater
from netstorm.kvstore.forms import Array, Key, Values
from netstorm.kvstore.operations import UNBOUNDED, Done, PullOperation, Pushes, PushOperation, StatesOperation
from netstorm.kvstore.process.elastic import Newcomer, SavingRank, collect_from_owners, wait_for_enough_nodes
from netstorm.kvstore.process.runtime import Runtime, describe_compression, runtime_of_this_process
from netstorm.protocol.codecs import QUANTISED, ROW_SPARSE
from netstorm.training.round_results import StoreRoundResults
from netstorm.training.rule_states import decoded_state, joined

__all__ = [
    "AsyncEntry",
    "AsynchronousKVStore",
    "CollectedStates",
    "Freshness",
    "Number",
    "PullTarget",
    "create_asynchronous",
]


# The pushes of a key to its owners, and pulls from them, as operations of MXNet's engine. None blocks.

Number: TypeAlias = Callable[[], int | None]
"""Returns the number of a push, once its values are ready; None: another rank pushes them."""


@dataclass(frozen=True, slots=True)
class Freshness:
    """Which pushes must be in a pulled value, in addition to all earlier ones of this rank."""

    least: int | None
    """Those of this many clocks of every rank; None: of any number."""
    counted: bool
    """The script counts the clocks."""
    priority: int
    """Larger goes first on every link."""


@dataclass(slots=True)
class PullTarget:
    """Where the values of a pull are written."""

    destination: Array
    """Flat memory for them."""
    rows: Numbers | None = None
    """The numbers of the rows to pull; None: all."""
    finish: Callable[[], None] | None = None
    """Called when the values are there, before anybody may read them."""


class OwnerCalls:
    """The pushes and pulls of one key."""

    __slots__ = ("_entry", "_gate", "_runtime", "called", "key", "pushes")

    def __init__(self, runtime: Runtime, entry: KeyState) -> None:
        self.key: Final = entry.key
        self.called = 0
        """How often the script has pushed the key."""
        self.pushes: Final = Pushes()
        self._runtime: Final = runtime
        self._entry: Final = entry
        self._gate: Final = StagingBuffer((1,), np.uint8)
        """Each push writes it, so that they are made one after the other. This bounds what other nodes buffer
        for this rank."""

    @property
    def applied(self) -> NDArray:
        """May be read once the owners have applied all pushes that were queued before."""
        return self._gate.array

    def own(self, owner: Owner, user_key: int | str, stored: NDArray, value: Callable[[], Array]) -> None:
        """Own this rank's blocks. `value` returns the initial value; called when `stored` may be read."""
        key = self.key

        def start(completion: Completion) -> None:
            owner.own(key, user_key, value())
            completion.succeed()

        push_async(start, reads=(stored,), writes=(), name="netstorm_own")

    def push(
        self,
        array: NDArray,
        source: Callable[[], Values],
        owner: Owner,
        *,
        clock: int,
        priority: int,
        codec: int = 0,
        threshold: float = 0.0,
        also: Sequence[NDArray] = (),
        number: Number | None = None,
    ) -> None:
        """Have the owners update their blocks.

        Args:
            array: the values, in an array of ours.
            source: returns the values in the form of `codec`; called when `array` may be read.
            owner: this store's, on this rank.
            clock: this rank's.
            priority: larger goes first on every link.
            codec: the form.
            threshold: the value of a quantised 1.
            also: arrays that `source` changes.
            number: of the push; if not given, the next one is taken now.
        """
        key, rule, live = self.key, owner.rule, owner.rule.live()
        taken = self.pushes.take_push() if number is None else None
        self.called += 1

        def begin(done: Done) -> None:
            own = taken if number is None else number()
            if own is None:
                done(None)
                return
            self._runtime.submit(
                PushOperation(
                    key=key,
                    number=own,
                    source=source(),
                    rule=rule.fingerprint,
                    live=live,
                    clock=clock,
                    whole=rule.whole,
                    codec=codec,
                    threshold=threshold,
                    priority=priority,
                    done=done,
                )
            )

        owed = f"push {self.called - 1} of key {key.name!r}"
        self.queue(begin, (array, self._gate.array, *also), "netstorm_push", priority, owed=owed)

    def pull(
        self,
        arrays: Sequence[NDArray],
        target: Callable[[], PullTarget],
        owner: Owner | None,
        freshness: Freshness,
        *,
        reads: Sequence[NDArray] = (),
    ) -> None:
        """Get the newest value.

        Args:
            arrays: what is written; arrays of ours.
            target: returns where the values go; called when `arrays` may be written and `reads` read. An
                error that it raises is one of whoever reads `arrays`, and does not fail the job.
            owner: this store's, on this rank; None: it is not known yet who owns what, so all are asked.
            freshness: what must be in the value.
            reads: arrays that `target` reads.
        """
        pushed, number = self.pushes.total, self.pushes.take_pull()

        def begin(done: Done) -> None:
            self._submit_pull(target(), owner, freshness, done, pushed=pushed, number=number)

        self.queue(begin, arrays, "netstorm_pull", freshness.priority, reads=reads)

    def pull_now(self, target: PullTarget, owner: Owner | None, freshness: Freshness, done: Done) -> None:
        """Get the newest value, with all pushes that have taken a number: within an operation of the engine,
        on any thread. Arguments are those of `pull`; `done` hears of the end.
        """
        pushed, number = self.pushes.total, self.pushes.take_pull()
        self._submit_pull(target, owner, freshness, done, pushed=pushed, number=number)

    def pull_states(self, owner: Owner) -> tuple[NDArray, dict[int, bytes]]:
        """Return an array, and a dictionary that has the owners' states by block once it may be read."""
        array, states = mx.nd.zeros((1,)), dict[int, bytes]()
        key, whole, pushed, number = self.key, owner.rule.whole, self.pushes.total, self.pushes.take_pull()

        def begin(done: Done) -> None:
            self._runtime.submit(
                StatesOperation(
                    key=key, number=number, pushed=pushed, destination=states, whole=whole, done=done
                )
            )

        self.queue(begin, (array,), "netstorm_pull_states", 0)
        return array, states

    def queue(
        self,
        begin: Callable[[Done], None],
        arrays: Sequence[NDArray],
        name: str,
        priority: int,
        *,
        reads: Sequence[NDArray] = (),
        owed: str = "",
    ) -> None:
        """Queue an operation of the engine that writes `arrays`, of ours.

        Args:
            begin: begins what ends with a call of `Done`. It must not block.
            arrays: what it may use until then.
            name: for MXNet's profiler.
            priority: larger goes first on every link.
            reads: what it reads.
            owed: names the operation if other ranks wait for it: if it cannot begin, the job fails.
        """
        runtime, entry = self._runtime, self._entry

        def start(completion: Completion) -> None:
            try:
                begin(completion.end)
            except Exception as error:
                if owed:
                    runtime.fail(f"{owed}: {error}")
                raise

        def skipped() -> None:
            if owed:
                entry.skipped = arrays[0]
                runtime.fail(f"{owed} cannot be made: an operation that it depends on has failed")

        push_async(start, reads=reads, writes=arrays, name=name, priority=priority, skipped=skipped)

    def _submit_pull(
        self,
        target: PullTarget,
        owner: Owner | None,
        freshness: Freshness,
        done: Done,
        *,
        pushed: int,
        number: int,
    ) -> None:
        def ended(error: Exception | None) -> None:
            if error is None and target.finish is not None:
                target.finish()
            done(error)

        self._runtime.submit(
            PullOperation(
                key=self.key,
                number=number,
                pushed=pushed,
                destination=target.destination,
                least=freshness.least,
                counted=freshness.counted,
                whole=owner is not None and owner.rule.whole,
                of_all=owner is None,
                rows=target.rows,
                priority=freshness.priority,
                done=ended,
            )
        )


# One key of an asynchronous store on this node: its value as it was pulled last, and its pushes.


class AsyncEntry(Entry):
    """A dense key. Row-sparse arrays may be pushed to it, too."""

    __slots__ = ("_gradient", "calls")

    def __init__(self, runtime: Runtime, key: Key, user_key: int | str) -> None:
        super().__init__(runtime, key, user_key)
        self.calls: Final = OwnerCalls(runtime, self)
        self._gradient: StagingBuffer | None = None

    def own(self, owner: Owner) -> None:
        """Own this rank's blocks of the initial value, which is here. Called before any pull from owners."""
        stored = self._stored
        self.calls.own(owner, self.user_key, stored.array, lambda: self._flat(stored))

    def push_to_owners(
        self,
        values: Sequence[NDArray],
        owner: Owner,
        *,
        clock: int,
        priority: int,
        compression: GradientCompression | None = None,
    ) -> None:
        """Sum `values` over devices, and have the owners update their blocks with it."""
        if len(values) != 1 or values[0].handle is not self.last.pushed:
            sparse = [value.stype == "row_sparse" for value in values]
            if any(sparse):
                check_rows(self._runtime, self.key.name, self.key.spec.shape)
                summed = sum_rows(values, self.key)
                if all(sparse):
                    _push_rows(self.calls, summed, owner, clock, priority)
                    return
                values = [summed]
        if self._gradient is None:
            self._gradient = StagingBuffer(self.key.spec.shape, self.key.dtype)
        gradient = self._gradient
        gradient.sum_of(values, self.last)
        number = self._number_of(gradient, owner, priority)
        if compression is None:
            self.calls.push(
                gradient.array,
                lambda: self._flat(gradient),
                owner,
                clock=clock,
                priority=priority,
                number=number,
            )
            return
        residual, codec = self.kept, compression.two_bit_of(self.tensor_name, self.key.spec.shape)

        def quantised() -> Signs:
            return residual.quantise(self._flat(gradient).view(np.float32), codec)

        self.calls.push(
            gradient.array,
            quantised,
            owner,
            clock=clock,
            priority=priority,
            codec=QUANTISED,
            threshold=float(codec.threshold),
            also=(residual.array,),
            number=number,
        )

    def pull_from_owners(self, outs: Sequence[NDArray], owner: Owner | None, freshness: Freshness) -> None:
        """Copy the newest value to `outs`. `owner` is None if this rank does not know who owns what."""
        stored = self._stored
        self.calls.pull((stored.array,), lambda: PullTarget(self._flat(stored)), owner, freshness)
        self.pull(outs)

    def _number_of(self, gradient: StagingBuffer, owner: Owner, priority: int) -> Number | None:
        """Return the number of a push of `gradient`, if that is not the next one."""
        return None

    def _flat(self, array: StagingBuffer) -> Array:
        return np.frombuffer(array.memory(), self.key.dtype)


class AsyncRowEntry(RowEntry):
    """A row-sparse key."""

    __slots__ = ("calls",)

    def __init__(self, runtime: Runtime, key: Key, user_key: int | str) -> None:
        super().__init__(runtime, key, user_key)
        self.calls: Final = OwnerCalls(runtime, self)

    def restore(self, value: NDArray | None, residual: dict[str, NDArray] | None, rounds: int) -> None:
        """Take over a value, with all its rows: a pull writes those of owners there. See `RowEntry`."""
        super().restore(value, residual, rounds)
        self._fill_rows(self._stored)

    def own(self, owner: Owner) -> None:
        """Own this rank's blocks of the initial value, which is here. Called before any pull from owners."""
        stored = self._stored
        self.calls.own(owner, self.user_key, stored, lambda: rows_of(stored).values.reshape(-1))

    def push_to_owners(
        self,
        values: Sequence[NDArray],
        owner: Owner,
        *,
        clock: int,
        priority: int,
        compression: object = None,
    ) -> None:
        """Sum `values` over devices, and have the owners update the rows that they have with it."""
        _push_rows(self.calls, sum_rows(values, self.key), owner, clock, priority)

    def pull_from_owners(self, outs: Sequence[NDArray], owner: Owner | None, freshness: Freshness) -> None:
        """Copy the newest value, all of its rows, to `outs`; see `AsyncEntry.pull_from_owners`."""
        stored = self._stored
        self.calls.pull((stored,), lambda: PullTarget(rows_of(stored).values.reshape(-1)), owner, freshness)
        self.pull(outs)

    def pull_rows_from_owners(
        self, out: NDArray, row_ids: NDArray, owner: Owner, freshness: Freshness
    ) -> None:
        """Copy rows of the newest value to a row-sparse array; only these are sent. See `gather_rows`."""
        key = self.key
        picked, ids = empty_rows(key.spec.shape, key.dtype), staged_row_ids(row_ids)

        def target() -> PullTarget:
            numbers = sorted_row_ids(ids, key.spec.shape[0])
            made = empty_rows(key.spec.shape, key.dtype, len(numbers))
            new = rows_of(made)
            new.numbers[:] = numbers
            return PullTarget(new.values.reshape(-1), numbers, lambda: replace_rows(picked, made))

        self.calls.pull((picked,), target, owner, freshness, reads=(ids,))
        with mx.autograd.pause():
            queue_copy(picked, out)


def _push_rows(calls: OwnerCalls, summed: NDArray, owner: Owner, clock: int, priority: int) -> None:
    calls.push(
        summed,
        lambda: sorted_rows(summed, calls.key),
        owner,
        clock=clock,
        priority=priority,
        codec=ROW_SPARSE,
    )


# The states of an asynchronous store's optimizer, joined from what their owners sent, to be saved.


class CollectedStates:
    """The states that have come so far."""

    def __init__(self) -> None:
        self._states: dict[int | str, object] = {}
        self._counts: dict[int | str, int] = {}
        self._all_updates = 0

    def add(self, key: int | str, shape: tuple[int, ...], blocks: dict[int, bytes]) -> None:
        """Add the states of all blocks of a key; nothing if the key has never been updated.

        Raises:
            ProtocolViolation: what an owner has sent is no state.
        """
        try:
            parts = [decoded_state(blocks[block]) for block in sorted(blocks)]
            if any(part.begun for part in parts):
                self._states[key] = arrays_of(joined([part.state for part in parts], shape))
        except (ProtocolViolation, ValueError, TypeError) as error:
            raise ProtocolViolation(f"key {key!r}: an owner has sent as a block's state {error}") from error
        if any(part.begun for part in parts):
            self._counts[key] = max(part.updates for part in parts)
            self._all_updates = max(self._all_updates, *(part.all_updates for part in parts))

    def rule(self, optimizer: mx.optimizer.Optimizer) -> CalledUpdater:
        """Return a rule that has the states, and the script's `optimizer` with the owners' counts."""
        updater = OptimizerUpdater(with_counts(optimizer, self._counts, self._all_updates))
        updater.states = self._states
        return CalledUpdater(updater, "collected from owners")


def collect_entries(
    runtime: Runtime, entries: Sequence[AsyncEntry | AsyncRowEntry], owner: Owner, rule: CalledUpdater
) -> tuple[list[CollectedEntry], CalledUpdater]:
    """Return the owners' values of keys, and a rule with the owners' states and counts.

    Args:
        runtime: of this process.
        entries: the keys. None of their operations is outstanding.
        owner: the store's, on this rank.
        rule: the script's.

    Raises:
        WaitTimeout: an owner does not answer.
        NetStormError: the job has failed.
    """
    keys = [(entry.key, entry.calls.pushes) for entry in entries]
    held = collect_from_owners(runtime, keys, whole=owner.rule.whole)
    saved, collected = [], CollectedStates()
    for entry, of_owners in zip(entries, held, strict=True):
        saved.append(CollectedEntry(entry.user_key, _array(entry.key, of_owners.values), entry.rounds))
        if rule.optimizer is not None:
            collected.add(entry.user_key, entry.key.spec.shape, of_owners.states)
    return saved, rule if rule.optimizer is None else collected.rule(rule.optimizer)


def _array(key: Key, values: Array) -> NDArray:
    shape = key.spec.shape
    if key.spec.form == ROW_SPARSE:
        return filled_rows(shape, key.dtype, Rows(np.arange(shape[0]), values.reshape(shape[0], -1)))
    return mx.nd.array(values.reshape(shape), ctx=mx.cpu(), dtype=key.dtype)


# The part of an asynchronous store that belongs to elastic jobs: who is in, and ranks that join later.

_log = logging.getLogger(__name__)


@methods_raise_mxnet_errors
class ElasticOwnersStore(NetStormKVStore):
    """A store of owners as elastic jobs see it. In other jobs its methods say what is known from the start.

    Blocks move to other owners by themselves. A rank that joins later gets the owners' values, and takes part
    from its first push on.

    In an elastic job ranks have no step in common, so nobody waits for others in `save_checkpoint`. Each
    calls it when it likes, and one of them writes, alone: the lowest that takes part and whose script has not
    ended. At the others it does nothing. The writer asks the owners for values and states, with all of its
    own pushes. Each block's are of one moment; others may have been updated a little more or less often.
    `extra` is the writer's, and `step` the least number: it becomes larger if the folder has that one.
    `shares` is of no effect, and what gradient compression has kept is not saved.
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
        self._is_elastic: Final = self._runtime.node.live.is_elastic
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
        return self._runtime.node.live.ranks if self._is_elastic else super().live_ranks

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

    def _save(self, path: str | Path, options: SaveOptions, extra: object) -> Saving:
        if not self._is_elastic:
            return super()._save(path, options, extra)
        ranks = SavingRank(self._runtime)

        def save(options: SaveOptions) -> Saving:
            entries: Sequence[SavedEntry] = self._keys.entries()
            rule = self._rule
            if self._owner is not None and rule is not None:
                mx.nd.waitall()  # all pushes of this rank have their numbers
                entries, rule = collect_entries(self._runtime, self._all(), self._owner, rule)
            return self._checkpoints.save(path, entries, rule, extra, options, ranks=ranks)

        return save_by_one(path, options, save, is_due=ranks.is_due)

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
            entry.elastic = StoreRoundResults(self._runtime.size, rescales=False)
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


_TYPE: Final = "dist_async_netstorm"

_NO_OPTIMIZER: Final = (
    "push to an asynchronous store without an optimizer: the owners of a key must know what to do with a "
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
            raise UsageError(_NO_OPTIMIZER)
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
        totals = super().statistics()
        pushes = totals.get("pushes_of_blocks", 0)
        totals["staleness_mean"] = totals.get("staleness_total", 0.0) / pushes if pushes else 0.0
        totals.setdefault("staleness_max", 0.0)
        return totals

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
        rule = CalledUpdater.of_optimizer(optimizer)
        self._checkpoints.optimizer_set(rule)
        self._use(rule)

    def _set_updater(self, updater: object) -> None:
        """Have owners update keys with `updater(key, gradient, stored)`, called on a thread for updates."""
        self._use(CalledUpdater.of_function(updater))

    def _use(self, rule: CalledUpdater) -> None:
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
        self._collect_states(self._owner).rule(optimizer).save(fname, dump_optimizer=dump_optimizer)

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
        self._runtime.post(lambda node, _: node.asynchronous.clock(namespace, clock, pushes, whole=whole))

    def _announce_clock_once_applied(self, clock: int) -> None:
        """Have owners know that a clock has ended, once all pushes until now have been applied."""

        def start(completion: Completion) -> None:
            self._announce_clock(clock, {})
            completion.succeed()

        applied = [entry.calls.applied for entry in self._all()]
        push_async(start, reads=applied, writes=(self._clocks_gate.array,), name="netstorm_clock")

    def _collect_states(self, owner: Owner) -> CollectedStates:
        """Return the optimizer's states of all keys, with all pushes of this rank."""
        asked = [(entry, *entry.calls.pull_states(owner)) for entry in self._all()]
        collected = CollectedStates()
        for entry, array, states in asked:
            array.wait_to_read()
            collected.add(entry.user_key, entry.key.spec.shape, states)
        return collected

    def _collected_rule(self) -> CalledUpdater | None:
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
            raise UsageError(_NO_OPTIMIZER)
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
