"""Who is in the job: rendezvous, refusals, ranks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Join, Member
from netstorm.scheduler.observe.snapshot import NodeSnapshot
from netstorm.scheduler.options import SchedulerOptions

__all__ = ["Applicant", "Rendezvous", "TurnedAway", "describe", "list_some", "place"]

_LISTED: Final = 32
"""Most nodes that one line for a person names."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.:%-]{1,255}", re.ASCII)
_SITE: Final = re.compile(r"[^\s,;/]{0,64}")
_LAST_PORT: Final = 65_535
_SHOWN: Final = 100

_BEATS_MISSED: Final = 3
"""A waiting node that has missed this many heartbeats in a row has probably died."""

_PROOF_BEATS: Final = 2
"""Heartbeats after somebody else has asked for its place that prove a node alive: one may have been on its
way before.
"""


def place(host: str, port: int, site: str) -> str:
    """Return "host:port, site" for a person."""
    return f"{host}:{port}, {site}" if site else f"{host}:{port}"


def describe(member: Member) -> str:
    """Return "rank 2 (10.0.0.7:4242, denver)"."""
    return f"rank {member.rank} ({place(member.host, member.port, member.site)})"


def list_some(names: Iterable[str]) -> str:
    """Join names with commas; of very many, only the first."""
    every = list(names)
    more = f" and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return ", ".join(every[:_LISTED]) + more


@dataclass(slots=True, kw_only=True)
class Applicant:
    """A process that has asked to join and waits for the others."""

    peer: Peer
    incarnation: int
    join: Join
    heard_at: float
    beats: bool = False
    """Has sent a heartbeat since it asked to join."""
    came_at: float = -math.inf
    """When it first asked."""

    def __str__(self) -> str:
        return place(self.join.host, self.join.port, self.join.site)


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """A process that will not be in the job, and why; the reason is for a person."""

    peer: Peer
    reason: str


class Rendezvous:
    """Nodes come in any order; when all are here, each gets a rank."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._options: Final = options
        self._here: dict[Peer, Applicant] = {}
        """In order of arrival."""
        self._doubtful: dict[Peer, Applicant] = {}
        """Those that want the place of one that is here and may have died: whoever is started again comes
        before that is certain.
        """

    def __iter__(self) -> Iterator[Applicant]:
        return itertools.chain(self._here.values(), self._doubtful.values())

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._here or peer in self._doubtful

    def has_place(self, peer: Peer) -> bool:
        """Return whether nobody else claims what a node asks for."""
        return peer in self._here

    def complete(self) -> bool:
        """Return whether all nodes are here, and none is in doubt."""
        return len(self._here) == self._options.num_workers and not self._doubtful

    def come(self, newcomer: Applicant, now: float) -> list[TurnedAway]:
        """Take in a node. Returns who is turned away: the newcomer, or processes whose place it takes."""
        if newcomer.peer in self._here:  # asked again over a new session; it keeps its place in the order
            self._here[newcomer.peer] = newcomer
            return []
        newcomer.came_at = now
        reason = self._objection(newcomer.join, str(newcomer))
        return self._take_in(newcomer, now) if reason is None else [TurnedAway(newcomer.peer, reason)]

    def decide(self, now: float) -> list[TurnedAway]:
        """Let those in whose places have become free. Returns who is turned away."""
        doubtful, self._doubtful = self._doubtful, {}
        return [gone for one in doubtful.values() for gone in self._take_in(one, now)]

    def _take_in(self, newcomer: Applicant, now: float) -> list[TurnedAway]:
        replaced = []
        for other in list(self._here.values()):
            conflict = self._conflict(newcomer, other, now)
            if isinstance(conflict, str):
                if other.heard_at - newcomer.came_at >= _PROOF_BEATS * self._options.heartbeat_interval_s:
                    return [TurnedAway(newcomer.peer, conflict)]
                self._doubtful[newcomer.peer] = newcomer
                return []
            if conflict is not None:
                replaced.append(conflict)
        for turned_away in replaced:
            del self._here[turned_away.peer]
        self._here[newcomer.peer] = newcomer
        return replaced

    def leave(self, peer: Peer) -> Applicant | None:
        """Forget a node that went away before the job began."""
        self._doubtful.pop(peer, None)
        return self._here.pop(peer, None)

    def heard(self, peer: Peer, now: float) -> None:
        """Note a heartbeat of a waiting node."""
        one = self._here.get(peer) or self._doubtful[peer]
        one.heard_at = now
        one.beats = True

    def silent(self, now: float) -> list[Applicant]:
        """Return the nodes that were not heard for the time-out, even if they never beat."""
        limit = self._options.heartbeat_timeout_s
        return [one for one in self if now - one.heard_at >= limit]

    def waiting_text(self) -> str:
        """Say who is here and who is not."""
        total = self._options.num_workers
        here = list(self._here.values())
        text = f"waiting for {total - len(here)} of {total} nodes"
        if not here:
            return f"{text}; nobody is here yet"
        for one in self._doubtful.values():
            text += f"; the node at {one} asks for the place of one that may have died"
        text += "; here: " + list_some(f"{_rank_text(one.join.asked_rank)} ({one})" for one in here)
        asked = {one.join.asked_rank for one in here}
        if -1 not in asked:
            missing = (str(rank) for rank in range(total) if rank not in asked)
            text += "; not here: " + list_some(missing)
        return text

    def snapshots(self) -> tuple[NodeSnapshot, ...]:
        """Return what is known of each node that is here, in order of arrival."""
        found = []
        for one in self._here.values():
            join = one.join
            member = Member(join.asked_rank, join.host, join.port, join.site, one.incarnation)
            found.append(NodeSnapshot(member=member, joined=False, heard_at=one.heard_at))
        return tuple(found)

    def seats(self) -> tuple[tuple[Peer, Member], ...]:
        """Return who is who, by rank: asked ranks first, then the lowest free ones in order of arrival."""
        asked = {one.join.asked_rank for one in self._here.values()}
        free = iter(rank for rank in range(self._options.num_workers) if rank not in asked)
        found = []
        for one in self._here.values():
            rank = one.join.asked_rank if one.join.asked_rank >= 0 else next(free)
            join = one.join
            member = Member(rank, join.host, join.port, join.site, one.incarnation)
            found.append((one.peer, member))
        return tuple(sorted(found, key=lambda entry: entry[1].rank))

    # ---------------------------------------------------------------------------------------- who is refused

    def _objection(self, join: Join, name: str) -> str | None:
        """Return why a node cannot be in this job, whoever else is."""
        options = self._options
        if not (_NAME.fullmatch(join.host) and 1 <= join.port <= _LAST_PORT and _SITE.fullmatch(join.site)):
            return (
                f"a node says that it can be reached at host {join.host[:_SHOWN]!r}, port {join.port}, site "
                f"{join.site[:_SHOWN]!r}: nobody can use that; look at its DMLC_NODE_HOST, "
                "NETSTORM_ADVERTISED_PORT and NETSTORM_SITE"
            )
        if join.release != options.release:
            return (
                f"the node at {name} runs NetStorm {join.release or '(unknown)'}, the scheduler "
                f"{options.release or '(unknown)'}: install the same release everywhere"
            )
        if join.num_workers != options.num_workers:
            return (
                f"the node at {name} was started with DMLC_NUM_WORKER={join.num_workers}, "
                f"{options.told_by} with DMLC_NUM_WORKER={options.num_workers}: give both the same number "
                "of nodes"
            )
        if not -1 <= join.asked_rank < options.num_workers:
            return (
                f"the node at {name} asks for rank {join.asked_rank} (NETSTORM_RANK) in a job of "
                f"{options.num_workers} nodes (the scheduler's DMLC_NUM_WORKER): ranks are 0 to "
                f"{options.num_workers - 1}, or -1 for any"
            )
        differing = [
            f"{variable}={said} at the node at {name}, {options.job_wide[variable]} at {options.told_by}"
            for variable, said in sorted(join.must_agree.items())
            if options.job_wide.get(variable, said) != said
        ]
        if differing:
            return (
                "; ".join(differing)
                + ": this holds for the whole job; set it at the scheduler, and at nodes "
                "to the same or not at all"
            )
        return None

    def _conflict(self, newcomer: Applicant, other: Applicant, now: float) -> str | TurnedAway | None:
        """Return why `newcomer` cannot be here beside `other`, or that it takes `other`'s place."""
        beats_stopped = now - other.heard_at > _BEATS_MISSED * self._options.heartbeat_interval_s
        if (newcomer.join.host, newcomer.join.port) == (other.join.host, other.join.port):
            # Two processes cannot listen at one address, so the first is dead; unless it is heard, and an
            # address is a mistake.
            if other.beats and not beats_stopped:
                return (
                    f"two nodes say that they are at {other}: give each an address of its own "
                    "(DMLC_NODE_HOST, NETSTORM_PORT, NETSTORM_ADVERTISED_PORT)"
                )
            return TurnedAway(other.peer, f"another process has come as the node at {other}")
        rank = newcomer.join.asked_rank
        if rank >= 0 and rank == other.join.asked_rank:
            if not beats_stopped:
                return (
                    f"the node at {newcomer} asks for rank {rank}, which the node at {other} has: "
                    "NETSTORM_RANK must differ from node to node, or be -1 for any"
                )
            return TurnedAway(
                other.peer, f"rank {rank} was given to the node at {newcomer}: yours fell silent"
            )
        return None


def _rank_text(asked: int) -> str:
    return str(asked) if asked >= 0 else "any"


def full(job: str, members: Sequence[Member], newcomer: str, rank: int = -1) -> str:
    """Return why nobody else can join a job that has begun; `rank`: the one asked for."""
    again = (
        f"; if it is rank {rank}, started again: nobody can take a rank's place in a job that has begun, so "
        "start all nodes and the scheduler again"
        if rank >= 0
        else ""
    )
    return (
        f"job {job!r} has all its {len(members)} nodes ({list_some(map(describe, members))}); the node at "
        f"{newcomer} is one too many: start as many nodes as the scheduler's DMLC_NUM_WORKER says{again}"
    )
