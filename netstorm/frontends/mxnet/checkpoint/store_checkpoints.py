"""What a store saves in a checkpoint, and what it takes from one, now or when keys are initialised later.

A script loads before it makes its Trainer, which then finds the values under its keys. So what is loaded
waits for `init` and `set_optimizer`, unless these have been called already.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from netstorm.checkpoint.background import Saving
from netstorm.checkpoint.job_checkpoints import JobCheckpoints, Ranks, SaveOptions
from netstorm.errors import UsageError
from netstorm.frontends.mxnet.checkpoint.array_bytes import MXNetArrays, as_tree
from netstorm.frontends.mxnet.checkpoint.kept_state import (
    KeptEntry,
    KeptState,
    SavedEntry,
    state_of_store,
)
from netstorm.frontends.mxnet.checkpoint.store_ranks import StoreRanks
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import NDArray
from netstorm.frontends.mxnet.updates import CalledUpdater
from netstorm.kvstore.process.runtime import Runtime

__all__ = ["LoadedCheckpoint", "StoreCheckpoints", "check_trainer"]

_log = logging.getLogger(__name__)


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
        ranks: Ranks | None = None,
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

    def _checkpoints(self, path: str | Path, ranks: Ranks | None = None) -> JobCheckpoints:
        job = self._runtime.settings.job
        return JobCheckpoints(path, ranks or self.ranks, MXNetArrays(), framework="MXNet", job=job)

    # ----------------------------------------------------------------------------------------------- loading

    def load(
        self,
        path: str | Path,
        entries: Sequence[KeptEntry],
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
        is_same_size = loaded.takers == loaded.manifest.world_size
        kept = KeptState(
            state,
            source=str(loaded.path),
            token=f"checkpoint {loaded.manifest.token}",
            rounds=loaded.manifest.rounds,
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
        manifest = loaded.manifest
        return LoadedCheckpoint(
            step=loaded.step,
            extra=kept.extra,
            world_size=manifest.world_size,
            rounds=manifest.rounds,
            path=loaded.path,
            progress=state.get("progress") if isinstance(state, dict) else None,
        )

    def initial_value(self, user_key: int | str, given: NDArray) -> NDArray:
        """Return the value that a new key begins with: the checkpoint's, if one has been loaded.

        Raises:
            CheckpointError: the checkpoint has no such key, or one of another shape or type.
        """
        if self._kept is None:
            return given
        return self._kept.initial_value(user_key, given)

    def take_over(self, kept: KeptState, rounds: Mapping[str, int]) -> None:
        """Give later keys and the optimizer what other ranks of the job have; this node has joined later.

        Args:
            kept: their state.
            rounds: the next rounds of the keys of checkpoints.
        """
        self._kept = kept
        self.ranks.begin_at(rounds)

    def initialised(self, entry: KeptEntry) -> None:
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
