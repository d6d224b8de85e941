"""The members of the job as one node sees them: which have finished, and which cannot be reached. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from netstorm.addresses import host_port
from netstorm.errors import NodeLost, UnevenRounds
from netstorm.kvstore.operations.allreduce import Operation
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Hello, Member
from netstorm.pslite.machine import Admission, Admit, NotYet, Refuse, refuse_other_key

__all__ = ["Roster"]

_TRUSTED_S: Final = 120.0
"""How long it holds that a rank is not busy: until its connection is broken, or something comes from it."""


class Roster:
    """All members of the job, by rank."""

    def __init__(
        self,
        rank: int,
        members: tuple[Member, ...],
        *,
        pads_with_zeros: bool = False,
        elastic: bool = False,
    ) -> None:
        self.elastic: Final = elastic
        """Nodes may leave the job and join it."""
        self.rank: Final = rank
        self.members = members
        """By rank. Those without a port are places that no node has."""
        self.first_members: Final = tuple(member for member in members if member.port)
        """Those that were here when this node joined. Nodes that have begun a job together have the same."""
        self.pads_with_zeros: Final = pads_with_zeros
        """Ranks that have finished contribute zeros to the keys that they know (NETSTORM_UNEVEN=join)."""
        self._finished: dict[int, dict[int, int]] = {}
        self._suspected: dict[int, tuple[float, str]] = {}
        self.running: Final[dict[int, float]] = {}
        """By rank that is not busy, as the scheduler says: when it said so."""
        self._late: set[int] = set()
        """Ranks that joined later: groups of some ranks go on without them."""
        self._gone: set[int] = set()
        """Incarnations of processes that have left the job."""

    def others(self) -> Iterable[Member]:
        """Return all members that are in the job, but this one."""
        return (member for member in self.members if member.rank != self.rank and member.port)

    def present(self) -> tuple[Member, ...]:
        """Return the members that are in the job."""
        return tuple(member for member in self.members if member.port)

    def change(self, present: Iterable[Member]) -> None:
        """Record who is in the job from now on."""
        here = {member.rank: member for member in present}
        known = {member.rank: member.incarnation for member in self.present()}
        self._late |= {rank for rank, member in here.items() if known.get(rank) != member.incarnation}
        self._gone |= {member.incarnation for member in self.members if member.rank not in here}
        self.members = tuple(
            here.get(member.rank, Member(member.rank, member.host, 0, member.site, 0))
            for member in self.members
        )
        for rank in range(len(self.members)):
            if rank not in here:
                self._finished.pop(rank, None)
                self._suspected.pop(rank, None)

    def describe(self, rank: int) -> str:
        """Return a rank as error messages name it: with its address and site."""
        member = self.members[rank]
        site = f", {member.site}" if member.site else ""
        return f"rank {rank} ({host_port(member.host, member.port)}{site})"

    def admit(self, hello: Hello, user: str = "") -> Admission:
        """Admit the members of this job, and no other process."""
        if hello.receiver != self.rank:
            return Refuse(f"this is rank {self.rank}, not rank {hello.receiver}")
        if not 0 <= hello.sender < len(self.members):
            return Refuse(f"no rank {hello.sender} in a job of {len(self.members)} nodes")
        if self.members[hello.sender].incarnation != hello.incarnation:
            if self.elastic and hello.incarnation not in self._gone:
                return NotYet()  # it has just joined, and the scheduler's message is on its way
            return Refuse(f"another process is rank {hello.sender} of this job")
        if self.members[hello.sender].user != user:
            return refuse_other_key(f"rank {hello.sender} of this job", user, self.present())
        return Admit(Peer(hello.sender))

    def record_finished(self, rank: int, last_rounds: dict[int, int]) -> None:
        """Record that a rank will push nothing beyond `last_rounds` (by key)."""
        self._finished[rank] = last_rounds

    def finished(self) -> dict[int, dict[int, int]]:
        """Return the last rounds of the ranks that have finished."""
        return dict(self._finished)

    def unfinished(self) -> list[int]:
        """Return the other ranks that have not finished."""
        return [member.rank for member in self.others() if member.rank not in self._finished]

    def uneven_error(self, operations: Iterable[Operation]) -> UnevenRounds | None:
        """Return the error if one of `operations` waits for a round that a finished rank never pushed."""
        if not self._finished:
            return None
        for operation in operations:
            members = operation.key.spec.members
            for rank, last_rounds in self._finished.items():
                if members and (rank not in members or rank in self._late):
                    continue
                if operation.call is not None:
                    if operation.round > last_rounds.get(operation.key.identity, -1):
                        return UnevenRounds(
                            f"rank {self.rank} waits for {operation}, but {self.describe(rank)} has finished "
                            "without it: every member of a group must make the same calls in the same order"
                        )
                    continue
                if self.pads_with_zeros and operation.key.identity in last_rounds:
                    continue
                last = last_rounds.get(operation.key.identity, -1)
                if operation.round > last:
                    end = f"after round {last}" if last >= 0 else "without ever using that key"
                    rule = (
                        "a key must be initialised before any rank ends"
                        if self.pads_with_zeros
                        else "every rank must push every key equally often (the same number of batches); "
                        "NETSTORM_UNEVEN=join lets ranks that have finished contribute zeros"
                    )
                    return UnevenRounds(
                        f"rank {self.rank} waits for {operation}, but {self.describe(rank)} has finished "
                        f"{end}: {rule}"
                    )
        return None

    def suspect(self, rank: int, reason: str, now: float) -> None:
        """Record that a rank cannot be reached from here; the scheduler decides whether it is lost."""
        self._suspected.setdefault(rank, (now, reason))

    def may_be_busy(self, rank: int, now: float) -> bool:
        """Return whether a rank that does not answer may be busy, and its connection is not to blame."""
        return now - self.running.get(rank, -math.inf) > _TRUSTED_S

    def restart_suspicions(self, now: float) -> None:
        """Give the scheduler the full time again to decide about suspected ranks."""
        self._suspected = {rank: (now, reason) for rank, (_, reason) in self._suspected.items()}

    def clear_suspicion(self, rank: int) -> bool:
        """Clear a suspicion: the scheduler has decided about it, or the rank can be reached again. Return
        whether the rank was suspected.
        """
        return self._suspected.pop(rank, None) is not None

    def undecided_error(self, now: float, limit_s: float) -> NodeLost | None:
        """Return the error if the scheduler has not decided about a suspected rank in time."""
        for rank, (since, reason) in self._suspected.items():
            if now - since > limit_s:
                return NodeLost(f"{self.describe(rank)} cannot be reached from rank {self.rank}: {reason}")
        return None
