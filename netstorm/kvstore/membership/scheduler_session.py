"""A node's session with the scheduler: joining, heartbeats, and reconnecting after an outage. Pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

from netstorm import errors
from netstorm.errors import NetStormError, SchedulerLost, WaitTimeout
from netstorm.kvstore.membership.scheduler_outage import SchedulerOutage
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.options import NodeOptions
from netstorm.protocol import messages as m
from netstorm.protocol.ids import SCHEDULER
from netstorm.pslite.machine import Connect, Disconnect, Send

__all__ = ["SchedulerSession", "job_end_error"]

_log = logging.getLogger(__name__)

_UNKNOWN_RANK: Final = "does not know this rank"
"""Part of the refusal of a scheduler that has no log of this job: waiting for it is useless."""

_KINDS: Final[dict[str, type[NetStormError]]] = {
    "lost": errors.NodeLost,
    "failed": errors.NodeFailed,
    "disagreement": errors.Disagreement,
    "key": errors.KeyMismatch,
    "refused": errors.JoinRefused,
    "timeout": errors.WaitTimeout,
    "stopped": errors.SchedulerLost,
}
"""The error for each `PeerGone.kind`."""


class SchedulerSession:
    """The session of one node.

    Attributes:
        heartbeat_interval_s: between two heartbeats.
        heartbeat_timeout_s: without a heartbeat, after which the scheduler declares a node lost.
        last_report: what all ranks wait for, as the scheduler has last reported.
    """

    def __init__(self, options: NodeOptions, outbox: Outbox, now: float) -> None:
        """Connect, and ask to join."""
        self.heartbeat_interval_s = 1.0
        self.heartbeat_timeout_s = 10.0
        self.last_report = ""
        self._options: Final = options
        self._outbox: Final = outbox
        self._outage: Final = SchedulerOutage()
        self._rank = -1
        self._next_heartbeat = now
        self._join_by = now + options.join_timeout_s
        """inf once it has joined."""
        self._open(options.join())

    def start(self, joined: m.Joined, now: float) -> None:
        """Record that all nodes have joined."""
        self.heartbeat_interval_s = joined.heartbeat_interval_s
        self.heartbeat_timeout_s = joined.heartbeat_timeout_s
        self._outage.limit_s = joined.resume_s
        self._rank = joined.rank
        self._next_heartbeat = now
        self._join_by = math.inf

    @property
    def is_away(self) -> bool:
        """Whether the scheduler cannot be reached, and is expected to come back."""
        return self._outage.active

    def connection_lost(self, reason: str, undelivered: Sequence[Send], now: float) -> SchedulerLost | None:
        """Handle a failed session: retry, or wait for the scheduler's restart. Return the error if neither
        helps.
        """
        if self._rank < 0 and now < self._join_by:
            _log.warning(
                "no scheduler yet: %s; set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT if that is wrong", reason
            )
            self._outbox.add(Disconnect(peer=SCHEDULER, at_once=True))
            self._open(self._options.join())
            return None
        if not self._outage.limit_s or _UNKNOWN_RANK in reason:
            return SchedulerLost(f"rank {self._rank} cannot reach the scheduler any more: {reason}")
        if not self._outage.active:
            _log.warning(
                "rank %d has lost the scheduler (%s); it should be back within %g s",
                self._rank,
                reason,
                self._outage.limit_s,
            )
        self._outage.record_failure(reason, undelivered, now)
        return None

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
                f"rank {self._rank} cannot reach {self._options.scheduler_name()}, which was not back "
                f"within {self._outage.limit_s:g} s (NETSTORM_SCHEDULER_TIMEOUT): "
                f"{self._outage.reason}"
            )
        if self._outage.retry_is_due(now):
            self._open(resume())
        return None

    def resumed(self, now: float) -> None:
        """End the outage, and send the messages that the scheduler has missed."""
        _log.warning("the scheduler is back after %.1f s", self._outage.duration_s(now))
        self._outbox.add_all(self._outage.end())

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
        missing = self.last_report or f"no answer from {self._options.scheduler_name()}"
        limit = self._options.join_timeout_s
        return WaitTimeout(f"not every node came within {limit:g} s (NETSTORM_JOIN_TIMEOUT): {missing}")

    def waiting_text(self, now: float) -> str:
        """Return what this node waits for, for a person; empty if not for the scheduler."""
        if self._rank < 0:
            return self.last_report or f"waiting for {self._options.scheduler_name()}"
        if self._outage.active:
            return f"the scheduler, away for {self._outage.duration_s(now):.0f} s: {self._outage.reason}"
        return ""

    def next_deadline(self) -> float:
        """Return when something is due."""
        return min(self._next_heartbeat, self._join_by, self._outage.next_deadline())

    def _open(self, first: m.Join | m.Resume) -> None:
        """Open a session, with this as its first message."""
        host, port = self._options.scheduler_host, self._options.scheduler_port
        self._outbox.add(Connect(peer=SCHEDULER, host=host, port=port), Send(peer=SCHEDULER, message=first))


def job_end_error(gone: m.PeerGone) -> NetStormError:
    """Return the error for the end of a job that the scheduler has announced."""
    return _KINDS.get(gone.kind, errors.Unavailable)(gone.reason)
