"""Going on without the scheduler for a while, if it keeps a log: it will be back, and know this job. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from netstorm.protocol.messages import ReplicaDigest
from netstorm.pslite.machine import Send

__all__ = ["SchedulerOutage"]

_PAUSE_S: Final = 1.0
"""Between two attempts, each of which lasts for up to NETSTORM_LINK_TIMEOUT."""

_MOST_KEPT: Final = 1000
"""Messages that no answer is awaited to, and that are sent again."""


class SchedulerOutage:
    """What a node knows of a scheduler that it cannot reach.

    Attributes:
        limit_s: how long to wait for it; 0: it keeps no log.
        reason: why it could not be reached the last time.
    """

    def __init__(self) -> None:
        self.limit_s = 0.0
        self.reason = ""
        self._since = math.inf
        self._try_at = math.inf
        self._kept: list[Send] = []

    @property
    def active(self) -> bool:
        """Whether the scheduler is away."""
        return self._since < math.inf

    def away_s(self, now: float) -> float:
        """Return for how long the scheduler has been away, as far as is known."""
        return max(0.0, now - self._since)

    def lost(self, reason: str, undelivered: Iterable[Send], now: float) -> None:
        """Note that there is no session with it; what it was not told is kept if nothing stands for it."""
        self.reason = reason
        self._try_at = now + _PAUSE_S if self.active else now
        self._since = min(self._since, now)
        self._kept += [send for send in undelivered if isinstance(send.message, ReplicaDigest)]
        del self._kept[:-_MOST_KEPT]

    def too_late(self, now: float) -> bool:
        """Return whether it has been away for too long."""
        return now >= self._since + self.limit_s

    def due(self) -> float:
        """Return when something is due."""
        return min(self._try_at, self._since + self.limit_s)

    def attempt(self, now: float) -> bool:
        """Return whether a new session is to be tried now."""
        if now < self._try_at:
            return False
        self._try_at = math.inf
        return True

    def back(self) -> list[Send]:
        """Note that it is back; return what it is to be told again."""
        self._since = self._try_at = math.inf
        kept, self._kept = self._kept, []
        return kept
