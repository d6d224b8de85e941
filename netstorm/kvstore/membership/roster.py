"""The nodes of the job as one of them sees them: who they are, who has finished, who cannot be reached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from netstorm.errors import NodeLost, UnevenRounds
from netstorm.kvstore.operations.allreduce import Operation
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Hello, Member
from netstorm.pslite.machine import Admission, Admit, Refuse

__all__ = ["Roster"]


class Roster:
    """All members of the job, by rank."""

    def __init__(self, rank: int, members: tuple[Member, ...], *, joins: bool = False) -> None:
        self.rank: Final = rank
        self.members: Final = members
        self.joins: Final = joins
        """Ranks that have finished contribute zeros to the keys that they know (NETSTORM_UNEVEN=join)."""
        self._finished: dict[int, dict[int, int]] = {}
        self._suspected: dict[int, tuple[float, str]] = {}

    def others(self) -> Iterable[Member]:
        """Return all members but this one."""
        return (member for member in self.members if member.rank != self.rank)

    def describe(self, rank: int) -> str:
        """Return a rank as error messages name it: with its address and site."""
        member = self.members[rank]
        site = f", {member.site}" if member.site else ""
        return f"rank {rank} ({member.host}:{member.port}{site})"

    def admit(self, hello: Hello) -> Admission:
        """Let in the members of this job, and nobody else."""
        if hello.receiver != self.rank:
            return Refuse(f"this is rank {self.rank}, not rank {hello.receiver}")
        if not 0 <= hello.sender < len(self.members):
            return Refuse(f"no rank {hello.sender} in a job of {len(self.members)} nodes")
        if self.members[hello.sender].incarnation != hello.incarnation:
            return Refuse(f"another process is rank {hello.sender} of this job")
        return Admit(Peer(hello.sender))

    def finished(self, rank: int, last_rounds: dict[int, int]) -> None:
        """Note that a rank will push nothing beyond `last_rounds` (by key)."""
        self._finished[rank] = last_rounds

    def unfinished(self) -> list[int]:
        """Return the other ranks that have not finished."""
        return [member.rank for member in self.others() if member.rank not in self._finished]

    def uneven(self, operations: Iterable[Operation]) -> UnevenRounds | None:
        """Return the error if one of `operations` waits for a round that a finished rank never pushed."""
        if not self._finished:
            return None
        for operation in operations:
            for rank, last_rounds in self._finished.items():
                if self.joins and operation.key.identity in last_rounds:
                    continue
                last = last_rounds.get(operation.key.identity, -1)
                if operation.round > last:
                    end = f"after round {last}" if last >= 0 else "without ever using that key"
                    rule = (
                        "a key must be initialised before any rank ends"
                        if self.joins
                        else "every rank must push every key equally often (the same number of batches); "
                        "NETSTORM_UNEVEN=join lets ranks that have finished contribute zeros"
                    )
                    return UnevenRounds(
                        f"rank {self.rank} waits for {operation}, but {self.describe(rank)} has finished "
                        f"{end}: {rule}"
                    )
        return None

    def suspect(self, rank: int, reason: str, now: float) -> None:
        """Note that a rank cannot be reached from here; the scheduler decides whether it is lost."""
        self._suspected.setdefault(rank, (now, reason))

    def ask_again(self, now: float) -> tuple[int, ...]:
        """Return who is suspected; the time in which the scheduler should decide begins now."""
        self._suspected = {rank: (now, reason) for rank, (_, reason) in self._suspected.items()}
        return tuple(self._suspected)

    def decided(self, rank: int) -> bool:
        """Note that the scheduler has said what is to be done about a suspect, or that it can be reached;
        return whether that is news.
        """
        return self._suspected.pop(rank, None) is not None

    def undecided(self, now: float, limit_s: float) -> NodeLost | None:
        """Return the error if the scheduler has said nothing about a suspect for too long."""
        for rank, (since, reason) in self._suspected.items():
            if now - since > limit_s:
                return NodeLost(f"{self.describe(rank)} cannot be reached from rank {self.rank}: {reason}")
        return None
