"""One block at its owner: pushes that wait to be applied, in order, and pulls that wait for them. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from netstorm.compression.rows import Numbers
from netstorm.kvstore.asynchronous.gradients import GradientAssembly
from netstorm.kvstore.values.key import Key
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import Pull, PullRows, PullStates, Push

__all__ = ["Block", "WaitingPull"]


@dataclass(frozen=True, slots=True, eq=False)
class WaitingPull:
    """A pull that a block has not answered."""

    rank: int
    pull: Pull | PullRows | PullStates
    rows: Numbers | None = None
    """Of `chunk`, those that are wanted; None: everything."""
    chunk: int = 0


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
        self.queue: Final[deque[tuple[int, GradientAssembly]]] = deque()
        """Pushes with their ranks, to be applied."""
        self.pulls: list[WaitingPull] = []
        self.busy = False
        """The keeper has been asked for something."""
        self.snapshot: Buffer | None = None
        """The value, if somebody has asked for it since it last changed."""
        self._arrived = [0] * ranks
        self._gathering: dict[tuple[int, int], GradientAssembly] = {}

    def take(self, rank: int, push: Push, payload: Buffer | None) -> bool:
        """Take a part of a push; return False if it was here before."""
        if push.number < self._arrived[rank]:
            return False
        owner = (rank, push.number)
        gathering = self._gathering.get(owner)
        if gathering is None:
            gathering = self._gathering[owner] = GradientAssembly(push, self.key, self.chunks)
        if not gathering.add(push, payload):
            return False
        while (following := self._gathering.get((rank, self._arrived[rank]))) and following.complete:
            del self._gathering[rank, self._arrived[rank]]
            self._arrived[rank] += 1
            self.queue.append((rank, following))
        return True

    def others(self, rank: int) -> int:
        """Return how many updates by other ranks are in the value."""
        return self.version - self.applied[rank]
