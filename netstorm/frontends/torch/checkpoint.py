"""Checkpoints of a PyTorch job: `save` and `load`, over any backend of `torch.distributed`, or without one.

    from netstorm.frontends.torch import checkpoint

    saving = checkpoint.save("checkpoints", {"model": model, "optimizer": optimizer}, step=step, keep=3)
    ...
    loaded = checkpoint.load("checkpoints", missing_ok=True)
    if loaded is not None:
        loaded.restore({"model": model, "optimizer": optimizer})

The format holds tensors and plain values, and is not pickle: reading a checkpoint runs no code of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from netstorm.checkpoint.files import latest_step
from netstorm.checkpoint.format import Bytes, Description, NumpyTensors
from netstorm.checkpoint.jobs import JobCheckpoints, SaveOptions, Saving, SavingRanks, save_by_one
from netstorm.errors import CheckpointError, UsageError
from netstorm.frontends.torch.errors import raises_torch_errors
from netstorm.frontends.torch.plain_values import tensor_device
from netstorm.frontends.torch.process_group import NetStormProcessGroup
from netstorm.kvstore.process.elastic import SavingRank
from netstorm.settings import Settings

__all__ = ["LoadedCheckpoint", "Saving", "TorchTensors", "latest_step", "load", "save"]

_KIND: Final = "torch"
_KEEP: Final = "keep its full values as an ordinary tensor instead"
_PIECE: Final = 64 * 2**20
"""Bytes of one broadcast: a group with other calls under way should not wait for gigabytes."""


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

    Every rank of the group calls this, with the same state. It copies its share, whole tensors with
    about 1/N of the bytes, and sends two small messages. The checkpoint, `path/step-000123/`, is complete
    when its index is there, which rank 0 writes last. A second call waits until the first checkpoint is
    written, or has failed.

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
        return _checkpoints(path, GroupRanks(group)).save(tree, own, options)


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
    loaded = _checkpoints(path, GroupRanks(group)).load(step=step, broadcast=broadcast, missing_ok=missing_ok)
    if loaded is None:
        return None
    if not isinstance(loaded.state, dict):
        raise CheckpointError(f"{loaded.path} holds no state by name")
    return LoadedCheckpoint(
        step=loaded.step,
        state=loaded.state,
        own=loaded.own,
        world_size=loaded.index.world_size,
        path=loaded.path,
    )


def _checkpoints(path: str | Path, ranks: SavingRanks) -> JobCheckpoints:
    job = Settings.from_environment().job
    return JobCheckpoints(path, ranks, TorchTensors(), framework="PyTorch", job=job)


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

    def save_all(options: SaveOptions) -> Saving:
        tree = {name: _state_of(value) for name, value in state.items()}
        with torch.no_grad():
            return _checkpoints(path, rank).save(tree, None, options)

    return save_by_one(path, options, save_all, is_due=rank.is_due)


def _state_of(value: Any) -> Any:
    state_dict = getattr(value, "state_dict", None)
    return state_dict() if callable(state_dict) else value


# ----------------------------------------------------------------------------------------- tensors and ranks


class TorchTensors(NumpyTensors):
    """Tensors on any device, and NumPy's arrays. Restored tensors are on the CPU."""

    def is_tensor(self, value: object) -> bool:
        """Return whether a value is a tensor, or an array."""
        return isinstance(value, torch.Tensor) or super().is_tensor(value)

    def describe(self, tensor: object, name: str) -> Description:
        """See the base class; a tensor has to be whole at this rank."""
        if not isinstance(tensor, torch.Tensor):
            return super().describe(tensor, name)
        if type(tensor) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
            raise UsageError(
                f"{name} is a {type(tensor).__name__}, of which this rank may have a part alone: {_KEEP} "
                "(torch.distributed.checkpoint.state_dict has full_state_dict=True)"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise UsageError(f"{name} is a sparse, quantised or meta tensor: {_KEEP}")
        return Description(
            _KIND,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.numel() * tensor.element_size(),
        )

    def data(self, tensor: object) -> memoryview:
        """Return its bytes in C order; from a GPU they are copied."""
        if not isinstance(tensor, torch.Tensor):
            return super().data(tensor)
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        flat = plain.view(torch.uint8) if plain.numel() else plain.new_empty(0, dtype=torch.uint8)
        return flat.cpu().numpy().data

    def restore(self, description: Description, data: memoryview) -> object:
        """Return a tensor, or an array."""
        if description.kind != _KIND:
            return super().restore(description, data)
        dtype = getattr(torch, description.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"the checkpoint has a tensor of type {description.dtype!r}, which PyTorch "
                f"{torch.__version__} does not have"
            )
        if math.prod(description.shape) * dtype.itemsize != len(data):
            raise CheckpointError(f"the checkpoint has a tensor of {len(data)} bytes for {description}")
        if not data:
            return torch.empty(description.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(description.shape)


class GroupRanks(SavingRanks):
    """The ranks of a group of `torch.distributed`; one rank alone if there is none."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group: Final = group
        self._is_distributed: Final = dist.is_available() and dist.is_initialized()
        self._rank: Final = dist.get_rank(group) if self._is_distributed else 0
        if self._rank < 0:
            raise UsageError(
                f"rank {dist.get_rank()} is not in the given group: its members alone may call this"
            )
        self._size: Final = dist.get_world_size(group) if self._is_distributed else 1

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    def incarnations(self) -> dict[int, int]:
        """Return who is there. Process groups of other backends do not say who has died: all are."""
        group = dist.group.WORLD if self._is_distributed and self._group is None else self._group
        if not isinstance(group, NetStormProcessGroup):
            return dict.fromkeys(range(self._size), 0)
        present = {
            member.rank: member.incarnation for member in group.member.runtime.node.members if member.port
        }
        return {place: present[rank] for place, rank in enumerate(group.member.ranks) if rank in present}

    def gather(self, numbers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the numbers of every rank, by rank. In an elastic job some are missing, and give zeros."""
        if self._size == 1:
            return {0: tuple(numbers)}
        mine = torch.tensor([1, *numbers], dtype=torch.int64, device=tensor_device(self._group))
        gathered = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(gathered, mine, group=self._group)
        rows = [one.tolist() for one in gathered]
        return {rank: tuple(row[1:]) for rank, row in enumerate(rows) if row[0]}

    def from_rank(self, rank: int, size: int, data: Bytes | None) -> Bytes:
        """Return the bytes that one rank gives; the others give None."""
        whole = bytearray(size) if data is None else data
        if self._size == 1:
            return whole
        view = memoryview(whole)
        for begin in range(0, size, _PIECE):
            end = min(begin + _PIECE, size)
            if data is not None:
                self._broadcast(torch.frombuffer(bytearray(view[begin:end]), dtype=torch.uint8), rank)
            else:
                piece = torch.empty(end - begin, dtype=torch.uint8)
                view[begin:end] = self._broadcast(piece, rank).numpy().data
        return whole

    def _broadcast(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        there = tensor.to(tensor_device(self._group))
        source = rank if self._group is None else dist.get_global_rank(self._group, rank)
        dist.broadcast(there, src=source, group=self._group)
        return there.cpu()
