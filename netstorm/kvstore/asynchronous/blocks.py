"""One block at its owner: pushes that wait to be applied, in order, and pulls that wait for them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.compression.rows import Numbers
from netstorm.kvstore.asynchronous.copies import BlockState
from netstorm.kvstore.asynchronous.early_messages import EarlyMessage
from netstorm.kvstore.asynchronous.gradients import GradientAssembly
from netstorm.kvstore.values.key import Key
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import Applied, Pull, PullRows, PullStates, Push
from netstorm.pslite.waiting_bytes import Charge

__all__ = ["Block", "WaitingPull"]

_LEFT: Final = -2
"""Stands for a rank whose process has left while its push was being applied."""


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
    In an elastic job a push is confirmed, and a value sent, once the block's replica has the state.
    """

    __slots__ = (
        "_arrived",
        "_assembling",
        "ahead",
        "applied",
        "begins",
        "being_applied",
        "busy",
        "chunks",
        "early",
        "installed",
        "key",
        "number",
        "pulls",
        "queue",
        "serving",
        "shipped",
        "shown",
        "snapshot",
        "unconfirmed",
        "version",
        "wanted_by",
    )

    def __init__(self, key: Key, number: int, chunks: range, ranks: int) -> None:
        self.key: Final = key
        self.number: Final = number
        """That of its first chunk."""
        self.chunks: Final = chunks
        self.version = 0
        """How many pushes are in the value."""
        self.applied: Final = [0] * ranks
        """The same by rank, of its present process."""
        self.begins: Final = [0] * ranks
        """By rank: what its pushes are counted from where staleness is bounded; -1: it has not pushed yet."""
        self.queue: Final[deque[tuple[int, GradientAssembly]]] = deque()
        """Complete pushes to be applied, with their ranks."""
        self.pulls: list[WaitingPull] = []
        self.busy = False
        """The store has been asked for something."""
        self.being_applied = -1
        """The rank whose push the store has been asked to apply."""
        self.snapshot: Buffer | None = None
        """A copy of the value that pulls may have."""
        self.serving = True
        """This rank answers for the block; otherwise it only keeps its state, or waits for it."""
        self.installed = True
        """The store holds it."""
        self.early: dict[tuple[int, int, int], EarlyMessage] = {}
        """Parts that have come before the state was here, by rank, push and chunk."""
        self.ahead: Final[dict[tuple[int, int], list[Charge]]] = {}
        """What pushes after the next one count, by rank and push."""
        self.shown: tuple[int, tuple[int, ...]] = (0, (0,) * ranks)
        """`version` and `applied` of the state that the replica has."""
        self.shipped: BlockState | None = None
        """What is on its way to the replica."""
        self.unconfirmed: Final[list[tuple[int, int, Applied]]] = []
        """Pushes that the replica does not have: the version that they are in, the rank, and the message."""
        self.wanted_by: Final[set[int]] = set()
        """Ranks that wait for the state: the block is theirs now."""
        self._arrived = [0] * ranks
        self._assembling: dict[tuple[int, int], GradientAssembly] = {}

    @property
    def place(self) -> tuple[int, int]:
        """The key's number, and the block's."""
        return self.key.identity, self.number

    @property
    def version_soon(self) -> int:
        """How many pushes are in the value once the store has done what it has been asked for.

        So much of it is announced at a change of owners. Another rank may have the same version without the
        push that is being applied; if it went on from that one, two values would have one version.
        """
        return self.version + (self.being_applied != -1)

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

    def arrived(self, rank: int) -> int:
        """Return how many pushes of a rank have come, without gaps."""
        return self._arrived[rank]

    def next_to_apply(self, rank: int) -> int:
        """Return the number of a rank's next push that the store has not been asked to apply."""
        return self.applied[rank] + (self.being_applied == rank)

    def others(self, rank: int) -> int:
        """Return how many updates by other ranks are in the value."""
        return self.version - self.applied[rank]

    def others_shown(self, rank: int) -> int:
        """Return the same of the value that pulls get."""
        version, applied = self.shown
        return version - applied[rank] if version else self.others(rank)

    def pushes_of(self, rank: int, applied: Sequence[int]) -> int | None:
        """Return how many pushes of a rank count where staleness is bounded, of those that are `applied`;
        None: its process has joined later, and has not pushed yet.
        """
        return None if self.begins[rank] < 0 else self.begins[rank] + applied[rank]

    def interrupt(self) -> None:
        """Drop what waits: those who have sent it send it again. What the store is doing goes on."""
        self.queue.clear()
        self.pulls.clear()
        self.early.clear()
        self.unconfirmed.clear()
        self.wanted_by.clear()
        self._assembling.clear()
        self.shipped = None
        self.snapshot = None
        self.shown = (0, (0,) * len(self.applied))
        for rank, applied in enumerate(self.applied):
            self._arrived[rank] = applied + (rank == self.being_applied)

    def forget(self, rank: int) -> None:
        """Record that a rank's process has left: another one counts from 0."""
        self.applied[rank] = self._arrived[rank] = 0
        self.begins[rank] = -1
        if self.being_applied == rank:
            self.being_applied = _LEFT

    def take(self, state: BlockState) -> None:
        """Go on from a state of another process."""
        self.version = state.version
        self.applied[:] = self._arrived[:] = state.applied
        self.begins[:] = state.begins

    def state(self, values: Buffer, states: bytes) -> BlockState:
        """Return the present state."""
        return BlockState(
            version=self.version,
            applied=list(self.applied),
            begins=list(self.begins),
            values=values,
            states=states,
        )
