"""A job before it begins: nodes come in any order, are refused, or wait until all are there. Pure."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.addresses import is_loopback
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import Join, Member, PeerGone
from netstorm.pslite.machine import Disconnect, Inquire, busy_text
from netstorm.scheduler.members import REMIND_EVERY_S, describe_member, format_address, list_some
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.replay_log import LoggedOutbox
from netstorm.scheduler.snapshot import NodeSnapshot
from netstorm.settings import declarations

__all__ = ["Applicant", "ProcessRegistry", "Refusal", "Startup", "job_full_reason", "join_problem", "refuse"]


_log = logging.getLogger(__name__)

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
        """Return what others are told of it once it has a rank."""
        return Member(rank, self.join.host, self.join.port, self.join.site, self.incarnation, self.user)


class Startup:
    """The nodes of a job that has not begun: decides who is refused, and tells the others for whom they wait.

    Attributes:
        forming_policy: all nodes have joined, and the first policy is being formed.
    """

    def __init__(
        self, options: SchedulerOptions, outbox: LoggedOutbox, counters: Counters, now: float
    ) -> None:
        self.forming_policy = False
        self._options: Final = options
        self._outbox: Final = outbox
        self._counters: Final = counters
        self._needed = options.begin_with or options.num_workers
        self._accepted: dict[Peer, Applicant] = {}
        """In order of arrival."""
        self._claimants: dict[Peer, Applicant] = {}
        """Nodes that ask for the place of an accepted one that may have died: a node that is started again
        comes before its death is certain.
        """
        self._disconnected: Final[set[Peer]] = set()
        self._since: Final = now
        self._remind_at = now + REMIND_EVERY_S

    # ------------------------------------------------------------------------------------------ who is here

    def complete(self) -> bool:
        """Return whether all nodes have joined, and no place is claimed by two."""
        return len(self._accepted) == self._needed and not self._claimants

    def peers(self) -> list[Peer]:
        """Return the processes that have asked to join and were not refused."""
        return [*self._accepted, *self._claimants]

    def asking_for(self, rank: int) -> Peer | None:
        """Return the process that has a rank's place; None: none has asked for it."""
        asked = (applicant for applicant in self._accepted.values() if applicant.join.asked_rank == rank)
        return next((applicant.peer for applicant in asked), None)

    @property
    def reproducible(self) -> bool:
        """Whether the scheduler or a node asks for results that are the same in each run."""
        return self._options.reproducible or any(_asks(applicant) for applicant in self._accepted.values())

    def assign_ranks(self) -> tuple[tuple[Peer, Member], ...]:
        """Return the members by rank: ranks that were asked for, then the lowest free ones as nodes came."""
        asked = {applicant.join.asked_rank for applicant in self._accepted.values()}
        free = iter(rank for rank in range(self._options.num_workers) if rank not in asked)
        members = []
        for applicant in self._accepted.values():
            rank = applicant.join.asked_rank if applicant.join.asked_rank >= 0 else next(free)
            members.append((applicant.peer, applicant.member(rank)))
        return tuple(sorted(members, key=lambda entry: entry[1].rank))

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

    def status_text(self) -> str:
        """Return what the nodes wait for, in one line."""
        if self.forming_policy and self.complete():
            nodes = self._options.begin_with or self._options.num_workers
            return f"all {nodes} nodes are here, and the first policy is being formed"
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

    # ------------------------------------------------------------------------------------------------ events

    def join(self, newcomer: Applicant, now: float) -> None:
        """Handle a process that asks to join."""
        peer = newcomer.peer
        if peer in self._accepted:  # asked again over a new session; it keeps its place in the order
            self._accepted[peer] = newcomer
        else:
            newcomer.came_at = now
            problem = (
                join_problem(newcomer.join, self._options)
                or self._framework_problem(newcomer)
                or self._loopback_problem(newcomer)
                or self._reproducible_problem(newcomer)
            )
            if problem is None:
                self._place(newcomer, now)
            else:
                self.refuse(peer, problem)
        if peer in self._accepted:
            _log.info("the node at %s is here", newcomer)
        elif peer in self._claimants:
            _log.info("the node at %s asks for the place of one that is here, and may have died", newcomer)

    def heard(self, peer: Peer, now: float) -> None:
        """Record a heartbeat of any process."""
        self._disconnected.discard(peer)
        applicant = self._applicant(peer)
        if applicant is not None:
            applicant.heard_at, applicant.beats = now, True

    def busy(self, peer: Peer, seconds: float, now: float, *, late: bool = False) -> None:
        """Record that a process is silent, but the kernel of its machine acknowledges (`late`: slowly): it
        keeps its place.
        """
        applicant = self._applicant(peer)
        if applicant is not None:
            _log.warning("%s", busy_text(f"the node at {applicant}", seconds, late=late))
            applicant.heard_at = now

    def connection_gone(self, peer: Peer, reason: str, *, refused: bool) -> bool:
        """Handle that a process's connection is gone, or that nobody listens at its address. Return whether
        it has ended.
        """
        applicant = self._applicant(peer)
        if refused:
            return peer in self._disconnected and applicant is not None
        self._disconnected.add(peer)
        if applicant is not None:
            self._inquire(applicant)
        return False

    def remove(self, peer: Peer, reason: str, *, quietly: bool = False) -> None:
        """End a process's session, and free its place."""
        self._disconnected.discard(peer)
        self._claimants.pop(peer, None)
        removed = self._accepted.pop(peer, None)
        if removed is not None and not quietly:
            _log.warning("the node at %s has gone before all were here: %s", removed, reason)
        self._outbox.add(Disconnect(peer=peer))

    def begin_with(self, most: int) -> None:
        """Wait for `most` nodes at most: the others will not come."""
        self._needed = min(self._needed, most)

    def check(self, now: float) -> None:
        """Remove nodes that have fallen silent, and give free places to nodes that asked for them."""
        timeout_s = self._options.heartbeat_timeout_s
        applicants = [*self._accepted.values(), *self._claimants.values()]
        for applicant in applicants:
            if now - applicant.heard_at >= timeout_s - self._options.heartbeat_interval_s:
                self._inquire(applicant)
        for applicant in applicants:  # even if it never sent a heartbeat
            if now - applicant.heard_at >= timeout_s:
                self.remove(applicant.peer, f"no heartbeat for {timeout_s:g} s")
        claimants, self._claimants = self._claimants, {}
        for claimant in claimants.values():
            self._place(claimant, now)

    def remind(self, now: float) -> m.PeerGone | None:
        """Tell waiting nodes for whom they wait. Returns why they should not wait any more, if so."""
        text, limit = self.status_text(), self._options.join_timeout_s
        if now - self._since >= limit:
            reason = f"not every node came within {limit:g} s (NETSTORM_JOIN_TIMEOUT): {text}"
            return m.PeerGone(rank=-1, kind="timeout", reason=reason)
        if now >= self._remind_at:
            self._remind_at = now + REMIND_EVERY_S
            _log.info("%s", text)
            self._outbox.send(self.peers(), m.Waiting(text=text))
        return None

    def refuse(self, peer: Peer, reason: str) -> None:
        """Tell a process why it cannot be in the job, and end its session."""
        refuse(Refusal(peer, reason), self._outbox, self._counters)

    # --------------------------------------------------------------------------------------- who gets a place

    def _applicant(self, peer: Peer) -> Applicant | None:
        return self._accepted.get(peer) or self._claimants.get(peer)

    def _inquire(self, applicant: Applicant) -> None:
        join = applicant.join
        self._outbox.add(Inquire(peer=applicant.peer, host=join.host, port=join.port))

    def _place(self, newcomer: Applicant, now: float) -> None:
        """Give a node its place, and refuse those whose place it takes; or let it wait until it is certain
        whether the one that has the place has died, or refuse it.
        """
        replaced = []
        for other in list(self._accepted.values()):
            conflict = self._conflict(newcomer, other, now)
            if isinstance(conflict, str):
                if other.heard_at - newcomer.came_at >= _PROOF_BEATS * self._options.heartbeat_interval_s:
                    self.refuse(newcomer.peer, conflict)
                else:
                    self._claimants[newcomer.peer] = newcomer
                return
            if conflict is not None:
                replaced.append(conflict)
        for refusal in replaced:
            del self._accepted[refusal.peer]
        self._accepted[newcomer.peer] = newcomer
        for refusal in replaced:
            self.refuse(refusal.peer, refusal.reason)

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


# Checks of a request to join: whether a node can be in this job, whichever other nodes there are.

_NAME: Final = re.compile(r"[A-Za-z0-9_.:%-]{1,255}", re.ASCII)
_SITE: Final = re.compile(r"[^\s,;/]{0,64}")
_LAST_PORT: Final = 65_535
_SHOWN: Final = 100


def join_problem(join: Join, options: SchedulerOptions) -> str | None:
    """Return why a node cannot be in a job with these options; None if it can."""
    if not (_NAME.fullmatch(join.host) and 1 <= join.port <= _LAST_PORT and _SITE.fullmatch(join.site)):
        return (
            f"a node says that it can be reached at host {join.host[:_SHOWN]!r}, port {join.port}, site "
            f"{join.site[:_SHOWN]!r}: no node can use that; check its DMLC_NODE_HOST, "
            "NETSTORM_ADVERTISED_PORT and NETSTORM_SITE"
        )
    name = format_address(join.host, join.port, join.site)
    if join.release != options.release:
        return (
            f"the node at {name} runs NetStorm {join.release or '(unknown)'}, the scheduler "
            f"{options.release or '(unknown)'}: install the same release everywhere"
        )
    nodes = options.begin_with or options.num_workers
    if join.num_workers != nodes:
        return (
            f"the node at {name} was started with DMLC_NUM_WORKER={join.num_workers}, "
            f"{options.settings_from} with DMLC_NUM_WORKER={nodes}: give both the same number "
            "of nodes"
        )
    if not -1 <= join.asked_rank < options.num_workers:
        return (
            f"the node at {name} asks for rank {join.asked_rank} (NETSTORM_RANK) in a job of "
            f"{options.num_workers} nodes (the scheduler's "
            f"{'NETSTORM_ELASTIC' if options.elastic else 'DMLC_NUM_WORKER'}): ranks are 0 to "
            f"{options.num_workers - 1}, or -1 for any"
        )
    differing = [
        f"{variable}={value} at the node at {name}, {options.job_wide[variable]} at {options.settings_from}"
        for variable, value in sorted(join.must_agree.items())
        if options.job_wide.get(variable, value) != value
    ]
    if differing:
        return (
            "; ".join(differing) + ": this holds for the whole job; set it at the scheduler, and at nodes "
            "to the same or not at all"
        )
    return None


# Refusing a process: who is refused, for which reason, and how it is told.


@dataclass(frozen=True, slots=True)
class Refusal:
    """A process that cannot be in the job, and why; the reason is for a person."""

    peer: Peer
    reason: str


def refuse(refusal: Refusal, outbox: LoggedOutbox, counters: Counters) -> None:
    """Tell a process why it cannot be in the job, log and count that, and end the session."""
    _log.warning("refused: %s", refusal.reason)
    counters.add("refused")
    outbox.send([refusal.peer], PeerGone(rank=-1, kind="refused", reason=refusal.reason))
    outbox.add(Disconnect(peer=refusal.peer))


def job_full_reason(job: str, members: Sequence[Member], newcomer: str, rank: int = -1) -> str:
    """Return why no other node can join a job that has begun; `rank`: the one that it asks for."""
    again = (
        f"; if it is rank {rank}, started again: nobody can take a rank's place in a job that has begun, so "
        "start all nodes and the scheduler again"
        if rank >= 0
        else ""
    )
    return (
        f"job {job!r} has all its {len(members)} nodes ({list_some(map(describe_member, members))}); the "
        f"node at {newcomer} is one too many: start as many nodes as the scheduler's DMLC_NUM_WORKER says"
        f"{again}"
    )


# The numbers of processes: by incarnation, in the order in which they first connect.

_REMEMBERED: Final = 10_000
"""Processes without a rank. A number outlives its process, or a message that is still under way to that
process would reach another one. Only a flood of unknown processes makes the oldest be forgotten."""


@dataclass(frozen=True, slots=True)
class _JoiningProcess:
    incarnation: int
    job: str
    user: str


class ProcessRegistry:
    """Gives every process a number; the same process always gets the same one."""

    def __init__(self) -> None:
        self._numbers: dict[int, Peer] = {}
        """By incarnation, of all processes that are remembered."""
        self._processes: dict[Peer, _JoiningProcess] = {}
        """In order of arrival."""
        self._pinned: set[Peer] = set()
        self._arrived = 0

    def find(self, incarnation: int) -> Peer | None:
        """Return the number of a process; None if it is not known."""
        return self._numbers.get(incarnation)

    def register(self, incarnation: int, job: str, user: str = "") -> Peer:
        """Return the number of a process. A new one gets it now, and belongs to the `job` that it names, and
        to the `user` whose key it has (empty: the job has no key).
        """
        known = self._numbers.get(incarnation)
        if known is not None:
            return known
        peer = Peer(self._arrived)
        self._arrived += 1
        self._numbers[incarnation] = peer
        self._processes[peer] = _JoiningProcess(incarnation, job, user)
        if len(self._processes) > _REMEMBERED + len(self._pinned):
            oldest = next(other for other in self._processes if other not in self._pinned)
            del self._numbers[self._processes.pop(oldest).incarnation]
        return peer

    def is_taken(self, incarnation: int, user: str) -> bool:
        """Return whether the process of that number has another key."""
        peer = self._numbers.get(incarnation)
        return peer is not None and self._processes[peer].user != user

    def pin(self, peer: Peer) -> None:
        """Never forget a process: it has a rank."""
        self._pinned.add(peer)

    def unpin(self, peer: Peer) -> None:
        """Allow a process to be forgotten: its job has ended."""
        self._pinned.discard(peer)

    def job_of(self, peer: Peer) -> str:
        """Return the job that a process belongs to, as it says."""
        return self._processes[peer].job

    def user_of(self, peer: Peer) -> str:
        """Return the text of the key that a process came with; empty: the job has none."""
        return self._processes[peer].user

    def incarnation_of(self, peer: Peer) -> int:
        """Return the random number by which a process is known."""
        return self._processes[peer].incarnation
