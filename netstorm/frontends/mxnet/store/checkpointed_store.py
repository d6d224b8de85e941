"""The part of a store that has keys and an optimizer, and saves both in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Final

from netstorm.checkpoint.jobs import SaveOptions, Saving
from netstorm.errors import Closed
from netstorm.frontends.mxnet.checkpoint import (
    LoadedCheckpoint,
    StoreCheckpoints,
    check_trainer,
)
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors
from netstorm.frontends.mxnet.store.job_member import JobMember
from netstorm.frontends.mxnet.store.key_table import KeyTable
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule

__all__ = ["CheckpointedStore"]


@methods_raise_mxnet_errors
class CheckpointedStore(JobMember):
    """A store as checkpoints see it."""

    _is_replicated: ClassVar[bool] = True
    """Every rank has all values and states."""

    _optimizers_differ: ClassVar[bool] = False
    """Each rank's optimizer has states of its own, which a checkpoint keeps for that rank."""

    def __init__(self) -> None:
        """Join the job, as `JobMember` does, and open a store without keys."""
        super().__init__()
        self._namespace: Final = self._runtime.open_namespace()
        self._keys: Final = KeyTable(self._runtime, self._namespace)
        self._rule: UpdateRule | None = None
        self._checkpoints: Final = StoreCheckpoints(
            self._runtime, self._namespace, optimizers_differ=self._optimizers_differ
        )

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
        """Begin to write all values, optimizer states and counts, and return while a thread writes them.

        Every rank calls this, after the same pushes. It waits for those, copies its share, about 1/N of the
        bytes, and sends a small message. The checkpoint, `path/step-000123/`, is complete when its index is
        there, which rank 0 writes last. A second call waits until the first checkpoint is written, or has
        failed.

        Args:
            path: folder of the job's checkpoints, on a file system that all ranks share.
            step: names the checkpoint; one of the same step is replaced. None: the next one in the folder.
            extra: dictionaries, lists, numbers, texts and arrays of the script's, the same at all ranks.
            shares: whether each rank writes its share. If not, rank 0 writes everything, and needs no file
                system that the others share; the others may call this too, and do nothing.
            keep: number of complete checkpoints to keep; older ones are removed after the new one is
                complete. None: all.
            timeout_s: longest wait of the thread for the shares of the other ranks.

        Returns:
            The saving under way; its `wait()` returns when the checkpoint is complete, or raises what has
            gone wrong.

        Raises:
            UsageError: there are no keys yet, or something that a checkpoint cannot hold.
            Disagreement: ranks save different things.
        """
        self._check_checkpoint("save_checkpoint")
        options = SaveOptions(
            step=step, shares=shares, keep=keep, timeout_s=timeout_s, compares_tensors=False
        )
        rule = self._collected_rule()
        return self._checkpoints.save(
            path, self._keys.entries(), rule, extra, options, progress=self._progress()
        )

    def load_checkpoint(
        self,
        path: str | Path,
        *,
        trainer: object = None,
        step: int | None = None,
        states: bool = True,
        broadcast: bool = False,
        missing_ok: bool = False,
    ) -> LoadedCheckpoint | None:
        """Take over a checkpoint, in a job of however many nodes; every rank calls this.

        Keys that are initialised later begin with its values, and an optimizer that is set later with its
        states. What the store has already is replaced; pull it then. All ranks get the same checkpoint, the
        newest that is complete. What was only written in part is skipped, with a warning. Every byte is
        checked.

        Args:
            path: folder of the job's checkpoints.
            trainer: a `gluon.Trainer` with this store: its parameters get the values at once. Module needs
                none: load before `init_optimizer`.
            step: which checkpoint; None: the newest.
            states: whether the optimizer gets its states, counts and rates; if not, only values are loaded.
            broadcast: only rank 0 reads, and sends everything to the others: for ranks without a file system
                in common.
            missing_ok: return None if the folder has no checkpoint, instead of an error. A rank that has
                joined an elastic job later gets None in any case: it has the state of the others.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it does not fit this store; names the
                file, and says what to do.
            Disagreement: ranks see different checkpoints under the same path.
        """
        self._check_checkpoint("load_checkpoint")
        if self._skips_checkpoint():
            return None
        if trainer is not None:
            check_trainer(trainer, self)
        loaded = self._checkpoints.load(
            path,
            self._keys.entries(),
            self._rule,
            step=step,
            states=states,
            broadcast=broadcast,
            missing_ok=missing_ok,
        )
        if loaded is not None and trainer is not None:
            self._checkpoints.fill(trainer)
        if loaded is not None and loaded.progress is not None:
            self._go_on_from(loaded.progress)
        return loaded

    def _collected_rule(self) -> UpdateRule | None:
        """Return the rule with the states to save; every value is here then, too."""
        return self._rule

    def _progress(self) -> object:
        """Return what a checkpoint is to say of how far this store is, in plain values; None: nothing."""
        return None

    def _go_on_from(self, progress: Any) -> None:
        """Go on from where a store of this kind was."""

    def _skips_checkpoint(self) -> bool:
        """Return whether there is nothing to load, since this rank has the state of the others."""
        return False

    def _check(self) -> None:
        """Raise the error that has made the store useless, if there is one.

        If an operation of the script's own has failed, raise that failure, which is the cause of the others.
        """
        try:
            self._runtime.check()
        except Closed:
            for entry in self._keys.entries():
                if entry.skipped is not None:
                    entry.skipped.wait_to_read()
            raise

    def _check_checkpoint(self, what: str) -> None:
        """Raise an error if this store can save or load no checkpoint now; `what` is the method."""
        self._check()
