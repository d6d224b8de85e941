"""`save` and `load` of the checkpoints of a PyTorch job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from netstorm.checkpoint.background import Saving, finished_saving, wait_for_last_saving
from netstorm.checkpoint.folder import claim_step
from netstorm.checkpoint.job_checkpoints import JobCheckpoints, SaveOptions
from netstorm.errors import CheckpointError, UsageError
from netstorm.frontends.torch.checkpoint.group_ranks import GroupRanks
from netstorm.frontends.torch.checkpoint.tensor_bytes import TorchTensors
from netstorm.frontends.torch.errors import raises_torch_errors
from netstorm.kvstore.process.elastic import SavingRank
from netstorm.settings import Settings

__all__ = ["LoadedCheckpoint", "load", "save"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """What `load` has read. Its tensors are on the CPU.

    Attributes:
        step: of the checkpoint.
        state: what `save` was given, with the state dictionaries of its objects.
        own: what this rank gave as `own`; None: nothing, or the job had another number of ranks.
        world_size: how many ranks wrote it.
        path: its folder.
    """

    step: int
    state: dict[str, Any]
    own: Any
    world_size: int
    path: Path

    def restore(self, objects: Mapping[str, Any]) -> None:
        """Call `load_state_dict` of each object with the state of that name.

        Raises:
            CheckpointError: the checkpoint has no state of that name; nothing has been restored then.
        """
        missing = [name for name in objects if name not in self.state]
        if missing:
            raise CheckpointError(
                f"{self.path} has no {missing[0]!r}; it has {', '.join(map(repr, self.state))}"
            )
        for name, thing in objects.items():
            thing.load_state_dict(self.state[name])


@raises_torch_errors
def save(
    path: str | Path,
    state: Mapping[str, Any],
    *,
    own: Mapping[str, Any] | None = None,
    step: int | None = None,
    shares: bool = True,
    keep: int | None = None,
    timeout_s: float = 600.0,
    group: dist.ProcessGroup | None = None,
) -> Saving:
    """Begin to write a checkpoint, and return while a thread writes it.

    Every rank of the group calls this, with the same state. It copies its share of the bytes, 1/N of the
    tensors, and sends two small messages. The checkpoint, `path/step-000123/`, is complete when its manifest
    is there, which rank 0 writes last. A second call waits until the first checkpoint is written, or has
    failed.

    A tensor that ranks have different values of, such as BatchNorm's running mean under DDP, is rank 0's.

    With an `AsynchronousSGD` in an elastic job ranks have no step in common, so none waits for another one.
    One rank writes, alone: the lowest that trains. At the others this does nothing. The state is its own;
    `step` is the least number then, and becomes larger if the folder has that one. `own` is refused; `shares`
    and `group` have no effect.

    Args:
        path: folder of the job's checkpoints, on a file system that all ranks share.
        state: by name, objects with a `state_dict()`, or trees of dictionaries, lists, tuples, numbers,
            texts, bytes, None, tensors and NumPy's arrays.
        own: a tree that this rank keeps for itself, such as `{"rng": torch.get_rng_state()}`. `load` returns
            it to the same rank of a job of as many ranks.
        step: names the checkpoint; one of the same step is replaced. None: the next one in the folder.
        shares: whether each rank writes its share. If not, rank 0 writes everything, and needs no file system
            that the others share; the others may call this too, and do nothing.
        keep: number of complete checkpoints to keep; older ones are removed after the new one is complete.
            None: all.
        timeout_s: longest wait of the thread for the shares of the other ranks.
        group: its ranks save together; None: all ranks, or this process alone if there is no process group.

    Returns:
        The saving under way. Call its `wait()` to know that the checkpoint is complete: it raises what has
        gone wrong. A program that ends waits for its last checkpoint.

    Raises:
        UsageError: names what a checkpoint cannot hold; arguments that make no sense.
        Disagreement: ranks give different states; what differs belongs in `own`.
    """
    options = SaveOptions(step=step, shares=shares, keep=keep, timeout_s=timeout_s, compares_tensors=True)
    alone = next(filter(None, (getattr(value, "saving_rank", None) for value in state.values())), None)
    if alone is not None:
        return _save_alone(path, state, options, alone, own=own)
    tree = {name: _state_of(value) for name, value in state.items()}
    with torch.no_grad():
        return _checkpoints(path, group).save(tree, own, options)


@raises_torch_errors
def load(
    path: str | Path,
    *,
    step: int | None = None,
    broadcast: bool = False,
    missing_ok: bool = False,
    group: dist.ProcessGroup | None = None,
) -> LoadedCheckpoint | None:
    """Read a checkpoint, in a job of however many ranks; every rank of the group calls this.

    All ranks get the same one: the newest that is complete, as rank 0 sees it. What was only written in part
    is skipped, with a warning. Every byte is checked.

    Args:
        path: folder of the job's checkpoints.
        step: which checkpoint; None: the newest.
        broadcast: only rank 0 reads, and sends everything to the others: for ranks without a file system in
            common.
        missing_ok: return None if the folder has no checkpoint, instead of an error.
        group: as `save`.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged; names the file, and says what to do.
        Disagreement: ranks see different checkpoints under the same path.
    """
    loaded = _checkpoints(path, group).load(step=step, broadcast=broadcast, missing_ok=missing_ok)
    if loaded is None:
        return None
    if not isinstance(loaded.state, dict):
        raise CheckpointError(f"{loaded.path} holds no state by name")
    return LoadedCheckpoint(
        step=loaded.step,
        state=loaded.state,
        own=loaded.own,
        world_size=loaded.manifest.world_size,
        path=loaded.path,
    )


def _checkpoints(path: str | Path, group: dist.ProcessGroup | None) -> JobCheckpoints:
    job = Settings.from_environment().job
    return JobCheckpoints(path, GroupRanks(group), TorchTensors(), framework="PyTorch", job=job)


def _save_alone(
    path: str | Path,
    state: Mapping[str, Any],
    options: SaveOptions,
    rank: SavingRank,
    *,
    own: Mapping[str, Any] | None,
) -> Saving:
    """Save if it is this rank's turn, for all."""
    if own is not None:
        raise UsageError("own= with AsynchronousSGD in an elastic job: one rank writes alone; leave it out")
    if not rank.is_due:
        return finished_saving(options.step or 0, Path(path))
    wait_for_last_saving()
    options = replace(options, step=claim_step(path, options.step), shares=False)
    tree = {name: _state_of(value) for name, value in state.items()}
    job = Settings.from_environment().job
    with torch.no_grad():
        return JobCheckpoints(path, rank, TorchTensors(), framework="PyTorch", job=job).save(
            tree, None, options
        )


def _state_of(value: Any) -> Any:
    state_dict = getattr(value, "state_dict", None)
    return state_dict() if callable(state_dict) else value
