"""The ranks of a process group, as checkpoints need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from netstorm.checkpoint.checksums import Bytes
from netstorm.errors import UsageError
from netstorm.frontends.torch.plain_values import tensor_device
from netstorm.frontends.torch.process_group import NetStormProcessGroup

__all__ = ["GroupRanks"]

_PIECE: Final = 64 * 2**20
"""Bytes of one broadcast: a group with other calls under way should not wait for gigabytes."""


class GroupRanks:
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

    @property
    def writes_alone(self) -> bool:
        """Whether this is the lowest of the ranks that are there."""
        return self._rank == min(self.incarnations(), default=self._rank)

    def incarnations(self) -> dict[int, int]:
        """Return who is there. Process groups of other backends do not say who has died: all are."""
        group = dist.group.WORLD if self._is_distributed and self._group is None else self._group
        if not isinstance(group, NetStormProcessGroup):
            return dict.fromkeys(range(self._size), 0)
        present = {one.rank: one.incarnation for one in group.member.runtime.node.members if one.port}
        return {place: present[rank] for place, rank in enumerate(group.member.ranks) if rank in present}

    def gather(self, numbers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the numbers of every rank, by rank. In an elastic job some are missing, and give zeros."""
        if self._size == 1:
            return {0: tuple(numbers)}
        mine = torch.tensor([1, *numbers], dtype=torch.int64, device=tensor_device(self._group))
        found = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(found, mine, group=self._group)
        rows = [one.tolist() for one in found]
        return {rank: tuple(row[1:]) for rank, row in enumerate(rows) if row[0]}

    def from_rank(self, rank: int, parts: Sequence[Bytes] | None) -> list[Bytes]:
        """Return what one rank gives; the others give None."""
        if self._size == 1:
            assert parts is not None
            return list(parts)
        (count,) = self._broadcast(torch.tensor([0 if parts is None else len(parts)]), rank).tolist()
        lengths = torch.zeros(count, dtype=torch.int64)
        if parts is not None:
            lengths = torch.tensor([len(part) for part in parts])
        sizes = self._broadcast(lengths, rank).tolist()
        return [
            self._send(size, None if parts is None else parts[place], rank)
            for place, size in enumerate(sizes)
        ]

    def _send(self, size: int, part: Bytes | None, rank: int) -> Bytes:
        whole = bytearray(size) if part is None else part
        view = memoryview(whole)
        for begin in range(0, size, _PIECE):
            end = min(begin + _PIECE, size)
            if part is not None:
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
