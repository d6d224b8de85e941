"""What a rank does with a sum: optimizers, deferred updates, and their states.

Replicas stay equal because every rank runs the same rule on the same bytes. The fingerprint goes with every
round, and the scheduler compares. So a different optimizer, or a learning rate that was changed on one rank
only, is an error that names both ranks, and not a model that drifts apart.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import operator
import os
import queue
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from netstorm.errors import NetStormError, UsageError
from netstorm.frontends.mxnet.arrays import KeepingLock, StagingBuffer
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import Completion, NDArray, Operands, compute_in_background, push_on
from netstorm.kvstore.process.runtime import Runtime, after_close
from netstorm.pslite.system import active_calls, yield_to_call

__all__ = [
    "CalledUpdater",
    "DeferredUpdate",
    "OptimizerUpdater",
    "UpdatedArrays",
    "Updater",
    "can_be_captured",
    "digest_of",
    "queueing",
    "write_atomically",
]


# What happens to a stored value when a sum arrives, and its fingerprint: all ranks must do the same.

_log = logging.getLogger(__name__)

_HOST: Final = mx.cpu()

_READS_VALUES: Final = ("LARS", "LBSGD")
"""Optimizers whose update waits for a value (a norm)."""

_ONLY_QUEUE: Final = frozenset(
    kind
    for kind in mx.optimizer.Optimizer.opt_registry.values()
    if kind.__module__.startswith("mxnet.") and kind.__name__ not in _READS_VALUES
)
"""Optimizers whose update never waits for anything. Of a user's own class this is not known."""

Updater: TypeAlias = Callable[[int | str, NDArray, NDArray], object]
"""Called with key, sum and stored value; changes the stored value."""


class OptimizerUpdater(mx.optimizer.Updater):
    """MXNet's updater, which keeps Python's lock where it can (see `gil_calls`)."""

    @property
    def most_together(self) -> int:
        """How many keys one call of the optimizer may update (MXNET_OPTIMIZER_AGGREGATION_SIZE)."""
        return max(1, self.optimizer.aggregate_num) if self.aggregate_updates else 1

    def __call__(self, key: int | str, total: NDArray, stored: NDArray) -> None:
        """Update `stored` with `total`; both are staging buffers' arrays."""
        self.optimizer._set_current_context(_HOST.device_id)  # as MXNet's own updater does
        self.update_by(self.optimizer, (key,), (total,), (stored,))

    def update_by(
        self,
        optimizer: mx.optimizer.Optimizer,
        keys: Sequence[int | str],
        totals: Sequence[NDArray],
        stored: Sequence[NDArray],
    ) -> None:
        """Update keys of one type, `most_together` at most, by the optimizer or by a copy of it."""
        for key, value in zip(keys, stored, strict=True):
            if key not in self.states:
                self.states[key] = optimizer.create_state_multi_precision(key, value)
                self.states_synced[key] = True
            elif not self.states_synced[key]:
                self.states[key] = self.sync_state_context(self.states[key], value.context)
                self.states_synced[key] = True
        states = [self.states[key] for key in keys]
        with queueing(self.optimizer):
            if self.aggregate_updates:
                optimizer.update_multi_precision(tuple(keys), tuple(stored), tuple(totals), states)
            else:
                optimizer.update_multi_precision(keys[0], stored[0], totals[0], states[0])


def queueing(optimizer: mx.optimizer.Optimizer) -> contextlib.AbstractContextManager[None]:
    """Return what an optimizer's update is called within: if it waits for nothing, it keeps Python's lock."""
    return KeepingLock() if type(optimizer) in _ONLY_QUEUE else contextlib.nullcontext()


class CalledUpdater:
    """An updater and how to call it."""

    def __init__(self, updater: Updater, text: str, *, draws: bool = False) -> None:
        self.updater: Final = updater
        self.of_states: Final = updater if isinstance(updater, OptimizerUpdater) else None
        """The updater, if it has an optimizer, whose states can be saved."""
        self.origin = ""
        """Where its states come from, if not from updates alone: part of the fingerprint."""
        self._draws: Final = draws
        self.fixed_fingerprint = text
        """The fingerprint without what scripts change between steps."""
        self._capture: UpdateCapture | None = None

    @classmethod
    def of_optimizer(cls, optimizer: object) -> CalledUpdater:
        """Return the rule of an `mx.optimizer.Optimizer`.

        Raises:
            UsageError: it is something else.
        """
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise UsageError(f"set_optimizer takes an mxnet Optimizer, not {type(optimizer).__name__}")
        name = type(optimizer).__name__
        if name in _READS_VALUES:
            _log.warning(
                "%s reads values in its update, so each key waits for its own round trip: "
                "with gluon.Trainer set update_on_kvstore=False, and all keys travel together",
                name,
            )
        draws = isinstance(optimizer, mx.optimizer.SGLD)  # MXNet's only one that does
        return cls(OptimizerUpdater(optimizer), fingerprint_of(optimizer), draws=draws)

    @classmethod
    def of_function(cls, updater: object) -> CalledUpdater:
        """Return the rule of a user's own function (key, sum, stored).

        Raises:
            UsageError: it is no function.
        """
        if not callable(updater):
            raise UsageError(
                f"_set_updater takes a function (key, sum, stored), not {type(updater).__name__}"
            )
        own = getattr(updater, "__qualname__", type(updater).__qualname__)
        return cls(updater, f"updater {getattr(updater, '__module__', '?')}.{own}")

    @property
    def optimizer(self) -> mx.optimizer.Optimizer | None:
        """The optimizer; None if the rule is a user's own function."""
        return None if self.of_states is None else self.of_states.optimizer

    def update(self, key: int | str, total: NDArray, stored: NDArray, *, round: str, rank: int) -> None:
        """Queue the update of `stored` with `total`, at once and on the calling thread.

        Called later, it would read later learning rates.

        Args:
            key: the user's.
            total: the sum.
            stored: the value.
            round: names this round of this key, the same on all ranks.
            rank: of this node.
        """
        if not self._draws:
            self.updater(key, total, stored)
            return
        # Replicas must draw the same numbers here. The script's own draws (a dropout's) must differ after it.
        mx.random.seed(_seed(round), ctx=_HOST)
        try:
            self.updater(key, total, stored)
        finally:
            mx.random.seed(_seed(f"{round} of rank {rank}"), ctx=_HOST)

    def capture(self, key: int | str) -> CapturedUpdate | None:
        """Return an update of a key that another thread may queue later, with what it reads of the optimizer
        now; None if it must be queued at once.

        A key's first update is queued at once: it makes the state, and if the array does not suit the
        optimizer, the push raises that error.
        """
        updater = self.of_states
        if updater is None or key not in updater.states:
            return None
        optimizer = updater.optimizer
        if self._capture is None or self._capture.optimizer is not optimizer:
            if not can_be_captured(optimizer):
                return None
            self._capture = UpdateCapture(optimizer)
        return self._capture.update(key)

    def apply(
        self, captured: Sequence[CapturedUpdate], totals: Sequence[NDArray], stored: Sequence[NDArray]
    ) -> None:
        """Queue captured updates that go together. One thread at a time; those of a key in their order."""
        assert self.of_states is not None
        optimizer = captured[0].optimizer_copy
        optimizer.load(captured)
        self.of_states.update_by(optimizer, [one.key for one in captured], totals, stored)

    def fingerprint(self) -> str:
        """Return the fingerprint at this moment, with what scripts change between steps."""
        if self.of_states is None:
            return self.fixed_fingerprint
        optimizer = self.of_states.optimizer
        return f"{self.fixed_fingerprint} lr={optimizer.lr!r} rescale_grad={optimizer.rescale_grad!r}"

    def save(self, path: str, *, dump_optimizer: bool) -> None:
        """Write the states, and the optimizer if asked for, to a file in MXNet's format."""
        assert self.of_states is not None
        write_atomically(path, self.of_states.get_states(dump_optimizer))

    def load(self, path: str) -> None:
        """Restore saved states, and the optimizer that was saved with them, if one was.

        From now on the states are in the fingerprint, too. A rank that has loaded others, or none, is then an
        error and not a model that drifts apart.
        """
        updater = self.of_states
        assert updater is not None
        restore_states(updater, path)
        self._set_origin(f"states {digest_of(updater.states)}")

    def restore(self, states: dict[int | str, object], origin: str) -> None:
        """Take over states, which `origin` names for the fingerprint: other ranks must have the same. Empty:
        they come from updates alone.
        """
        updater = self.of_states
        assert updater is not None
        updater.states = states
        updater.states_synced = dict.fromkeys(states, False)
        self._set_origin(origin)

    def _set_origin(self, origin: str) -> None:
        assert self.of_states is not None
        self.origin = origin
        fingerprint = fingerprint_of(self.of_states.optimizer)
        self.fixed_fingerprint = f"{fingerprint} from {origin}" if origin else fingerprint


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1  # MXNet's have 31 bits


# An optimizer's update in two halves: reading the optimizer now, and queueing the operations later.
#
# On the script's thread we count the update, read the learning rate and the weight decay, and check whether a
# hyper-parameter has changed since the last update: 2 us. Queueing the operations takes twenty times as long.
# Another thread does that, with a copy of the optimizer that has the values that were read. So a learning
# rate that is changed after a push counts from the next push on, as if the update had been queued at once.

_WAITS_OR_KEEPS: Final = ("LARS", "LBSGD", "DCASGD", "Nadam", "SGLD", "Test")
"""Optimizers whose update waits for a value (the first three), changes the optimizer, draws random numbers
or is not counted."""

_TYPES: Final = frozenset(
    kind
    for kind in mx.optimizer.Optimizer.opt_registry.values()
    if kind.__module__.startswith("mxnet.") and kind.__name__ not in _WAITS_OR_KEEPS
)
"""What the update of a user's own class does is not known."""

_READ_BY_METHODS: Final = frozenset(
    {
        "lr",
        "lr_mult",
        "lr_scheduler",
        "wd",
        "wd_mult",
        "param_dict",
        "idx2name",
        "sym_info",
        "begin_num_update",
        "num_update",
        "_index_update_count",
        "_all_index_update_counts",
    }
)
"""Attributes that only determine the learning rate, the weight decay and the number of updates."""


def can_be_captured(optimizer: mx.optimizer.Optimizer) -> bool:
    """Return whether an optimizer's update may be queued later, by another thread."""
    return type(optimizer) in _TYPES


class CapturedUpdate(NamedTuple):
    """One update of one key: the copy of the optimizer that makes it, and the values that it uses."""

    optimizer_copy: _OptimizerCopy
    key: int | str
    learning_rates: list[float]
    weight_decays: list[float]
    updates: int
    """Number of updates of this key, with this one."""
    others: dict[str, object]
    """The other hyper-parameters; the same object as long as none changes."""

    def goes_together_with(self, other: CapturedUpdate) -> bool:
        """Return whether one call of the copy may make both updates."""
        return self.optimizer_copy is other.optimizer_copy and self.others is other.others


class UpdateCapture:
    """Captures the updates of one optimizer, on the script's thread."""

    __slots__ = ("_copy", "_last_values", "_names", "_others", "_read", "optimizer")

    def __init__(self, optimizer: mx.optimizer.Optimizer) -> None:
        self.optimizer: Final = optimizer
        self._copy: Final = _copy_of(optimizer)
        self._names: Final = sorted(vars(optimizer).keys() - _READ_BY_METHODS)
        self._read: Final = operator.attrgetter(*self._names)
        self._last_values: object = ()
        self._others: dict[str, object] = {}

    def update(self, key: int | str) -> CapturedUpdate:
        """Count an update of a key, and return it with the values that it is to use."""
        optimizer = self.optimizer
        optimizer._set_current_context(0)  # the calls of MXNet's own updater, all four
        optimizer._update_count(key)
        values = self._read(optimizer)
        if values != self._last_values:
            self._last_values, self._others = values, dict(zip(self._names, values, strict=True))
        return CapturedUpdate(
            self._copy,
            key,
            optimizer._get_lrs((key,)),
            optimizer._get_wds((key,)),
            optimizer._index_update_count[key],
            self._others,
        )


class _OptimizerCopy(mx.optimizer.Optimizer):
    """Base of the copies: the methods that would count and look up return what was captured."""

    _others: dict[str, object] | None = None

    def load(self, captured: Sequence[CapturedUpdate]) -> None:
        """Take over the values that the next update is to use, of keys that go together."""
        others = captured[0].others
        if others is not self._others:
            self._others = others
            vars(self).update(others)
        self._learning_rates = [rate for one in captured for rate in one.learning_rates]
        self._weight_decays = [decay for one in captured for decay in one.weight_decays]
        self._index_update_count = {one.key: one.updates for one in captured}

    def _update_count(self, index: int | str) -> None:
        """It has been counted."""

    def _get_lrs(self, indices: Sequence[int | str]) -> list[float]:
        return self._learning_rates

    def _get_wds(self, indices: Sequence[int | str]) -> list[float]:
        return self._weight_decays


def _copy_of(optimizer: mx.optimizer.Optimizer) -> _OptimizerCopy:
    kind = type(optimizer)
    made = copy.copy(optimizer)
    made.__class__ = type(kind.__name__, (_OptimizerCopy, kind), {})
    assert isinstance(made, _OptimizerCopy)
    return made


# The fingerprint of an optimizer: a short text that is the same on all ranks if they update alike.

_NOT_COMPARED: Final = frozenset(
    {"param_dict", "idx2name", "sym_info", "num_update", "begin_num_update", "lr", "rescale_grad"}
)
"""Attributes that may differ (names of parameters), change with every update, or are compared by
`UpdateRule.fingerprint`."""


def fingerprint_of(optimizer: mx.optimizer.Optimizer) -> str:
    """Return the class and a digest of the hyper-parameters, without what scripts change between steps."""
    name = type(optimizer).__name__
    details = ", ".join(
        f"{attribute}={_plain(value)}"
        for attribute, value in sorted(vars(optimizer).items())
        if not attribute.startswith("_") and attribute not in _NOT_COMPARED
    )
    _log.info("update rule: %s(%s)", name, details)
    return f"{name}#{hashlib.sha256(details.encode()).hexdigest()[:8]}"


def _plain(value: object) -> str:
    """Return a value as text that is the same on all ranks for the same settings."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_plain(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_plain, value)) + "]"
    settings = (
        {name: inner for name, inner in vars(value).items() if not name.startswith("_")}
        if hasattr(value, "__dict__")
        else {}
    )
    return type(value).__name__ + (_plain(settings) if settings else "")


# Optimizer states on disk, in MXNet's own format, and a digest that tells whether all ranks have the same.
#
# The format is a pickle, as everywhere in MXNet: load only files that you trust. It is never sent. Each rank
# reads the file itself. Since every rank has all states, a job of two nodes can read what one of four has
# written.


def restore_states(updater: mx.optimizer.Updater, path: str) -> None:
    """Give an updater the states of a file, and the optimizer of the file, if it has one.

    Raises:
        UsageError: `save_optimizer_states` has not written the file; the updater is as it was.
        OSError: it cannot be read.
    """
    data = Path(path).read_bytes()
    before = updater.states, updater.states_synced, updater.optimizer
    try:
        updater.set_states(data)
        states: object = updater.states  # whatever the pickle had
        good = isinstance(states, dict) and isinstance(updater.optimizer, mx.optimizer.Optimizer)
        reason = f"it holds a {type(states).__name__}"
    except Exception as error:  # noqa: BLE001 -- reading something that is no pickle may raise anything
        good, reason = False, f"{type(error).__name__}: {error}"
    if not good:
        updater.states, updater.states_synced, updater.optimizer = before
        raise UsageError(
            f"load_optimizer_states: {path} ({len(data)} bytes) is damaged, or not a file that "
            f"save_optimizer_states has written: {reason}"
        )


def digest_of(states: object) -> str:
    """Return a short digest of states, the same on all ranks that have the same values."""
    digest = hashlib.sha256()
    _add(digest, states)
    return digest.hexdigest()[:8]


def _add(digest: hashlib._Hash, state: object) -> None:
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            digest.update(f"{key!r}:".encode())
            _add(digest, state[key])
    elif isinstance(state, (list, tuple)):
        digest.update(f"{len(state)} of".encode())
        for part in state:
            _add(digest, part)
    elif isinstance(state, mx.nd.NDArray):
        digest.update(f"{state.shape} {state.dtype} ".encode() + state.asnumpy().tobytes())
    else:
        digest.update(type(state).__name__.encode())


def write_atomically(path: str, data: bytes) -> None:
    """Write a file at once: no reader, and no other rank that writes the same bytes, ever sees half of it."""
    target = Path(path)
    descriptor, name = tempfile.mkstemp(dir=target.resolve().parent, prefix=target.name + ".")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


# A thread of ours that queues operations on MXNet's engine, so that the script's thread does not have to.
#
# It processes all items that have come meanwhile as one batch. Each time this thread wants Python's lock, the
# I/O thread has to stop in the middle of its work: with a turn for every sum, a round of 32 keys took a tenth
# longer.

_JOIN_S: Final = 10.0
"""For the thread to end, at exit."""


Item = TypeVar("Item")


class Batches(Generic[Item]):
    """Items that are added one by one, and processed many at a time in a thread of its own."""

    def __init__(self, function: Callable[[list[Item]], None]) -> None:
        """Prepare; the thread starts with the first item.

        Args:
            function: processes items, in the order in which they were added. It must not wait for anything:
                what a script waits for may be in the next batch. It reports its errors itself.
        """
        self._function: Final = function
        self._lock = threading.Lock()
        self._items: Final[deque[Item]] = deque()
        self._goes_on: Final[queue.SimpleQueue[bool]] = queue.SimpleQueue()
        """Wakes the thread; False ends it."""
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forget)

    def add(self, item: Item, runtime: Runtime) -> None:
        """Have an item processed, with all that a turn of the I/O thread adds. Does not wait."""
        self._items.append(item)
        runtime.at_end_of_turn(self._hand_over)

    def _hand_over(self) -> None:
        self._goes_on.put(True)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="netstorm-updates", daemon=True)
                    self._thread.start()
                    after_close(self._stop)

    def _stop(self) -> None:
        if self._thread is not None:
            self._goes_on.put(False)
            self._thread.join(_JOIN_S)

    def _forget(self) -> None:
        """In a forked child, which has none of the threads."""
        self._lock, self._thread = threading.Lock(), None

    def _run(self) -> None:
        compute_in_background()
        goes_on = True
        while goes_on:
            goes_on = self._goes_on.get()
            if active_calls:
                yield_to_call()
            items = [self._items.popleft() for _ in range(len(self._items))]  # no other thread takes any
            try:
                if items:
                    self._function(items)
            except Exception:  # noqa: BLE001 -- the next batch must be processed nevertheless
                _log.exception("updates could not be queued")


# A round whose update is queued by another thread than the script's, when its sum has arrived.
#
# The script's thread queues one operation, *the round*. It holds the array of the sum and the stored value
# from when the gradient is there until the value has been updated, so whoever reads the value waits for the
# update. When the sum has arrived, the other thread queues the optimizer's operations on aliases of the two
# arrays (the same memory under other variables), which no one else uses while the round holds them. Behind
# them it queues one operation that ends the rounds of all sums that came together. The rounds of one key
# follow one another, and so do its updates; those of different keys come in the order of their sums.


class UpdatedArrays:
    """A key's two arrays and their aliases for the other thread. Keep it as long as the key lives."""

    __slots__ = ("dtype", "operands", "stored", "total")

    def __init__(self, total: StagingBuffer, stored: StagingBuffer) -> None:
        self.operands: Final = Operands((), (total.array, stored.array))
        """What the round writes."""
        self.dtype: Final = total.dtype
        self.total: Final = total.alias()
        self.stored: Final = stored.alias()


class DeferredUpdate:
    """The update of one round of one key."""

    __slots__ = ("_captured", "_round", "_rule", "_runtime", "arrays", "name")

    def __init__(
        self,
        runtime: Runtime,
        rule: CalledUpdater,
        captured: CapturedUpdate,
        arrays: UpdatedArrays,
        name: str,
    ) -> None:
        """Prepare it.

        Args:
            runtime: of this process; an update that fails, fails the job.
            rule: its updater keeps the key's state.
            captured: the update, by `rule`.
            arrays: the key's.
            name: of the key, for errors.
        """
        self._runtime: Final = runtime
        self._rule: Final = rule
        self._captured: Final = captured
        self.arrays: Final = arrays
        self.name: Final = name
        self._round: Completion | None = None

    def begin(self, completion: Completion) -> None:
        """Take the round's completion: the round has started. Called before `sum_arrived`."""
        self._round = completion

    def sum_arrived(self, error: BaseException | None) -> None:
        """Queue the update with the sum, or end the round with an error; from any thread."""
        if error is None:
            _batches.add(self, self._runtime)
        else:
            self.end_round(error)

    def goes_together_with(self, other: DeferredUpdate) -> bool:
        """Return whether one call of the optimizer may make both updates."""
        return (
            self._rule is other._rule
            and self._captured.goes_together_with(other._captured)
            and self.arrays.dtype == other.arrays.dtype
        )

    @property
    def most_together(self) -> int:
        """How many updates one call of the optimizer may make."""
        of_states = self._rule.of_states
        return 1 if of_states is None else of_states.most_together

    def apply_all(self, updates: Sequence[DeferredUpdate]) -> bool:
        """Queue the optimizer's operations for `updates`, of which this is one; return whether it raised no
        error.
        """
        try:
            self._rule.apply(
                [update._captured for update in updates],
                [update.arrays.total for update in updates],
                [update.arrays.stored for update in updates],
            )
        except Exception as error:  # noqa: BLE001 -- an optimizer may fail in any way
            _log.exception("the update of %s failed", ", ".join(update.name for update in updates))
            for update in updates:
                update.fail(f"{type(error).__name__}: {error}")
            return False
        return True

    def fail(self, reason: str) -> None:
        """Fail the round, which whoever reads the value hears of, and the job."""
        error = NetStormError(f"the update of {self.name} failed: {reason}")
        self.end_round(error)
        self._runtime.fail(str(error))

    def end_round(self, error: BaseException | None) -> None:
        """End the round: those who wait for the value go on, or get the error."""
        assert self._round is not None
        self._round.end(error)


def _together(updates: list[DeferredUpdate]) -> Iterator[list[DeferredUpdate]]:
    """Yield updates in their order, those together that one call of the optimizer may make.

    Each call takes some 0.1 ms of Python and an operation of the engine, whatever the number of keys.
    """
    group: list[DeferredUpdate] = []
    for update in updates:
        if group and (len(group) >= update.most_together or not group[0].goes_together_with(update)):
            yield group
            group = []
        group.append(update)
    if group:
        yield group


def _queue_updates(updates: list[DeferredUpdate]) -> None:
    """Queue updates, each of another key, and one operation that ends their rounds."""
    queued = [update for group in _together(updates) if group[0].apply_all(group) for update in group]

    def updated(completion: Completion) -> None:
        completion.succeed()
        for update in queued:
            update.end_round(None)

    def failed() -> None:
        names = ", ".join(update.name for update in queued)
        for update in queued:
            update.fail(f"an operation of the updates of {names} failed; mx.nd.waitall() raises the reason")

    if queued:
        written = [array for update in queued for array in (update.arrays.total, update.arrays.stored)]
        push_on(Operands((), written), updated, name="netstorm_updated", skipped=failed, silent=True)


_batches: Final = Batches(_queue_updates)
