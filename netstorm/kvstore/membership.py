"""A node's session with the scheduler: joining, heartbeats, and reconnecting after an outage. Pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from netstorm import errors
from netstorm.addresses import host_port
from netstorm.errors import (
    JoinRefused,
    NetStormError,
    NodeLost,
    NodeRemoved,
    NotAuthorised,
    ProtocolViolation,
    SchedulerLost,
    UnevenRounds,
    WaitTimeout,
)
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Done, Operation, Outbox
from netstorm.kvstore.options import NodeOptions
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, SPEAKS_VERSION, UNKNOWN, Peer
from netstorm.protocol.messages import (
    Barrier,
    CaughtUp,
    Hello,
    KeyGrant,
    KeySpec,
    Member,
    NodeStatus,
    RegisterKeys,
    ReplicaDigest,
    StepsGranted,
    StepTimes,
)
from netstorm.pslite.machine import (
    Admission,
    Admit,
    Connect,
    Disconnect,
    NotYet,
    Refuse,
    Send,
    busy_text,
    refuse_other_key,
)
from netstorm.pslite.proofs import is_about_keys, is_proof, proof_for_offer, proof_for_resume
from netstorm.pslite.sntp import Address
from netstorm.topology.policy import Policy

__all__ = [
    "DriverStatus",
    "NodeBarriers",
    "NodeLocalSteps",
    "NodeStatusTracker",
    "RecoveringSchedulers",
    "Registration",
    "Roster",
    "SchedulerAddresses",
    "SchedulerSession",
    "StepsRequest",
    "job_end_error",
    "time_server_address",
    "time_server_rank",
]


_log = logging.getLogger(__name__)

_UNKNOWN_RANK: Final = "does not know this rank"
"""Part of the refusal of a scheduler that has no log of this job: waiting for it is useless."""

_REMOVED: Final = "is out of the job since view"
"""Part of the refusal of a scheduler whose job goes on without this node."""

_KINDS: Final[dict[str, type[NetStormError]]] = {
    "lost": errors.NodeLost,
    "removed": errors.NodeRemoved,
    "failed": errors.NodeFailed,
    "disagreement": errors.Disagreement,
    "key": errors.KeyMismatch,
    "refused": errors.JoinRefused,
    "timeout": errors.WaitTimeout,
    "stopped": errors.SchedulerLost,
}
"""The error for each `PeerGone.kind`."""


_HINT_S: Final = 10.0
"""After so long without a scheduler a node says where it looks for one."""

_REFUSED_S: Final = 0.4
"""For how long nobody must listen where the scheduler was, until its process has certainly ended: several
attempts to connect."""

_REFUSALS_APART_S: Final = 5.0
"""Refusals further apart belong to different outages."""


class SchedulerSession:
    """The session of one node.

    Attributes:
        heartbeat_interval_s: between two heartbeats.
        heartbeat_timeout_s: without a heartbeat, after which the scheduler declares a node lost.
        last_report: what all ranks wait for, as the scheduler has last reported.
        followed: host and port of the scheduler that this node has joined, or has come back to last.
        majority: whether the scheduler goes on only with a majority of the last view.
    """

    def __init__(self, options: NodeOptions, outbox: Outbox, now: float) -> None:
        """Connect, and ask to join."""
        self.heartbeat_interval_s = 1.0
        self.heartbeat_timeout_s = 10.0
        self.last_report = ""
        self.followed: tuple[str, int] | None = None
        self.majority = False
        self._options: Final = options
        self._outbox: Final = outbox
        self._outage: Final = SchedulerOutage()
        self._rank = -1
        self._addresses: Final = SchedulerAddresses(
            (options.scheduler_host, options.scheduler_port), options.standbys
        )
        self._elastic = False
        self._wants_proof = False
        """The job has a key: whoever comes as its scheduler proves that it is one."""
        self._proof_key = b""
        self._resumes = 0
        """The number of the last `Resume`."""
        self._goes_over = False
        """The next address is the present one, which a recovering scheduler has just named."""
        self._next_address_at = math.inf
        """When to try the next one."""
        self._next_heartbeat = now
        self._join_by = now + options.join_timeout_s
        """inf once it has joined."""
        self._hint_at = now + min(_HINT_S, options.join_timeout_s / 2)
        """When to say where this node looks for the scheduler; inf once it has."""
        self._unreachable = ""
        """Why this node, which has not joined, has no session with the scheduler; empty: that is unknown."""
        self._refused = (-math.inf, -math.inf)
        """When the first and the last attempt to connect was refused, of those in a row."""
        self._busy_s = self._warn_after_s = 0.0
        self._open(options.join())

    def start(self, joined: m.Joined, now: float) -> None:
        """Record that all nodes have joined."""
        self.heartbeat_interval_s = joined.heartbeat_interval_s
        self.heartbeat_timeout_s = joined.heartbeat_timeout_s
        # In an elastic job the connection may have failed because this process was stopped for too long, and
        # the scheduler can say so.
        self._outage.limit_s = joined.resume_s or (joined.heartbeat_timeout_s if joined.elastic else 0.0)
        self._rank = joined.rank
        self._wants_proof = any(one.rank == joined.rank and one.user for one in joined.members)
        self._proof_key = joined.proof_key.key
        self.followed = self._addresses.present
        self._elastic = joined.elastic is not None
        self.majority = joined.majority
        self._next_heartbeat = now
        self._join_by = self._hint_at = math.inf

    @property
    def tries_another(self) -> bool:
        """Whether the next session may be with another scheduler than the one before."""
        return self._addresses.several or self._addresses.is_recovering

    @property
    def address(self) -> str:
        """Address of the scheduler that this node follows, or tries to."""
        return host_port(*self._addresses.present)

    @property
    def is_away(self) -> bool:
        """Whether the scheduler cannot be reached, and is expected to come back."""
        return self._outage.active

    def connection_lost(self, reason: str, undelivered: Sequence[Send], now: float) -> NetStormError | None:
        """Handle a failed session: retry, or wait for the scheduler's restart. Return the error if neither
        helps.
        """
        believed = not self._wants_proof  # a refusal has no proof: a scheduler of this job answers `Resume`
        if _REMOVED in reason and believed:  # perhaps before this node has heard that it had joined
            return NodeRemoved(_removed(reason))
        if self._rank < 0 and (is_about_keys(reason) or SPEAKS_VERSION in reason):
            return JoinRefused(f"cannot join {self._options.scheduler_name()}: {reason}")
        if self._rank < 0 and now < self._join_by:
            self._unreachable = reason
            self._hint(now)
            self._outbox.add(Disconnect(peer=SCHEDULER, at_once=True))
            self._addresses.try_next()
            self._open(self._options.join())
            return None
        if not self._outage.limit_s or (_UNKNOWN_RANK in reason and believed):
            return SchedulerLost(f"rank {self._rank} cannot reach the scheduler any more: {reason}")
        if not self._outage.active:
            _log.warning(
                "rank %d has lost the scheduler (%s); it should be back within %g s",
                self._rank,
                reason,
                self._outage.limit_s,
            )
            if self._addresses.several:
                self._next_address_at = now + self.heartbeat_timeout_s
        self._outage.record_failure(reason, undelivered, now)
        return None

    def proves(self, offer: m.Recover) -> bool:
        """Return whether who would take the job over is a scheduler of it, as far as this node can ask."""
        return not self._wants_proof or is_proof(
            offer.proof, proof_for_offer(self._proof_key, offer.host, offer.port)
        )

    def check_proof(self, message: m.Message) -> None:
        """Check that who comes as the scheduler after an outage is one of this job.

        Raises:
            NotAuthorised: it has not proved that.
        """
        if not (self._wants_proof and self._outage.active):
            return
        proof = message.proof if isinstance(message, (m.Resumed, m.PeerGone)) else b""
        if not is_proof(proof, proof_for_resume(self._proof_key, self._resumes)):
            self._outage.reason = (
                f"whoever answers at {self.address} has the job's key, but does not prove that it is a "
                "scheduler of this job (it needs the log of the one before, or its NETSTORM_SCHEDULER_KEY)"
            )
            raise NotAuthorised(f"refused a {type(message).__name__}: {self._outage.reason}")

    def refused(self, reason: str, now: float) -> SchedulerLost | None:
        """Handle that no process listens where the scheduler is. Return the error if its process has
        certainly ended, and no other one will go on with the job.
        """
        if self._rank < 0:
            self._unreachable = reason
            self._hint(now)
            return None
        first, last = self._refused
        if now - last > _REFUSALS_APART_S:
            first = now
        self._refused = (first, now)
        if self._outage.limit_s or now - first < _REFUSED_S:
            return None
        return SchedulerLost(
            f"rank {self._rank} cannot reach the scheduler any more: its process has ended: its connection "
            f"has ended, and {reason}"
        )

    def busy(self, seconds: float, *, late: bool = False) -> None:
        """Handle that the scheduler does not answer, but the kernel of its machine acknowledges.

        Args:
            seconds: for how long it has not.
            late: the kernel answers late.
        """
        if seconds < self._busy_s:  # since then it has run
            self._warn_after_s = 0.0
        self._busy_s = seconds
        if seconds >= self._warn_after_s:
            self._warn_after_s = 2 * seconds
            _log.warning("%s", busy_text(f"the scheduler ({self.address})", seconds, late=late))

    def _hint(self, now: float) -> None:
        """Say once where this node looks for the scheduler; it goes on looking quietly."""
        if now >= self._hint_at:
            self._hint_at = math.inf
            _log.warning(
                "%s; trying for %g s (NETSTORM_JOIN_TIMEOUT)", self._missing(), self._options.join_timeout_s
            )

    def _missing(self) -> str:
        """Return that there is no answer from the scheduler, with a hint."""
        reason = f" ({self._unreachable})" if self._unreachable else ""
        return (
            f"no answer from {self._options.scheduler_name()}{reason}: is it running, and is that its "
            "address (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT), which firewalls let through?"
        )

    def offered(self, host: str, port: int, now: float) -> bool:
        """Handle that another scheduler would take the job over; return whether this node goes over to it: it
        has lost its own, and waits for no other one that takes over.
        """
        if not self._outage.active:
            return False
        address, addresses = (host, port), self._addresses
        if addresses.present == address:
            return True
        if addresses.is_recovering and now < self._next_address_at and address > addresses.present:
            addresses.remember(address)  # of several, all nodes prefer the same one
            return False
        _log.warning(
            "rank %d follows the scheduler at %s from now on, which takes the job over: the one at %s "
            "cannot be reached (%s)",
            self._rank,
            host_port(host, port),
            self.address,
            self._outage.reason,
        )
        addresses.go_over(address)
        if not self._elastic:  # all nodes are needed there, and none may go on without it
            addresses.forget_all_but_recovering()
        self._goes_over, self._next_address_at = True, now
        return True

    def try_reconnect(self, resume: Callable[[], m.Resume], now: float) -> SchedulerLost | None:
        """Try to reach a scheduler that has been restarted; return the error if the outage lasts too long.

        Args:
            resume: returns the first message to a scheduler that is back.
            now: the time.
        """
        if not self._outage.active:
            return None
        if self._outage.has_expired(now):
            return SchedulerLost(
                f"rank {self._rank} cannot reach the scheduler at {self.address}, which was not back "
                f"within {self._outage.limit_s:g} s (NETSTORM_SCHEDULER_TIMEOUT): "
                f"{self._outage.reason}"
            )
        retry = self._outage.retry_is_due(now)
        if now >= self._next_address_at:
            if self._goes_over or self._addresses.several:
                if not self._goes_over:
                    self._addresses.try_next()
                    _log.warning("rank %d tries the scheduler at %s", self._rank, self.address)
                self._outbox.add(Disconnect(peer=SCHEDULER, at_once=True))
                retry = True
            self._goes_over, self._next_address_at = False, now + self._patience_s()
        if retry:
            self._resumes += 1
            self._open(msgspec.structs.replace(resume(), number=self._resumes))
        return None

    def resumed(self, now: float) -> None:
        """End the outage, and send the messages that the scheduler has missed."""
        _log.warning("the scheduler at %s is back after %.1f s", self.address, self._outage.duration_s(now))
        self.followed = self._addresses.present
        if self._addresses.is_recovering:
            self._addresses.forget_earlier()
        self._outbox.add_all(self._outage.end())
        self._next_address_at = math.inf

    def heartbeat_due(self, now: float) -> bool:
        """Return whether a heartbeat is due; if so, it counts as sent."""
        if now < self._next_heartbeat:
            return False
        self._next_heartbeat = now + self.heartbeat_interval_s
        return True

    def join_error(self, now: float) -> WaitTimeout | None:
        """Return the error if this node has not joined in time."""
        if now < self._join_by:
            return None
        limit = self._options.join_timeout_s
        if not self.last_report:
            return WaitTimeout(
                f"{self._missing()} This node has tried for {limit:g} s (NETSTORM_JOIN_TIMEOUT)"
            )
        return WaitTimeout(
            f"not every node came within {limit:g} s (NETSTORM_JOIN_TIMEOUT): {self.last_report}"
        )

    def waiting_text(self, now: float) -> str:
        """Return what this node waits for, for a person; empty if not for the scheduler."""
        if self._rank < 0:
            return self.last_report or f"waiting for {self._options.scheduler_name()}"
        if self._outage.active:
            return f"the scheduler, away for {self._outage.duration_s(now):.0f} s: {self._outage.reason}"
        return ""

    def next_deadline(self) -> float:
        """Return when something is due."""
        due = min(self._next_heartbeat, self._join_by)
        if self._outage.active:
            due = min(due, self._outage.next_deadline(), self._next_address_at)
        return due

    def _patience_s(self) -> float:
        """Return how long this node waits for the scheduler at the present address, if it knows others."""
        # One that takes over waits a heartbeat time-out for all nodes: this one must still be there then.
        return self.heartbeat_timeout_s * (2 if self._addresses.is_recovering else 1)

    def _open(self, first: m.Join | m.Resume) -> None:
        """Open a session, with this as its first message."""
        host, port = self._addresses.present
        self._outbox.add(Connect(peer=SCHEDULER, host=host, port=port), Send(peer=SCHEDULER, message=first))


def job_end_error(gone: m.PeerGone) -> NetStormError:
    """Return the error for the end of a job, or of this node in it, that the scheduler has announced."""
    reason = _removed(gone.reason) if gone.kind == "removed" else gone.reason
    return _KINDS.get(gone.kind, errors.Unavailable)(reason)


def _removed(reason: str) -> str:
    return (
        f"{reason}. The job goes on without this process: start it again, and it takes its place with the "
        "state that the others have (netstorm launch --restarts does that)"
    )


# The registration of keys: requests to the scheduler, and operations that wait for its answer.


class Registration:
    """The registration of all keys of this process."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, str], Key] = {}
        self.unsent: list[Key] = []
        """Keys that the next request is for."""
        self._operations: dict[tuple[int, str], list[Operation]] = {}

    def add(self, key: Key) -> None:
        """Register a key with the next request."""
        self._keys[key.spec.namespace, key.name] = key
        self.unsent.append(key)

    def take_request(self) -> RegisterKeys:
        """Return one request for all keys that have gathered: 160 keys must not pay 160 round trips."""
        request = RegisterKeys(keys=tuple(key.spec for key in self.unsent))
        self.unsent = []
        return request

    def unanswered(self) -> tuple[KeySpec, ...]:
        """Return all keys that have not been granted, to be requested once more; the next request is without
        them.
        """
        self.unsent = []
        return tuple(key.spec for key in self._keys.values() if key.identity < 0)

    def enqueue(self, operation: Operation) -> None:
        """Keep an operation until its key is granted."""
        spec = operation.key.spec
        self._operations.setdefault((spec.namespace, spec.name), []).append(operation)

    def grant(self, answer: KeyGrant) -> tuple[Key, list[Operation]]:
        """Record the scheduler's answer; return the key, and the operations that waited for it.

        Raises:
            ProtocolViolation: the key was not requested.
        """
        key = self._keys.get((answer.namespace, answer.name))
        if key is None or key.identity >= 0:
            raise ProtocolViolation(f"the scheduler grants key {answer.name!r}, which was not requested")
        key.set_grant(answer)
        return key, self._operations.pop((answer.namespace, answer.name), [])

    def waiting_operations(self) -> list[Operation]:
        """Return the operations whose key has not been granted."""
        return [operation for operations in self._operations.values() for operation in operations]

    def granted_keys(self) -> list[Key]:
        """Return the keys that the scheduler has granted."""
        return [key for key in self._keys.values() if key.identity >= 0]

    def last_rounds(self) -> dict[int, int]:
        """Return the last round of each granted key that this rank has begun."""
        return {key.identity: key.last_taken for key in self.granted_keys()}

    def clear(self) -> None:
        """Forget requests and waiting operations: the job has failed."""
        self.unsent = []
        self._operations = {}


# Schedulers that would take the job over, and what a node answers them.
#
# Such a scheduler knows no more of a node than an address, and has no rank. It gets a session, over which it
# can say one thing: where it listens, with a proof that it is a scheduler of this job if that has a key. A
# node that has lost its own scheduler goes there. Any other node says whom it follows.

_MOST: Final = 8
"""Sessions with such schedulers. One more takes the place of the oldest, which may have ended."""

_MOST_CHARACTERS: Final = 253
"""Of a host's name (RFC 1035, section 2.3.4)."""


class RecoveringSchedulers:
    """The sessions of one node with schedulers that would take its job over."""

    def __init__(self, session: SchedulerSession, outbox: Outbox) -> None:
        """Begin without any; `session` is the one with the node's own scheduler."""
        self._session: Final = session
        self._outbox: Final = outbox
        self._peers: Final[dict[int, Peer]] = {}
        """By incarnation, in order of arrival."""
        self._arrived = 0

    @staticmethod
    def asks(hello: m.Hello) -> bool:
        """Return whether a Hello is that of such a scheduler."""
        return hello.sender < 0 and hello.receiver <= UNKNOWN

    def admit(self, hello: m.Hello, rank: int) -> Admission:
        """Admit such a scheduler, unless this node is in no job yet (`rank` < 0)."""
        if rank < 0:
            return Refuse("this node has not joined its job yet: it waits for its scheduler")
        if hello.incarnation not in self._peers:
            if len(self._peers) == _MOST:
                del self._peers[next(iter(self._peers))]
            self._peers[hello.incarnation] = Peer(UNKNOWN - self._arrived % _MOST)
            self._arrived += 1
        return Admit(self._peers[hello.incarnation])

    def receive(
        self, peer: Peer, message: m.Recover, roster: Roster, elastic: tuple[int, int] | None, now: float
    ) -> None:
        """Answer such a scheduler.

        Raises:
            ProtocolViolation: it listens at no address.
        """
        if not 0 < len(message.host) <= _MOST_CHARACTERS or not 0 < message.port < 2**16:
            raise ProtocolViolation(f"a scheduler at {message.host[:60]!r}, port {message.port}")
        proves = self._session.proves(message)
        answer = m.RecoverAnswer(
            accepted=proves and self._session.offered(message.host, message.port, now),
            scheduler=self._session.address,
            rank=roster.rank,
            members=roster.members,
            elastic=elastic,
            unproven=not proves,
        )
        self._outbox.add(Send(peer=peer, message=answer))


# The members of the job as one node sees them: which have finished, and which cannot be reached.

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
        self.finished: Final[dict[int, dict[int, int]]] = {}
        """By rank that will push no more: its last round of each key."""
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
                self.finished.pop(rank, None)
                self._suspected.pop(rank, None)

    def with_all_arrivals(self, message: m.NewView) -> m.NewView:
        """Return a new view with all processes that are new here, also those of views that this node missed
        while there was no scheduler.
        """
        known = {member.rank: member.incarnation for member in self.present()}
        new = {member.rank for member in message.members if known.get(member.rank) != member.incarnation}
        return msgspec.structs.replace(message, arrivals=tuple(sorted(new.union(message.arrivals))))

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

    def unfinished(self) -> list[int]:
        """Return the other ranks that have not finished."""
        return [member.rank for member in self.others() if member.rank not in self.finished]

    def uneven_error(self, operations: Iterable[Operation]) -> UnevenRounds | None:
        """Return the error if one of `operations` waits for a round that a finished rank never pushed."""
        for operation in operations:
            members = operation.key.spec.members
            for rank, last_rounds in self.finished.items():
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


# Where a node looks for a scheduler: that of the job, standbys, and those that take the job over.

_MOST_RECOVERING: Final = 4
"""Schedulers that take over, of which a node remembers the addresses. One is enough; more come if several are
started at once, or one after the other."""


class SchedulerAddresses:
    """The addresses of one node, in the order in which it tries them.

    A scheduler is *recovering* if it was started to take the job over, and has told this node its address.
    """

    def __init__(self, first: tuple[str, int], standbys: Sequence[tuple[str, int]]) -> None:
        """Begin with the scheduler of the job."""
        self._standbys: Final = tuple(standbys)
        self._known: list[tuple[str, int]] = [first, *standbys]
        self._recovering: list[tuple[str, int]] = []
        self._at = 0

    @property
    def present(self) -> tuple[str, int]:
        """The one that this node talks to, or tries to."""
        return self._known[self._at]

    @property
    def several(self) -> bool:
        """Whether there is another one to try."""
        return len(self._known) > 1

    @property
    def is_recovering(self) -> bool:
        """Whether the present one takes the job over."""
        return self.present in self._recovering

    def try_next(self) -> None:
        """Go on to the next one, and behind the last one to the first again."""
        self._at = (self._at + 1) % len(self._known)

    def go_over(self, address: tuple[str, int]) -> None:
        """Go over to a recovering scheduler."""
        self.remember(address)
        self._at = self._known.index(address)

    def remember(self, address: tuple[str, int]) -> None:
        """Remember the address of a recovering scheduler, to try it later."""
        present = self.present
        if address not in self._recovering:
            self._recovering.append(address)
        if address not in self._known:
            self._known.append(address)
        if len(self._recovering) > _MOST_RECOVERING:
            oldest = next(one for one in self._recovering if one not in (present, address))
            self._recovering.remove(oldest)
            self._known.remove(oldest)
        self._at = self._known.index(present)

    def forget_earlier(self) -> None:
        """Never go back: the present scheduler has taken the job over, and one before it may come back."""
        present = self.present
        self._known = [present, *(one for one in self._standbys if one != present)]
        self._recovering.clear()
        self._at = 0

    def forget_all_but_recovering(self) -> None:
        """Never go back to a scheduler that does not take the job over."""
        present = self.present
        self._known = list(self._recovering)
        self._at = self._known.index(present)


# An outage of the scheduler, which a node survives if the scheduler keeps a log of the job.

_RETRY_S: Final = 1.0
"""Pause between two attempts to reconnect, each of which takes up to NETSTORM_LINK_TIMEOUT."""

_TOLD_ONCE: Final = (CaughtUp, ReplicaDigest)
_MAX_KEPT: Final = 1000
"""Most messages without an answer that are kept to be sent again."""


class SchedulerOutage:
    """One node's view of a scheduler that it cannot reach.

    Attributes:
        active: the scheduler cannot be reached.
        limit_s: how long to wait for the scheduler; 0: it keeps no log.
        reason: why the last attempt failed.
    """

    def __init__(self) -> None:
        self.active = False
        self.limit_s = 0.0
        self.reason = ""
        self._since = math.inf
        self._try_at = math.inf
        self._kept: list[Send] = []

    def duration_s(self, now: float) -> float:
        """Return for how long the scheduler has been out of reach."""
        return max(0.0, now - self._since)

    def record_failure(self, reason: str, undelivered: Iterable[Send], now: float) -> None:
        """Record that a session has failed. Undelivered messages that `Resume` does not replace are kept: who
        has the job's state says so once, and waits.
        """
        self.reason = reason
        self._try_at = now + _RETRY_S if self.active else now
        self._since = min(self._since, now)
        self.active = True
        self._kept += [send for send in undelivered if isinstance(send.message, _TOLD_ONCE)]
        del self._kept[:-_MAX_KEPT]

    def has_expired(self, now: float) -> bool:
        """Return whether the outage lasts longer than the limit."""
        return now >= self._since + self.limit_s

    def next_deadline(self) -> float:
        """Return when something is due."""
        return min(self._try_at, self._since + self.limit_s)

    def retry_is_due(self, now: float) -> bool:
        """Return whether to try a new session now; it counts as tried."""
        if now < self._try_at:
            return False
        self._try_at = math.inf
        return True

    def end(self) -> list[Send]:
        """End the outage; return what must be sent again."""
        self.active, self._since, self._try_at = False, math.inf, math.inf
        kept, self._kept = self._kept, []
        return kept


# A node's status, for people and metrics: it travels with the heartbeats.

_REMEMBERED: Final = 8
"""Rounds back whose begin is kept: a key may begin a round after all other keys have ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverStatus:
    """The part of the status that only the driver of a node knows."""

    bytes_sent: int = 0
    """To other nodes, headers included."""
    clock_offset: float = 0.0
    """Cluster clock less the host's, in s."""
    clock_drift: float = 0.0
    """How much faster the cluster clock goes."""
    clock_error: float = -1.0
    """Upper bound of the error of the offset, in s; -1: not known."""
    clock_hops: int = 0
    """Exchanges between this clock and the scheduler's: 1 if it asks the scheduler."""
    queued: int = -1
    """Bytes for other nodes that wait, or are not acknowledged yet; -1: not known."""


class NodeStatusTracker:
    """Counts operations and their time.

    A round, here, is that of all keys together: the n-th push of each. It lasts from the begin of the first
    operation to the end of the last.

    Attributes:
        sample_driver: returns what only the driver knows, given the node's time; the driver sets it.
        compression: how gradients travel, for a person; the frontend sets it.
        round_s: duration of the last round.
    """

    def __init__(self, counters: Counters) -> None:
        self.sample_driver: Callable[[float], DriverStatus] = lambda _: DriverStatus()
        self.compression = ""
        self.round_s = 0.0
        self._counters: Final = counters
        self._open: dict[int, int] = {}
        """Operations under way, by round."""
        self._since: dict[int, float] = {}
        """When a round's first operation began."""
        self._last_round = -1
        self._under_way = 0
        self._busy_since = 0.0
        self._waited_s = 0.0

    def operation_begun(self, round: int, now: float) -> None:
        """Count an operation of this round that the user has submitted."""
        if self._under_way == 0:
            self._busy_since = now
        self._under_way += 1
        self._open[round] = self._open.get(round, 0) + 1
        self._since.setdefault(round, now)

    def operation_ended(self, round: int, now: float) -> None:
        """Count the end of an operation of this round."""
        self._under_way -= 1
        if self._under_way == 0:
            self._waited_s += now - self._busy_since
        self._open[round] -= 1
        if self._open[round] == 0:
            del self._open[round]
            if round >= self._last_round:  # a key that is pushed rarely is rounds behind the others
                self._last_round = round
                self.round_s = now - self._since[round]
                self._drop_old_rounds()

    def report(self, now: float) -> NodeStatus:
        """Return what the node says of itself with a heartbeat."""
        driver = self.sample_driver(now)
        return NodeStatus(
            rounds=int(self._counters.get("rounds")),
            round_s=self.round_s,
            waited_s=self._waited_s + (now - self._busy_since if self._under_way else 0.0),
            bytes_sent=driver.bytes_sent,
            clock_offset=driver.clock_offset,
            clock_drift=driver.clock_drift,
            detoured=int(self._counters.get("detoured")),
            last_round=self._last_round,
            clock_error=driver.clock_error,
            clock_hops=driver.clock_hops,
            compression=self.compression,
            queued=driver.queued,
        )

    def _drop_old_rounds(self) -> None:
        old = [round for round in self._since if round < self._last_round - _REMEMBERED]
        for round in old:
            if round not in self._open:
                del self._since[round]


# The barriers that this rank has entered and that not all others have.


class NodeBarriers:
    """The open barriers of one node. The n-th barrier of every rank is the same one."""

    def __init__(self, outbox: Outbox) -> None:
        """Begin before the first barrier; `outbox` takes messages and completions."""
        self._outbox: Final = outbox
        self._next = 0
        self._waiting: Final[dict[int, tuple[float, Done]]] = {}
        """By number: when it was entered, and what to call."""

    def start(self, number: int) -> None:
        """Begin with barrier `number`: this rank has joined a job that has reached those before."""
        self._next = number

    @property
    def entered(self) -> int:
        """How many barriers this rank has entered."""
        return self._next

    def enter(self, done: Done, now: float) -> None:
        """Enter the next barrier; `done` is called when all ranks have."""
        self._waiting[self._next] = (now, done)
        self._outbox.send_to_scheduler(Barrier(number=self._next))
        self._next += 1

    def reached(self, number: int) -> None:
        """Complete a barrier that all ranks have entered.

        Raises:
            ProtocolViolation: this rank does not wait at it.
        """
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            raise ProtocolViolation(f"barrier {number} was not waited for")
        self._outbox.complete(waiting[1], None)

    def waiting_numbers(self) -> tuple[int, ...]:
        """Return the barriers that this rank waits at, the oldest first."""
        return tuple(sorted(self._waiting))

    def oldest(self) -> float:
        """Return when the oldest of them was entered (inf: there is none)."""
        return min((since for since, _ in self._waiting.values()), default=math.inf)

    def fail_all(self, error: NetStormError) -> None:
        """Fail all barriers that this rank waits at."""
        for _, done in self._waiting.values():
            self._outbox.complete(done, error)
        self._waiting.clear()


# This rank's reports to the state server, which answers with a number of local steps (ESync).


@dataclass(slots=True, kw_only=True, eq=False)
class StepsRequest:
    """A report, and the answer to it."""

    report: StepTimes
    done: Done
    """Called when `steps` is the answer, or with the error that ended the job."""
    steps: int = 0


class NodeLocalSteps:
    """The reports of one node that have not been answered."""

    def __init__(self, outbox: Outbox) -> None:
        """Begin without any; `outbox` takes messages and completions."""
        self._outbox: Final = outbox
        self._waiting: Final[dict[int, StepsRequest]] = {}
        """By training."""
        self._last: Final[dict[int, StepTimes]] = {}
        self._failure: NetStormError | None = None

    def report(self, request: StepsRequest) -> None:
        """Send a report, the next one of its training. Its `done` is called in any case."""
        if self._failure is not None:
            self._outbox.complete(request.done, self._failure)
            return
        self._waiting[request.report.training] = request
        self._last[request.report.training] = request.report
        self._outbox.send_to_scheduler(request.report)

    def granted(self, message: StepsGranted) -> None:
        """Complete the report that is answered. A second answer to it changes nothing."""
        waiting = self._waiting.get(message.training)
        if waiting is None or waiting.report.round != message.round:
            return
        del self._waiting[message.training]
        waiting.steps = max(waiting.report.least, min(waiting.report.most, message.steps))
        self._outbox.complete(waiting.done, None)

    def report_again(self) -> None:
        """Send the last reports again, answered or not: a scheduler that was started again knows none, and
        others may still wait for an answer that takes this rank's.
        """
        for report in self._last.values():
            self._outbox.send_to_scheduler(report)

    def fail_all(self, error: NetStormError) -> None:
        """Fail everything that waits for an answer, and all later reports."""
        self._failure = error
        for waiting in self._waiting.values():
            self._outbox.complete(waiting.done, error)
        self._waiting.clear()


# Which time server a node asks, if clocks are synchronised along the trees (NETSTORM_CLOCK=trees).


def time_server_rank(policy: Policy, rank: int) -> int | None:
    """Return which rank to ask for the time; None: the scheduler, which every root asks.

    A rank has a parent in each tree. All ranks ask their parent in the tree with the largest share, so no two
    ranks ask each other in a circle (arXiv 2404.11352 §V, Fig. 5).
    """
    if any(tree.root == rank for tree in policy.trees):
        return None
    largest = max(range(len(policy.trees)), key=lambda tree: (policy.weights[tree], -tree))
    return policy.trees[largest].broadcast_parent[rank]


def time_server_address(policy: Policy | None, rank: int, members: Sequence[Member]) -> Address | None:
    """Return the address of that rank's time server; None: the scheduler's.

    A node serves the time at the UDP port whose number is that of its TCP port.
    """
    server = None if policy is None else time_server_rank(policy, rank)
    return None if server is None else (members[server].host, members[server].port)
