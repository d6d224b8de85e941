"""Nodes that ask to join a job that has begun: which place each gets, and when. Pure.

A node that was started again comes before it is certain that its process before has died. So a node whose
place is taken waits until that is decided, by heartbeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from netstorm.protocol.frames import SCHEDULER, Peer
from netstorm.protocol.messages import Member
from netstorm.scheduler.membership.join_checks import join_problem
from netstorm.scheduler.membership.member_texts import list_some
from netstorm.scheduler.membership.members import Members
from netstorm.scheduler.membership.refusal import Refusal
from netstorm.scheduler.membership.rendezvous import Applicant
from netstorm.scheduler.options import SchedulerOptions

__all__ = ["Latecomers", "Place", "with_free_places"]


_BEATS_MISSED: Final = 3
"""A waiting node that has missed this many heartbeats in a row has probably died."""

_MOST_WAITS: Final = 3
"""Heartbeat time-outs that a node waits for its place: one for the death of the process that has it, one for
the death of another that asked for it before."""


@dataclass(frozen=True, slots=True)
class Place:
    """The rank that a node gets."""

    applicant: Applicant
    rank: int
    replaces: bool = False
    """The process that has the rank is gone: another one has its address."""


class Latecomers:
    """The nodes that wait for a place in one job."""

    def __init__(self, options: SchedulerOptions) -> None:
        """Begin without any."""
        self._options: Final = options
        self._waiting: dict[Peer, Applicant] = {}

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._waiting

    def add(self, applicant: Applicant, now: float) -> Refusal | None:
        """Add a node; return why it is refused, if it is."""
        problem = join_problem(applicant.join, self._options)
        if problem is not None:
            return Refusal(applicant.peer, problem)
        known = self._waiting.get(applicant.peer)
        applicant.came_at = now if known is None else known.came_at
        self._waiting[applicant.peer] = applicant
        return None

    def heard(self, peer: Peer, now: float) -> None:
        """Record a sign of life of a process that may be waiting."""
        applicant = self._waiting.get(peer)
        if applicant is not None:
            applicant.heard_at = now

    def remove(self, peer: Peer) -> None:
        """Forget a node that has gone."""
        self._waiting.pop(peer, None)

    def place(self, members: Members, now: float) -> Iterator[Place | Refusal]:
        """Yield the places of those that can have one now, and who has waited too long. Each is forgotten."""
        for peer, applicant in list(self._waiting.items()):
            silent = now - applicant.heard_at
            if silent > self._options.heartbeat_timeout_s:
                del self._waiting[peer]
            if silent > _BEATS_MISSED * self._options.heartbeat_interval_s:
                continue  # it may have died while it waited
            found = self._decide(applicant, members, now)
            if found is not None:
                del self._waiting[peer]
                yield found

    def _decide(self, applicant: Applicant, members: Members, now: float) -> Place | Refusal | None:
        join = applicant.join
        for rank in members.present:
            member = members.all[rank]
            if (member.host, member.port) == (join.host, join.port):  # no two processes can listen there
                asked = join.asked_rank if join.asked_rank >= 0 else rank
                return (
                    Place(applicant, rank, replaces=True) if asked == rank else self._free(applicant, members)
                )
        return self._free(applicant, members) or self._late(applicant, members, now)

    def _free(self, applicant: Applicant, members: Members) -> Place | None:
        asked, taken = applicant.join.asked_rank, set(members.present)
        if asked >= 0:
            return None if asked in taken else Place(applicant, asked)
        free = (rank for rank in range(len(members)) if rank not in taken)
        rank = next(free, None)
        return None if rank is None else Place(applicant, rank)

    def _late(self, applicant: Applicant, members: Members, now: float) -> Refusal | None:
        limit = _MOST_WAITS * self._options.heartbeat_timeout_s
        if now - applicant.came_at < limit:
            return None
        asked = applicant.join.asked_rank
        if asked >= 0:
            reason = (
                f"the node at {applicant} asks for rank {asked}, and {members.describe(asked)} is alive: "
                "NETSTORM_RANK must differ from node to node, or be -1 for any"
            )
        else:
            reason = (
                f"the node at {applicant} is one too many: NETSTORM_ELASTIC allows {len(members)} nodes, and "
                f"the job has {list_some(map(members.describe, members.present))}"
            )
        return Refusal(applicant.peer, reason)


def with_free_places(members: Iterable[tuple[Peer, Member]], places: int) -> list[tuple[Peer, Member]]:
    """Return the nodes of a job by rank, with a member without a port at each place that no node has."""
    by_rank = {member.rank: (peer, member) for peer, member in members}
    return [by_rank.get(rank, (SCHEDULER, Member(rank, "", 0, "", 0))) for rank in range(places)]
