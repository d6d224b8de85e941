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
    """A pull that has not been answered for a block."""

    rank: int
    pull: Pull | PullRows | PullStates
    rows: Numbers | None = None
    """The rows of `chunk` to send; None: all of the block."""
    chunk: int = 0


class Block:
    """The queues of one block; its value is in the block store.

    Pushes of one rank are applied in the order in which the rank made them, in whatever order parts come.
    """

    __slots__ = (
        "_arrived",
        "_assembling",
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
        """That of its first chunk."""
        self.chunks: Final = chunks
        self.version = 0
        """How many pushes are in the value."""
        self.applied: Final = [0] * ranks
        """The same by rank."""
        self.queue: Final[deque[tuple[int, GradientAssembly]]] = deque()
        """Complete pushes to be applied, with their ranks."""
        self.pulls: list[WaitingPull] = []
        self.busy = False
        """The store has been asked for something."""
        self.snapshot: Buffer | None = None
        """A copy of the value, if it was read since it last changed."""
        self._arrived = [0] * ranks
        self._assembling: dict[tuple[int, int], GradientAssembly] = {}

    def add_part(self, rank: int, push: Push, payload: Buffer | None) -> bool:
        """Add a part of a push; return False if it was here before."""
        if push.number < self._arrived[rank]:
            return False
        owner = (rank, push.number)
        assembly = self._assembling.get(owner)
        if assembly is None:
            assembly = self._assembling[owner] = GradientAssembly(push, self.key, self.chunks)
        if not assembly.add(push, payload):
            return False
        while (following := self._assembling.get((rank, self._arrived[rank]))) and following.complete:
            del self._assembling[rank, self._arrived[rank]]
            self._arrived[rank] += 1
            self.queue.append((rank, following))
        return True

    def others(self, rank: int) -> int:
        """Return how many updates by other ranks are in the value."""
        return self.version - self.applied[rank]
