"""One block at its owner: pushes that wait to be applied, in order, and pulls that wait for them. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from netstorm.kvstore.keys import Array, Key
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import Pull, Push

__all__ = ["Block", "Gathering", "WaitingPull"]


class Gathering:
    """The values of one push, as its parts come in."""

    __slots__ = ("_missing", "push", "values")

    def __init__(self, push: Push, chunks: range) -> None:
        self.push: Final = push
        """One of its parts."""
        self._missing = set(chunks)
        self.values: Array | None = None

    @property
    def complete(self) -> bool:
        """Whether all parts are here."""
        return not self._missing

    def add(self, chunk: int, payload: Buffer, key: Key, chunks: range) -> bool:
        """Take a part; return False if it is here already."""
        if chunk not in self._missing:
            return False
        self._missing.remove(chunk)
        values: Array = np.frombuffer(payload, key.dtype)
        if len(chunks) == 1:
            self.values = values
            return True
        assert key.layout is not None
        bounds = key.layout.bounds
        first = bounds[chunks[0]][0]
        if self.values is None:
            self.values = np.empty(bounds[chunks[-1]][1] - first, key.dtype)
        start, end = bounds[chunk]
        self.values[start - first : end - first] = values
        return True


@dataclass(frozen=True, slots=True)
class WaitingPull:
    """A pull that a block has not answered."""

    rank: int
    pull: Pull


class Block:
    """A block's place in the order of things; its value is its keeper's.

    Pushes of one rank are applied in the order in which it made them, however their parts come.
    """

    __slots__ = (
        "_arrived",
        "_gathering",
        "applied",
        "busy",
        "chunks",
        "key",
        "number",
        "pulls",
        "queue",
        "snapshot",
        "version",
    )

    def __init__(self, key: Key, number: int, chunks: range, ranks: int) -> None:
        self.key: Final = key
        self.number: Final = number
        """Of its first chunk."""
        self.chunks: Final = chunks
        self.version = 0
        """How many pushes are in the value."""
        self.applied: Final = [0] * ranks
        """The same by rank."""
        self.queue: Final[deque[tuple[int, Gathering]]] = deque()
        """Pushes with their ranks, to be applied."""
        self.pulls: list[WaitingPull] = []
        self.busy = False
        """The keeper has been asked for something."""
        self.snapshot: Buffer | None = None
        """The value, if somebody has asked for it since it last changed."""
        self._arrived = [0] * ranks
        self._gathering: dict[tuple[int, int], Gathering] = {}

    def take(self, rank: int, push: Push, payload: Buffer) -> bool:
        """Take a part of a push; return False if it was here before."""
        if push.number < self._arrived[rank]:
            return False
        owner = (rank, push.number)
        gathering = self._gathering.get(owner)
        if gathering is None:
            gathering = self._gathering[owner] = Gathering(push, self.chunks)
        if not gathering.add(push.chunk, payload, self.key, self.chunks):
            return False
        while (following := self._gathering.get((rank, self._arrived[rank]))) and following.complete:
            del self._gathering[rank, self._arrived[rank]]
            self._arrived[rank] += 1
            self.queue.append((rank, following))
        return True

    def others(self, rank: int) -> int:
        """Return how many updates by other ranks are in the value."""
        return self.version - self.applied[rank]
