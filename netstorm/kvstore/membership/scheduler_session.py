"""A node's session with the scheduler: it joins, is heard, and goes on while the scheduler is away. Pure."""

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

__all__ = ["SchedulerSession", "error_of"]

_log = logging.getLogger(__name__)

_STRANGER: Final = "does not know this rank"
"""What a scheduler says that has no log of this job: to wait for it is in vain."""

_KINDS: Final[dict[str, type[NetStormError]]] = {
    "lost": errors.NodeLost,
    "failed": errors.NodeFailed,
    "disagreement": errors.Disagreement,
    "key": errors.KeyMismatch,
    "refused": errors.JoinRefused,
    "timeout": errors.WaitTimeout,
    "stopped": errors.SchedulerLost,
}
"""What `PeerGone.kind` is called here."""


class SchedulerSession:
    """Of one node.

    Attributes:
        beat_every_s: between two heartbeats.
        silence_s: without any that the scheduler takes for a node's end.
        said: for whom all wait, as the scheduler has last said.
    """

    def __init__(self, options: NodeOptions, outbox: Outbox, now: float) -> None:
        """Ask to join."""
        self.beat_every_s = 1.0
        self.silence_s = 10.0
        self.said = ""
        self._options: Final = options
        self._outbox: Final = outbox
        self._resuming: Final = SchedulerOutage()
        self._rank = -1
        self._next_beat = now
        self._join_by = now + options.join_timeout_s
        """inf once it has joined."""
        self._say(options.join())

    def joined(self, word: m.Joined, now: float) -> None:
        """Take the scheduler's word that all nodes are here."""
        self.beat_every_s = word.heartbeat_interval_s
        self.silence_s = word.heartbeat_timeout_s
        self._resuming.limit_s = word.resume_s
        self._rank = word.rank
        self._next_beat = now
        self._join_by = math.inf

    @property
    def is_away(self) -> bool:
        """Whether the scheduler cannot be reached, and should be back."""
        return self._resuming.active

    def lost(self, reason: str, undelivered: Sequence[Send], now: float) -> SchedulerLost | None:
        """Go on without a scheduler that cannot be reached; returns the error if that makes no sense."""
        if self._rank < 0 and now < self._join_by:
            _log.warning(
                "no scheduler yet: %s; set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT if that is wrong", reason
            )
            self._outbox.add(Disconnect(peer=SCHEDULER, at_once=True))
            self._say(self._options.join())
            return None
        if not self._resuming.limit_s or _STRANGER in reason:
            return SchedulerLost(f"rank {self._rank} cannot reach the scheduler any more: {reason}")
        if not self._resuming.active:
            _log.warning(
                "rank %d has lost the scheduler (%s); it should be back within %g s",
                self._rank,
                reason,
                self._resuming.limit_s,
            )
        self._resuming.lost(reason, undelivered, now)
        return None

    def look_for_it(self, resume: Callable[[], m.Resume], now: float) -> SchedulerLost | None:
        """Try to reach a scheduler that has been started again; returns the error if it is too late.

        Args:
            resume: returns what this node says first to one that is back.
            now: the time.
        """
        if not self._resuming.active:
            return None
        if self._resuming.too_late(now):
            return SchedulerLost(
                f"rank {self._rank} cannot reach {self._options.scheduler_name()}, which was not back "
                f"within {self._resuming.limit_s:g} s (NETSTORM_SCHEDULER_TIMEOUT): "
                f"{self._resuming.reason}"
            )
        if self._resuming.attempt(now):
            self._say(resume())
        return None

    def resumed(self, now: float) -> None:
        """Take the word of a scheduler that is back, and tell it what it was not told."""
        _log.warning("the scheduler is back after %.1f s", self._resuming.away_s(now))
        self._outbox.add_all(self._resuming.back())

    def beats(self, now: float) -> bool:
        """Return whether a heartbeat is due; the next one is due later."""
        if now < self._next_beat:
            return False
        self._next_beat = now + self.beat_every_s
        return True

    def too_late(self, now: float) -> WaitTimeout | None:
        """Return the error if this node has not joined in time."""
        if now < self._join_by:
            return None
        missing = self.said or f"no answer from {self._options.scheduler_name()}"
        limit = self._options.join_timeout_s
        return WaitTimeout(f"not every node came within {limit:g} s (NETSTORM_JOIN_TIMEOUT): {missing}")

    def waits(self, now: float) -> str:
        """Say what this node waits for, for a person; empty if not for the scheduler."""
        if self._rank < 0:
            return self.said or f"waiting for {self._options.scheduler_name()}"
        if self._resuming.active:
            return f"the scheduler, away for {self._resuming.away_s(now):.0f} s: {self._resuming.reason}"
        return ""

    def due(self) -> float:
        """Return when something is due."""
        return min(self._next_beat, self._join_by, self._resuming.due())

    def _say(self, first: m.Join | m.Resume) -> None:
        """Open a session."""
        host, port = self._options.scheduler_host, self._options.scheduler_port
        self._outbox.add(Connect(peer=SCHEDULER, host=host, port=port), Send(peer=SCHEDULER, message=first))


def error_of(gone: m.PeerGone) -> NetStormError:
    """Return the error that the scheduler's word of a job's end is."""
    return _KINDS.get(gone.kind, errors.Unavailable)(gone.reason)
