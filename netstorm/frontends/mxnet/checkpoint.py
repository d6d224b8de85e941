"""Checkpoints of a store: its values, its optimizer's states, and how a new job takes them over.

A script loads before it makes its Trainer, which then finds the values under its keys. So what is loaded
waits for `init` and `set_optimizer`, unless these have been called already. In an elastic job a rank that
joins later takes over in the same way what the other ranks have.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.checkpoint.format import Bytes, Description, NumpyTensors
from netstorm.checkpoint.jobs import JobCheckpoints, SaveOptions, Saving, SavingRanks
from netstorm.errors import CheckpointError, UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import NDArray
from netstorm.frontends.mxnet.entries import AnyEntry
from netstorm.frontends.mxnet.updates import CalledUpdater
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.process.runtime import Runtime

__all__ = [
    "CollectedEntry",
    "KeptState",
    "LoadedCheckpoint",
    "MXNetArrays",
    "SavedEntry",
    "StoreCheckpoints",
    "StoreRanks",
    "as_tree",
    "check_trainer",
    "from_tree",
    "mapped",
    "optimizer_values",
    "restore_optimizer_values",
    "state_of_store",
]

_log = logging.getLogger(__name__)

_ROWS: Final = "row_sparse"
_SCRIPTS: Final = frozenset({"rescale_grad", "aggregate_num", "allow_np_array", "multi_precision"})
"""Attributes that the script, or MXNet, sets anew: a gradient's scale depends on the number of ranks."""
_COUNTS: Final = "_all_index_update_counts"
_PIECE: Final = 16 * 2**20
"""Bytes of one round of a broadcast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """What `load_checkpoint` has read; values and states are in the store, or wait for its keys.

    Attributes:
        step: of the checkpoint.
        extra: what `save_checkpoint` was given.
        world_size: how many ranks wrote it.
        rounds: the number of each key's last round, by name.
        path: its folder.
        progress: what the store itself has saved of how far it was; None: nothing.
    """

    step: int
    extra: Any
    world_size: int
    rounds: Mapping[str, int]
    path: Path
    progress: Any = None


class StoreCheckpoints:
    """The checkpoints of one store.

    Attributes:
        ranks: exchange what checkpoints need.
    """

    def __init__(self, runtime: Runtime, namespace: int, *, optimizers_differ: bool) -> None:
        """Begin without any.

        Args:
            runtime: of this process.
            namespace: the store's.
            optimizers_differ: each rank's optimizer has states of its own, which it keeps for itself.
        """
        self._runtime: Final = runtime
        self._optimizers_differ: Final = optimizers_differ
        self.ranks: Final = StoreRanks(runtime, namespace)
        self._kept: KeptState | None = None

    # ------------------------------------------------------------------------------------------------ saving

    def save(
        self,
        path: str | Path,
        entries: Sequence[SavedEntry],
        rule: CalledUpdater | None,
        extra: object,
        options: SaveOptions,
        *,
        progress: object = None,
        ranks: SavingRanks | None = None,
    ) -> Saving:
        """Begin to write a checkpoint; see `NetStormKVStore.save_checkpoint`.

        Args:
            path: as there.
            entries: the store's keys.
            rule: its updates.
            extra: as there.
            options: as there.
            progress: plain values of the store's own, the same at all ranks.
            ranks: who saves together; None: all.
        """
        if not entries:
            raise UsageError("save_checkpoint: the store has no keys yet; init some, or make a first step")
        for entry in entries:
            entry.wait_for_updates()
        with mx.util.np_shape(True):  # arrays without elements, and scalars
            state = state_of_store(entries, rule, extra, tree=as_tree)
            if progress is not None:
                state["progress"] = progress
            own: dict[str, object] = {}
            residuals = {entry.user_key: entry.residual for entry in entries if entry.residual is not None}
            if residuals or self._optimizers_differ:
                own["residuals"] = residuals
            if self._optimizers_differ and options.shares:
                own["optimizer"], own["states"] = state["optimizer"], state["states"]
                state["optimizer"], state["states"] = None, {}
            rounds = {str(entry.user_key): entry.rounds for entry in entries}
            return self._checkpoints(path, ranks).save(
                state, own if own and options.shares else None, options, rounds=rounds
            )

    def _checkpoints(self, path: str | Path, ranks: SavingRanks | None = None) -> JobCheckpoints:
        job = self._runtime.settings.job
        return JobCheckpoints(path, ranks or self.ranks, MXNetArrays(), framework="MXNet", job=job)

    # ----------------------------------------------------------------------------------------------- loading

    def load(
        self,
        path: str | Path,
        entries: Sequence[AnyEntry],
        rule: CalledUpdater | None,
        *,
        step: int | None,
        states: bool,
        broadcast: bool,
        missing_ok: bool,
    ) -> LoadedCheckpoint | None:
        """Read a checkpoint; see `NetStormKVStore.load_checkpoint`."""
        for entry in entries:
            entry.wait_for_updates()
        loaded = self._checkpoints(path).load(
            step=step,
            broadcast=broadcast,
            missing_ok=missing_ok,
            lends_own=self._optimizers_differ,
        )
        if loaded is None:
            return None
        own = loaded.own if isinstance(loaded.own, dict) else {}
        state = loaded.state
        if isinstance(state, dict) and "states" in own:
            state = {**state, "optimizer": own["optimizer"], "states": own["states"]}
        is_same_size = loaded.takers == loaded.index.world_size
        kept = KeptState(
            state,
            source=str(loaded.path),
            token=f"checkpoint {loaded.index.token}",
            rounds=loaded.index.rounds,
            residuals=own.get("residuals") if is_same_size else None,
            with_states=states,
        )
        for entry in entries:
            kept.check(entry.user_key, tuple(entry.value.shape), entry.value.dtype)
        if rule is not None:
            kept.restore_rule(rule)
        for entry in entries:
            kept.restore(entry, with_value=True)
        self._kept = kept
        index = loaded.index
        return LoadedCheckpoint(
            step=loaded.step,
            extra=kept.extra,
            world_size=index.world_size,
            rounds=index.rounds,
            path=loaded.path,
            progress=state.get("progress") if isinstance(state, dict) else None,
        )

    def initial_value(self, user_key: int | str, given: NDArray) -> NDArray:
        """Return the value that a new key begins with: the checkpoint's, if one has been loaded.

        Raises:
            CheckpointError: the checkpoint has no such key, or one of another shape or type.
        """
        return given if self._kept is None else self._kept.initial_value(user_key, given)

    def take_over(self, kept: KeptState, rounds: Mapping[str, int]) -> None:
        """Give later keys and the optimizer what other ranks of the job have; this node has joined later.

        Args:
            kept: their state.
            rounds: the next rounds of the keys of checkpoints.
        """
        self._kept = kept
        self.ranks.begin_at(rounds)

    def initialised(self, entry: AnyEntry) -> None:
        """Restore what a new key has besides its value."""
        if self._kept is not None:
            self._kept.restore(entry, with_value=False)

    def fill(self, trainer: object) -> None:
        """Give the parameters of a Trainer the values of the checkpoint that has just been loaded.

        In its first step it initialises its keys, but that is after its first gradient.

        Raises:
            CheckpointError: a parameter is not in the checkpoint.
        """
        kept = self._kept
        assert kept is not None
        assert isinstance(trainer, mx.gluon.Trainer)  # see `check_trainer`
        for parameter in trainer._params:  # noqa: SLF001
            if parameter._stype != "default":  # noqa: SLF001 -- its rows are pulled before they are used
                continue
            user_key = trainer._param2idx[parameter.name]  # noqa: SLF001
            value = kept.value(user_key)
            if not parameter._deferred_init:  # noqa: SLF001 -- else it may have no shape yet
                kept.check(user_key, tuple(parameter.shape), value.dtype)
            parameter.set_data(value)

    def optimizer_set(self, rule: CalledUpdater) -> None:
        """Restore the states of a store's first optimizer after a checkpoint was loaded."""
        if self._kept is not None:
            self._kept.restore_rule(rule)

    def pushed(self) -> None:
        """Note that training has begun: warn of keys that nobody has initialised."""
        if self._kept is not None:
            self._kept.warn_of_unused()


def check_trainer(trainer: object, store: object, what: str = "load_checkpoint") -> None:
    """Raise `UsageError` if a Trainer's parameters do not come from a store; `what` is the method."""
    if not isinstance(trainer, mx.gluon.Trainer):
        raise UsageError(f"{what}: trainer is a {type(trainer).__name__}, not a gluon.Trainer")
    given = trainer._kvstore_params  # noqa: SLF001 -- 1.9.1 is MXNet's last release
    if given["kvstore"] is not store:
        raise UsageError(
            f"{what}: the Trainer uses another store: make it with this one, Trainer(…, kvstore=kv)"
        )
    if given["update_on_kvstore"] is False and what == "load_checkpoint":
        raise UsageError(
            "load_checkpoint: with update_on_kvstore=False the weights are not in the store: use "
            "save_parameters and Trainer.save_states"
        )


# ------------------------------------------------------------------------------------ what a store takes over


class CollectedEntry(NamedTuple):
    """A key with its owners' values. What compression has kept is each rank's own."""

    user_key: int | str
    value: NDArray
    rounds: int
    residual: None = None

    def wait_for_updates(self) -> None:
        """Do nothing: all values are here."""


SavedEntry: TypeAlias = AnyEntry | CollectedEntry


def state_of_store(
    entries: Sequence[SavedEntry],
    rule: CalledUpdater | None,
    extra: object,
    *,
    tree: Callable[[object], object],
) -> dict[str, Any]:
    """Return what a store keeps, as a tree.

    Args:
        entries: its keys.
        rule: its updates; None: the sum replaces the value.
        extra: the script's.
        tree: makes trees of dense arrays of arrays, and of tuples and lists of them.
    """
    states = None if rule is None else rule.of_states
    return {
        "keys": {entry.user_key: tree(entry.value) for entry in entries},
        "optimizer": None if states is None else optimizer_values(states.optimizer),
        "states": {} if states is None else {key: tree(state) for key, state in states.states.items()},
        "extra": extra,
    }


class KeptState:
    """What a store takes over."""

    def __init__(
        self,
        state: object,
        *,
        source: str,
        token: str,
        rounds: Mapping[str, int],
        residuals: Mapping[int | str, Any] | None = None,
        with_states: bool = True,
        partial: bool = False,
    ) -> None:
        """Keep a state until it is asked for.

        Args:
            state: a tree with the members `keys`, `optimizer`, `states` and `extra`.
            source: where it comes from, for messages.
            token: names it; all ranks that take it over have the same.
            rounds: the number of each key's last round, by name.
            residuals: what gradient compression has kept, by key.
            with_states: whether the optimizer gets its states.
            partial: the store may have keys that are not here.

        Raises:
            CheckpointError: it is no state of a store.
        """
        if not isinstance(state, dict) or not isinstance(state.get("keys"), dict):
            raise CheckpointError(f"{source} holds no keys of a store")
        self._source: Final = source
        self._rounds: Final = rounds
        self._keys: Final[dict[int | str, Any]] = state["keys"]
        self._residuals: Final[Mapping[int | str, Any]] = residuals or {}
        self._optimizer: object = state.get("optimizer") if with_states else None
        self._states: Final[dict[int | str, Any]] = state.get("states", {})
        self._token: Final = token
        self._partial: Final = partial
        self._unused: set[int | str] | None = set(self._keys)
        self.extra: Final = state.get("extra")

    def __contains__(self, user_key: int | str) -> bool:
        """Return whether there is a value of a key."""
        return user_key in self._keys

    def check(self, user_key: int | str, shape: tuple[int, ...], dtype: object) -> None:
        """Check that a key of the store has a value here, of its shape and type."""
        self._check_known(user_key)
        tree = self._keys[user_key]
        has_rows = isinstance(tree, dict)
        kept_shape = tuple(tree["shape"]) if has_rows else tuple(tree.shape)
        kept_dtype = tree["data"].dtype if has_rows else tree.dtype
        if kept_shape != shape or kept_dtype != dtype:
            raise CheckpointError(
                f"{self._source} has key {user_key!r} with shape {kept_shape} and type {kept_dtype}, and the "
                f"store has {shape}: it is of another model"
            )

    def _check_known(self, user_key: int | str) -> None:
        if user_key not in self._keys:
            some = ", ".join(repr(key) for key in list(self._keys)[:5])
            raise CheckpointError(
                f"{self._source} has no key {user_key!r}; it has {len(self._keys)} keys, such as {some}: it "
                "is of another model, or a script that names its keys otherwise"
            )

    def value(self, user_key: int | str) -> NDArray:
        """Return a key's value, a new array."""
        self._check_known(user_key)
        with mx.util.np_shape(True):
            return _array(self._keys[user_key])

    def initial_value(self, user_key: int | str, given: NDArray) -> NDArray:
        """Return the value that a new key begins with: the one kept here, or what was given.

        Raises:
            CheckpointError: there is none, or one of another shape or type.
        """
        if self._partial and user_key not in self:
            return given
        self.check(user_key, tuple(given.shape), given.dtype)
        return self.value(user_key)

    def restore(self, entry: AnyEntry, *, with_value: bool) -> None:
        """Give a key of the store what it had."""
        key = entry.user_key
        if self._partial and key not in self:
            return
        residual = self._residuals.get(key)
        entry.restore(
            self.value(key) if with_value else None,
            None if residual is None else {name: _array(kept) for name, kept in residual.items()},
            self._rounds.get(str(key), 0),
        )
        if self._unused is not None:
            self._unused.discard(key)

    def restore_rule(self, rule: CalledUpdater) -> None:
        """Give a store's optimizer its states and counts; once."""
        values, self._optimizer = self._optimizer, None
        if values is None:
            return
        if rule.of_states is None:
            raise CheckpointError(
                f"{self._source} has an optimizer's states, and this store has an updater of your own: use "
                "set_optimizer, or load_checkpoint(…, states=False) to load the values alone"
            )
        restore_optimizer_values(rule.of_states.optimizer, values)
        states = {key: from_tree(state) for key, state in self._states.items()}
        rule.restore(states, self._token)

    def warn_of_unused(self) -> None:
        """Warn, once, of keys that nobody has asked for."""
        if self._unused:
            _log.warning(
                "%s has %d keys that this store does not have, such as %r: they are ignored",
                self._source,
                len(self._unused),
                min(self._unused, key=str),
            )
        self._unused = None


def _array(tree: object) -> NDArray:
    made = from_tree(tree)
    if not isinstance(made, mx.nd.NDArray):
        raise CheckpointError(f"the checkpoint has a {type(tree).__name__} instead of an array")
    return made


# ------------------------------------------------------------------------------------------------- optimizers


def optimizer_values(optimizer: mx.optimizer.Optimizer) -> dict[str, object]:
    """Return the class, the hyper-parameters that are plain values, the counts of updates, and the rates'
    schedule.
    """
    schedule = optimizer.lr_scheduler
    return {
        "class": type(optimizer).__name__,
        "values": _plain(optimizer),
        "counts": {device: dict(counts) for device, counts in vars(optimizer)[_COUNTS].items()},
        "schedule": None
        if schedule is None
        else {"class": type(schedule).__name__, "values": _plain(schedule)},
    }


def restore_optimizer_values(optimizer: mx.optimizer.Optimizer, values: object) -> None:
    """Set what `optimizer_values` has returned; nothing is set if the classes differ.

    Raises:
        CheckpointError: the optimizer or its schedule is of another class.
    """
    if not isinstance(values, dict):
        raise CheckpointError("the checkpoint has no values of an optimizer")
    _check_class("an optimizer", values.get("class"), optimizer)
    schedule, kept = optimizer.lr_scheduler, values.get("schedule")
    _check_class("a schedule of learning rates", None if kept is None else kept["class"], schedule)
    if kept is not None:
        vars(schedule).update(kept["values"])
    vars(optimizer).update(values["values"])
    for device, counts in values["counts"].items():
        vars(optimizer)[_COUNTS].setdefault(device, {}).update(counts)


def _plain(thing: object) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(thing).items()
        if name not in _SCRIPTS and (value is None or type(value) in {bool, int, float, str})
    }


def _check_class(what: str, kept: object, live: object) -> None:
    name = None if live is None else type(live).__name__
    if kept != name:
        raise CheckpointError(
            f"the checkpoint was written with {what} {kept}, and this store has {name}: use the same, or "
            "load_checkpoint(…, states=False) to load the values alone"
        )


# ------------------------------------------------------------------------------------------- arrays and ranks


def mapped(tree: object, function: Callable[[object], object]) -> object:
    """Return a tree of dictionaries, lists and tuples with what `function` returns for each leaf."""
    if isinstance(tree, dict):
        return {key: mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(mapped(value, function) for value in tree)
    return function(tree)


def as_tree(value: object) -> object:
    """Return a tree of arrays with row-sparse ones as dictionaries of dense ones."""

    def dense(leaf: object) -> object:
        if not isinstance(leaf, mx.nd.sparse.RowSparseNDArray):
            return leaf
        return {"stype": _ROWS, "shape": tuple(leaf.shape), "indices": leaf.indices, "data": leaf.data}

    return mapped(value, dense)


def from_tree(tree: object) -> object:
    """Return what `as_tree` was given, from a tree with NumPy's arrays; new arrays of MXNet's on the host.
    Arrays of MXNet's stay as they are.
    """
    if isinstance(tree, mx.nd.NDArray):
        return tree
    if isinstance(tree, np.ndarray):
        made = mx.nd.empty(tree.shape, dtype=tree.dtype)
        made[:] = tree
        return made
    if isinstance(tree, Mapping) and tree.get("stype") == _ROWS:
        indices, data = from_tree(tree["indices"]), from_tree(tree["data"])
        return mx.nd.sparse.row_sparse_array(
            (data, indices), shape=tree["shape"], dtype=tree["data"].dtype, ctx=mx.cpu()
        )
    if isinstance(tree, (tuple, list)):
        return type(tree)(from_tree(item) for item in tree)
    if tree is None or isinstance(tree, (int, float, str)):
        return tree
    raise CheckpointError(f"the checkpoint has a {type(tree).__name__} where MXNet's arrays are expected")


class MXNetArrays(NumpyTensors):
    """Arrays on any device, and NumPy's. They are restored as NumPy's."""

    def is_tensor(self, value: object) -> bool:
        """Return whether a value is MXNet's array, or NumPy's."""
        return isinstance(value, mx.nd.NDArray) or super().is_tensor(value)

    def describe(self, tensor: object, name: str) -> Description:
        """See the base class; MXNet's arrays have to be dense."""
        if not isinstance(tensor, mx.nd.NDArray):
            return super().describe(tensor, name)
        if tensor.stype != "default":
            raise UsageError(f"{name} is a {tensor.stype} array: give dense ones (tostype('default'))")
        dtype, shape = np.dtype(tensor.dtype), tuple(tensor.shape)
        return Description(self.KIND, dtype.name, shape, math.prod(shape) * dtype.itemsize)

    def data(self, tensor: object) -> memoryview:
        """Return its bytes, after all that is queued for it."""
        return super().data(tensor.asnumpy() if isinstance(tensor, mx.nd.NDArray) else tensor)


class StoreRanks(SavingRanks):
    """The ranks of one store. Its keys' names begin with what no user's key does."""

    def __init__(self, runtime: Runtime, namespace: int) -> None:
        """Prepare for the store with this namespace; nothing is sent."""
        self._runtime: Final = runtime
        self._namespace: Final = namespace
        self.keys: Final[dict[str, Key]] = {}
        """By name."""
        self._first_rounds: Mapping[str, int] = {}

    @property
    def rank(self) -> int:
        """This node's rank."""
        return self._runtime.rank

    def incarnations(self) -> dict[int, int]:
        """Return who is in the job; nobody, once it has failed."""
        if self._runtime.failure is not None:
            return {}
        return {member.rank: member.incarnation for member in self._runtime.node.members if member.port}

    def begin_at(self, rounds: Mapping[str, int]) -> None:
        """Begin with these rounds, by name of the key: this node has joined a job that has done others."""
        self._first_rounds = rounds

    def gather(self, numbers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the numbers of every rank that takes part, by rank. Blocks until all have called.

        In an elastic job `Runtime.size` counts all places, and those that nobody has contribute nothing.
        """
        places = np.zeros((self._runtime.size, 1 + len(numbers)), np.int64)
        places[self.rank] = (1, *numbers)
        self._sum(places.reshape(-1), contributes=True)
        return {rank: tuple(map(int, row[1:])) for rank, row in enumerate(places) if row[0]}

    def from_rank(self, rank: int, size: int, data: Bytes | None) -> Bytes:
        """Return the bytes that one rank gives; the others give None."""
        whole: Bytes = bytearray(size) if data is None else data
        into = np.frombuffer(whole, np.uint8)
        for begin in range(0, size, _PIECE):
            end = min(begin + _PIECE, size)
            piece = np.zeros(end - begin, np.uint8)
            if data is not None:
                piece[:] = into[begin:end]
            self._sum(piece, contributes=data is not None)
            if data is None:
                into[begin:end] = piece
        return whole

    def _sum(self, values: npt.NDArray[np.generic], *, contributes: bool) -> None:
        """Replace `values` by the sum over the ranks that contribute."""
        name = f"\0checkpoint {values.dtype.name} {values.size}"
        key = self.keys.get(name)
        if key is None:
            key = self._runtime.register(self._namespace, name, values.shape, values.dtype.name)
            key.begin_at(self._first_rounds.get(name, 0))
            self.keys[name] = key
        self._runtime.allreduce(
            Operation(
                key=key,
                round=key.take_round(),
                source=values if contributes else None,
                destination=values,
                done=lambda _: None,
            )
        )
