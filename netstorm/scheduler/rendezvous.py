"""Rendezvous: nodes come in any order, and each gets a rank once all have joined. Decides who is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from netstorm.addresses import is_loopback
from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import Join, Member
from netstorm.scheduler.membership.join_checks import join_problem
from netstorm.scheduler.membership.member_texts import format_address, list_some
from netstorm.scheduler.membership.refusal import Refusal
from netstorm.scheduler.observe.snapshot import NodeSnapshot
from netstorm.scheduler.options import SchedulerOptions
from netstorm.settings import declarations

__all__ = ["Applicant", "Rendezvous"]

_BEATS_MISSED: Final = 3
"""A waiting node that has missed this many heartbeats in a row has probably died."""

_PROOF_BEATS: Final = 2
"""A waiting node is alive if it is still heard this many heartbeat intervals after another node asked for its
place. One heartbeat is not enough: it may have been on its way before."""


@dataclass(slots=True, kw_only=True)
class Applicant:
    """A process that has asked to join."""

    peer: Peer
    incarnation: int
    join: Join
    heard_at: float
    beats: bool = False
    """Has sent a heartbeat since it asked to join."""
    came_at: float = -math.inf
    """When it first asked."""
    user: str = ""
    """Text of its key; empty: the job has none."""

    def __str__(self) -> str:
        return format_address(self.join.host, self.join.port, self.join.site)

    def member(self, rank: int) -> Member:
        """Return the member that it is with a rank."""
        return Member(rank, self.join.host, self.join.port, self.join.site, self.incarnation, self.user)


class Rendezvous:
    """The nodes that wait for the others."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._options: Final = options
        self._needed = options.begin_with or options.num_workers
        self._accepted: dict[Peer, Applicant] = {}
        """In order of arrival."""
        self._claimants: dict[Peer, Applicant] = {}
        """Nodes that ask for the place of an accepted one that may have died: a node that is started again
        comes before its death is certain.
        """

    def __iter__(self) -> Iterator[Applicant]:
        return itertools.chain(self._accepted.values(), self._claimants.values())

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._accepted or peer in self._claimants

    def is_accepted(self, peer: Peer) -> bool:
        """Return whether a node has a place, and does not only claim another one's."""
        return peer in self._accepted

    @property
    def reproducible(self) -> bool:
        """Whether the scheduler or a node asks for results that are the same in each run."""
        return self._options.reproducible or any(_asks(applicant) for applicant in self._accepted.values())

    def complete(self) -> bool:
        """Return whether all nodes have joined, and no place is claimed by two."""
        return len(self._accepted) == self._needed and not self._claimants

    def add(self, newcomer: Applicant, now: float) -> list[Refusal]:
        """Add a node. Returns who is refused: the newcomer, or nodes whose place it takes."""
        if newcomer.peer in self._accepted:  # asked again over a new session; it keeps its place in the order
            self._accepted[newcomer.peer] = newcomer
            return []
        newcomer.came_at = now
        problem = (
            join_problem(newcomer.join, self._options)
            or self._framework_problem(newcomer)
            or self._loopback_problem(newcomer)
            or self._reproducible_problem(newcomer)
        )
        return self._place(newcomer, now) if problem is None else [Refusal(newcomer.peer, problem)]

    def retry_claims(self, now: float) -> list[Refusal]:
        """Decide about nodes that claim another one's place, as far as possible. Returns who is refused."""
        claimants, self._claimants = self._claimants, {}
        return [refusal for claimant in claimants.values() for refusal in self._place(claimant, now)]

    def _place(self, newcomer: Applicant, now: float) -> list[Refusal]:
        replaced = []
        for other in list(self._accepted.values()):
            conflict = self._conflict(newcomer, other, now)
            if isinstance(conflict, str):
                if other.heard_at - newcomer.came_at >= _PROOF_BEATS * self._options.heartbeat_interval_s:
                    return [Refusal(newcomer.peer, conflict)]
                self._claimants[newcomer.peer] = newcomer
                return []
            if conflict is not None:
                replaced.append(conflict)
        for refusal in replaced:
            del self._accepted[refusal.peer]
        self._accepted[newcomer.peer] = newcomer
        return replaced

    def needed(self, most: int) -> None:
        """Begin with `most` nodes, if fewer were not enough before: the others will not come."""
        self._needed = min(self._needed, most)

    def asking_for(self, rank: int) -> Peer | None:
        """Return the node that has a rank's place; None: no node has asked for it."""
        asked = (applicant for applicant in self._accepted.values() if applicant.join.asked_rank == rank)
        return next((applicant.peer for applicant in asked), None)

    def remove(self, peer: Peer) -> Applicant | None:
        """Forget a node that left before the job began."""
        self._claimants.pop(peer, None)
        return self._accepted.pop(peer, None)

    def heard(self, peer: Peer, now: float) -> None:
        """Record a heartbeat of a waiting node."""
        applicant = self._accepted.get(peer) or self._claimants[peer]
        applicant.heard_at = now
        applicant.beats = True

    def silent(self, now: float, *, beats: int = 0) -> list[Applicant]:
        """Return the nodes that were not heard for the heartbeat timeout, even if they never sent one; with
        `beats`, those that will not have been so many heartbeats later.
        """
        limit = self._options.heartbeat_timeout_s - beats * self._options.heartbeat_interval_s
        return [applicant for applicant in self if now - applicant.heard_at >= limit]

    def waiting_text(self) -> str:
        """Return which nodes have joined and which have not, for a person."""
        total = self._needed
        here = list(self._accepted.values())
        text = f"waiting for {total - len(here)} of {total} nodes"
        if not here:
            return f"{text}; nobody is here yet"
        for claimant in self._claimants.values():
            text += f"; the node at {claimant} asks for the place of one that may have died"
        names = (f"{_rank_text(applicant.join.asked_rank)} ({applicant})" for applicant in here)
        text += "; here: " + list_some(names)
        asked = {applicant.join.asked_rank for applicant in here}
        if -1 not in asked:
            missing = (str(rank) for rank in range(total) if rank not in asked)
            text += "; not here: " + list_some(missing)
        return text

    def snapshots(self) -> tuple[NodeSnapshot, ...]:
        """Return what is known of each node that has joined, in order of arrival."""
        return tuple(
            NodeSnapshot(
                member=applicant.member(applicant.join.asked_rank),
                joined=False,
                heard_at=applicant.heard_at,
            )
            for applicant in self._accepted.values()
        )

    def assign_ranks(self) -> tuple[tuple[Peer, Member], ...]:
        """Return the members by rank: ranks that were asked for, then the lowest free ones as nodes came."""
        asked = {applicant.join.asked_rank for applicant in self._accepted.values()}
        free = iter(rank for rank in range(self._options.num_workers) if rank not in asked)
        found = []
        for applicant in self._accepted.values():
            rank = applicant.join.asked_rank if applicant.join.asked_rank >= 0 else next(free)
            found.append((applicant.peer, applicant.member(rank)))
        return tuple(sorted(found, key=lambda entry: entry[1].rank))

    def _framework_problem(self, newcomer: Applicant) -> str | None:
        """Return why a node's framework does not fit those that wait. A program without one fits all."""
        mine = newcomer.join.framework
        for other in self._accepted.values():
            if mine and other.join.framework and mine != other.join.framework:
                return (
                    f"the node at {newcomer} trains with {mine}, the node at {other} with "
                    f"{other.join.framework}: all nodes of a job must use the same framework"
                )
        return None

    def _loopback_problem(self, newcomer: Applicant) -> str | None:
        """Return why a node and one that waits cannot reach each other: loopback is another machine there."""
        for other in self._accepted.values():
            machines = {newcomer.join.machine, other.join.machine}
            hidden = newcomer if is_loopback(newcomer.join.host) else other
            if len(machines) == 1 or 0 in machines or not is_loopback(hidden.join.host):
                continue
            seeing = other if hidden is newcomer else newcomer
            return (
                f"the node at {hidden} (rank {_rank_text(hidden.join.asked_rank)}) can be reached on its own "
                f"machine alone, and the node at {seeing} (rank {_rank_text(seeing.join.asked_rank)}) is on "
                "another one: set DMLC_NODE_HOST at the former to an address of its host that the others "
                "reach, or DMLC_PS_ROOT_URI there to the scheduler's address in figures"
            )
        return None

    def _reproducible_problem(self, newcomer: Applicant) -> str | None:
        """Return why a node's NETSTORM_REPRODUCIBLE does not fit the job's; a node without it fits all."""
        mine = _asks(newcomer)
        if mine and self._options.elastic is not None:
            return (
                f"the node at {newcomer} has NETSTORM_REPRODUCIBLE=1, the scheduler NETSTORM_ELASTIC: "
                "expected one of them, since who is in a sum depends on when ranks leave and join"
            )
        for other in self._accepted.values():
            if None not in (mine, _asks(other)) and mine != _asks(other):
                return (
                    f"the node at {newcomer} has NETSTORM_REPRODUCIBLE={mine:d}, the node at {other} "
                    f"NETSTORM_REPRODUCIBLE={not mine:d}: this holds for the whole job"
                )
        return None

    def _conflict(self, newcomer: Applicant, other: Applicant, now: float) -> str | Refusal | None:
        """Return why `newcomer` cannot be in the job beside `other`, or that it takes `other`'s place."""
        beats_stopped = now - other.heard_at > _BEATS_MISSED * self._options.heartbeat_interval_s
        if (newcomer.join.host, newcomer.join.port) == (other.join.host, other.join.port):
            # Two processes cannot listen at one address: the first is dead, or an address is a mistake.
            if other.beats and not beats_stopped:
                return (
                    f"two nodes say that they are at {other}: give each an address of its own "
                    "(DMLC_NODE_HOST, NETSTORM_PORT, NETSTORM_ADVERTISED_PORT)"
                )
            return Refusal(other.peer, f"another process has come as the node at {other}")
        rank = newcomer.join.asked_rank
        if rank >= 0 and rank == other.join.asked_rank:
            if not beats_stopped:
                return (
                    f"the node at {newcomer} asks for rank {rank}, which the node at {other} has: "
                    "NETSTORM_RANK must differ from node to node, or be -1 for any"
                )
            return Refusal(other.peer, f"rank {rank} was given to the node at {newcomer}: yours fell silent")
        return None


def _asks(applicant: Applicant) -> bool | None:
    """Return whether a node asks for results that are the same in each run; None: it was not told."""
    given = applicant.join.must_agree.get(declarations()["reproducible"].variable)
    return None if given is None else given == str(True)


def _rank_text(asked: int) -> str:
    return str(asked) if asked >= 0 else "any"
