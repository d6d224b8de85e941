"""A job before it begins: nodes come in any order, are refused, or wait until all are there. Pure."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.addresses import is_loopback
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import Join, Member, PeerGone
from netstorm.pslite.machine import Disconnect, Inquire
from netstorm.scheduler.members import REMIND_EVERY_S, busy_text, describe_member, format_address, list_some
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.replay_log import LoggedOutbox
from netstorm.scheduler.snapshot import NodeSnapshot
from netstorm.settings import declarations

__all__ = ["Applicant", "ProcessRegistry", "Refusal", "Startup", "job_full_reason", "join_problem", "refuse"]


# Rendezvous: nodes come in any order, and each gets a rank once all have joined. Decides who is refused.

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


# A job before it begins: nodes join, are refused or leave, until all are there.

_log = logging.getLogger(__name__)


class Startup:
    """Tells the nodes of one job what `Rendezvous` decides, and for whom they wait.

    Attributes:
        forming_policy: all nodes have joined, and the first policy is being formed.
    """

    def __init__(
        self, options: SchedulerOptions, outbox: LoggedOutbox, counters: Counters, now: float
    ) -> None:
        """Wait for nodes."""
        self.forming_policy = False
        self._options: Final = options
        self._outbox: Final = outbox
        self._counters: Final = counters
        self._rendezvous: Final = Rendezvous(options)
        self._since: Final = now
        self._remind_at = now + REMIND_EVERY_S
        self._disconnected: Final[set[Peer]] = set()

    def join(self, applicant: Applicant, now: float) -> None:
        """Handle a process that asks to join."""
        peer = applicant.peer
        for refusal in self._rendezvous.add(applicant, now):
            self._refuse(refusal)
        if self._rendezvous.is_accepted(peer):
            _log.info("the node at %s is here", applicant)
        elif peer in self._rendezvous:
            _log.info("the node at %s asks for the place of one that is here, and may have died", applicant)

    def refuse(self, peer: Peer, reason: str) -> None:
        """Tell a process why it cannot be in the job, and end its session."""
        self._refuse(Refusal(peer, reason))

    def heard(self, peer: Peer, now: float) -> None:
        """Record a heartbeat of any process."""
        self._disconnected.discard(peer)
        if peer in self._rendezvous:
            self._rendezvous.heard(peer, now)

    def busy(self, peer: Peer, seconds: float, now: float) -> None:
        """Record that a process is silent, but the kernel of its machine acknowledges: it keeps its place."""
        for applicant in self._rendezvous:
            if applicant.peer == peer:
                _log.warning("%s", busy_text(f"the node at {applicant}", seconds))
                applicant.heard_at = now

    def connection_gone(self, peer: Peer, reason: str, *, refused: bool) -> bool:
        """Handle that a process's connection is gone, or that nobody listens at its address. Return whether
        it has ended.
        """
        if refused:
            return peer in self._disconnected and peer in self._rendezvous
        self._disconnected.add(peer)
        self._inquire(applicant for applicant in self._rendezvous if applicant.peer == peer)
        return False

    def _inquire(self, applicants: Iterable[Applicant]) -> None:
        for applicant in applicants:
            host, port = applicant.join.host, applicant.join.port
            self._outbox.add(Inquire(peer=applicant.peer, host=host, port=port))

    def remove(self, peer: Peer, reason: str, *, quietly: bool = False) -> None:
        """End a process's session, and free its place."""
        self._disconnected.discard(peer)
        removed = self._rendezvous.remove(peer)
        if removed is not None and not quietly:
            _log.warning("the node at %s has gone before all were here: %s", removed, reason)
        self._outbox.add(Disconnect(peer=peer))

    def check(self, now: float) -> None:
        """Remove nodes that have fallen silent, and give free places to nodes that asked for them."""
        self._inquire(self._rendezvous.silent(now, beats=1))
        for silent in self._rendezvous.silent(now):
            self.remove(silent.peer, f"no heartbeat for {self._options.heartbeat_timeout_s:g} s")
        for refusal in self._rendezvous.retry_claims(now):
            self._refuse(refusal)

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

    def status_text(self) -> str:
        """Return what the nodes wait for, in one line."""
        if self.forming_policy and self.complete():
            nodes = self._options.begin_with or self._options.num_workers
            return f"all {nodes} nodes are here, and the first policy is being formed"
        return self._rendezvous.waiting_text()

    def begin_with(self, most: int) -> None:
        """Wait for `most` nodes at most: the others will not come."""
        self._rendezvous.needed(most)

    def asking_for(self, rank: int) -> Peer | None:
        """Return the process that has a rank's place; None: none has asked for it."""
        return self._rendezvous.asking_for(rank)

    def complete(self) -> bool:
        """Return whether all nodes have joined."""
        return self._rendezvous.complete()

    @property
    def reproducible(self) -> bool:
        """Whether the scheduler or a node asks for results that are the same in each run."""
        return self._rendezvous.reproducible

    def peers(self) -> list[Peer]:
        """Return the processes that have asked to join and were not refused."""
        return [applicant.peer for applicant in self._rendezvous]

    def assign_ranks(self) -> tuple[tuple[Peer, m.Member], ...]:
        """Return the members by rank, once all nodes have joined."""
        return self._rendezvous.assign_ranks()

    def snapshots(self) -> tuple[NodeSnapshot, ...]:
        """Return what is known of each node that has joined."""
        return self._rendezvous.snapshots()

    def _refuse(self, refusal: Refusal) -> None:
        refuse(refusal, self._outbox, self._counters)


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
