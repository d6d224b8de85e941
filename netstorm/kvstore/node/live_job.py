"""Who is in a job now, if nodes may leave and join it, and which scheduler it follows. Pure.

A program reads this between two steps, in its own thread. Each property reads one attribute that the I/O
thread replaces as a whole, so it needs no lock.
"""

from __future__ import annotations

from typing import Final

from netstorm.kvstore.node.lifecycle import Lifecycle
from netstorm.protocol.messages import Member

__all__ = ["LiveJob"]


class LiveJob:
    """The present members of one node's job, as this node has last heard."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._life: Final = lifecycle

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may leave the job and join it."""
        return self._life.roster.elastic

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are in the job, with those that do not have its state yet."""
        joined = self._life.joined
        members = () if joined is None else joined.state.policy.members
        return members or tuple(member.rank for member in self._life.roster.present())

    @property
    def first_members(self) -> tuple[Member, ...]:
        """The nodes that were in the job when this one joined; the same at all that have begun it."""
        return self._life.roster.first_members

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks whose values are in the sums of rounds that begin now."""
        joined = self._life.joined
        silent = () if joined is None else joined.state.policy.silent
        return tuple(rank for rank in self.ranks if rank not in silent)

    @property
    def training(self) -> tuple[int, ...]:
        """Those of them whose programs have not ended."""
        finished = self._life.roster.finished()
        return tuple(rank for rank in self.contributors if rank not in finished)

    @property
    def scheduler(self) -> tuple[str, int] | None:
        """Host and port of the scheduler that this node follows; None: it has not joined yet."""
        return self._life.scheduler.followed

    @property
    def has_newcomers(self) -> bool:
        """Whether a rank waits for an offer of this rank's state."""
        return bool(self.state_requests)

    @property
    def state_requests(self) -> frozenset[int]:
        """Numbers of the requests for this rank's state that were not answered yet. A state that is made now
        answers them, and none that come later (`Snapshot.requests`).
        """
        joined = self._life.joined
        return frozenset() if joined is None else joined.state.providing.requests

    def waiting_text(self) -> str:
        """Return what a fetch of the state waits for, for a person; on the I/O thread."""
        joined = self._life.joined
        return "" if joined is None else joined.state.waiting_text()
