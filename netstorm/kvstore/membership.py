"""A node's session with the scheduler: joining, heartbeats, and reconnecting after an outage. Pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from netstorm import errors
from netstorm.addresses import host_port
from netstorm.errors import (
    JoinRefused,
    NetStormError,
    NodeRemoved,
    NotAuthorised,
    SchedulerLost,
    WaitTimeout,
)
from netstorm.kvstore.membership.scheduler_addresses import SchedulerAddresses
from netstorm.kvstore.membership.scheduler_outage import SchedulerOutage
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.options import NodeOptions
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SPEAKS_VERSION
from netstorm.protocol.ids import SCHEDULER
from netstorm.pslite.machine import Connect, Disconnect, Send
from netstorm.pslite.security.handshake_texts import is_about_keys
from netstorm.pslite.security.scheduler_proof import is_proof, proof_for_offer, proof_for_resume

__all__ = ["SchedulerSession", "job_end_error"]

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

    def busy(self, seconds: float) -> None:
        """Handle that the scheduler does not answer, but the kernel of its machine acknowledges."""
        if seconds < self._busy_s:  # since then it has run
            self._warn_after_s = 0.0
        self._busy_s = seconds
        if seconds >= self._warn_after_s:
            self._warn_after_s = 2 * seconds
            _log.warning(
                "the scheduler (%s): alive, but its Python has not run for %.0f s", self.address, seconds
            )

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
        due = min(self._next_heartbeat, self._join_by, self._outage.next_deadline())
        return min(due, self._next_address_at) if self._outage.active else due

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
