"""An outage of the scheduler, which a node survives if the scheduler keeps a log of the job. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from netstorm.protocol.messages import ReplicaDigest
from netstorm.pslite.machine import Send

__all__ = ["SchedulerOutage"]

_RETRY_S: Final = 1.0
"""Pause between two attempts to reconnect, each of which takes up to NETSTORM_LINK_TIMEOUT."""

_MAX_KEPT: Final = 1000
"""Most messages without an answer that are kept to be sent again."""


class SchedulerOutage:
    """One node's view of a scheduler that it cannot reach.

    Attributes:
        limit_s: how long to wait for the scheduler; 0: it keeps no log.
        reason: why the last attempt failed.
    """

    def __init__(self) -> None:
        self.limit_s = 0.0
        self.reason = ""
        self._since = math.inf
        self._try_at = math.inf
        self._kept: list[Send] = []

    @property
    def active(self) -> bool:
        """Whether the scheduler cannot be reached."""
        return self._since < math.inf

    def duration_s(self, now: float) -> float:
        """Return for how long the scheduler has been out of reach."""
        return max(0.0, now - self._since)

    def record_failure(self, reason: str, undelivered: Iterable[Send], now: float) -> None:
        """Record that a session has failed. Undelivered messages that `Resume` does not replace are kept."""
        self.reason = reason
        self._try_at = now + _RETRY_S if self.active else now
        self._since = min(self._since, now)
        self._kept += [send for send in undelivered if isinstance(send.message, ReplicaDigest)]
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
        self._since = self._try_at = math.inf
        kept, self._kept = self._kept, []
        return kept
