"""When to query a peer that acknowledges nothing any more, and when to give up waiting for its answer.
Pure.
"""

from __future__ import annotations

import math
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.pslite.session.limits import Limits
from netstorm.pslite.session.window import Window

__all__ = ["QueryTimer"]


class QueryTimer:
    """The liveness check of one connection. It only sends queries: a time-out never retransmits anything."""

    __slots__ = (
        "_answer_timeout_s",
        "_excused_at",
        "_limits",
        "_mark",
        "_next_at",
        "_progress_at",
        "_sent_at",
        "_unanswered_since",
        "_window",
        "sent",
    )

    def __init__(self, limits: Limits, window: Window, answer_timeout_s: float) -> None:
        """Check a connection whose messages `window` counts; an answer may take `answer_timeout_s`."""
        self._answer_timeout_s: Final = answer_timeout_s
        self._limits: Final = limits
        self._window: Final = window
        self.sent = 0
        """Number of queries sent on this connection."""
        self.stop()

    def stop(self) -> None:
        """Reset: there is no connection."""
        self.sent = 0
        self._mark = 0
        self._sent_at = self._progress_at = -math.inf
        self._unanswered_since = self._next_at = math.inf
        self._excused_at = -math.inf

    def progress(self, now: float) -> None:
        """Note an acknowledgement, or that from now on something is unacknowledged."""
        self._progress_at = now

    def expect(self, *, something: bool) -> None:
        """Set when to send a query: only if an acknowledgement of something is due."""
        if something:
            self._next_at = max(self._progress_at, self._sent_at) + self._pause()
        else:
            self._next_at = math.inf

    def due(self) -> float:
        """Return when to check again."""
        return min(self._next_at, self._overdue_at())

    def query_due(self, now: float) -> bool:
        """Return whether it is time for a query."""
        return now >= self._next_at

    def query_sent(self, mark: int, now: float) -> int:
        """Note a query that is sent after everything before `mark`; return its number."""
        self.sent += 1
        self._mark = mark
        self._sent_at = now
        self._unanswered_since = min(self._unanswered_since, now)
        self._next_at = now + self._pause()
        return self.sent

    def silence(self, heard_at: float, now: float) -> float:
        """Return for how long no answer has come, if that is too long; else 0.

        Args:
            heard_at: when a message last arrived over this connection.
            now: s on the local clock.
        """
        if heard_at > self._sent_at:
            self._unanswered_since = math.inf
        return now - self._unanswered_since if now >= self._overdue_at() else 0.0

    def excuse(self, now: float) -> None:
        """Wait for an answer for as long again: the peer is only busy."""
        self._excused_at = now

    def mark_of(self, query: int) -> int:
        """Return the mark of the query that an acknowledgement answers; 0 if a later query is still open.

        Raises:
            ProtocolViolation: there was no such query.
        """
        if query > self.sent:
            raise ProtocolViolation(f"answers query {query}, and {self.sent} were sent")
        return self._mark if query and query == self.sent else 0

    def _pause(self) -> float:
        return max(self._limits.query_after_s, 4 * self._window.smooth_rtt_s)

    def _overdue_at(self) -> float:
        return max(self._unanswered_since, self._excused_at) + self._answer_timeout()

    def _answer_timeout(self) -> float:
        """Return the time-out: a query waits behind what is in flight, and so does its answer."""
        return self._answer_timeout_s + self._window.in_flight / self._limits.slowest_link
