"""When to ask a peer that acknowledges nothing any more whether it is there, and when to stop waiting.
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
    """The watch over one connection. Nothing is sent again because of it: it only asks."""

    __slots__ = (
        "_asked_at",
        "_limits",
        "_mark",
        "_next_at",
        "_patience_s",
        "_progress_at",
        "_unanswered_since",
        "_window",
        "asked",
    )

    def __init__(self, limits: Limits, window: Window, patience_s: float) -> None:
        """Watch a connection whose messages the window counts; `patience_s`: how long an answer may take."""
        self._patience_s: Final = patience_s
        self._limits: Final = limits
        self._window: Final = window
        self.asked = 0
        """Number of the last query on this connection; 0: none yet."""
        self.stop()

    def stop(self) -> None:
        """There is no connection to watch."""
        self.asked = 0
        self._mark = 0
        self._asked_at = self._progress_at = -math.inf
        self._unanswered_since = self._next_at = math.inf

    def progress(self, now: float) -> None:
        """Note that something was acknowledged, or that something is un-acknowledged from now on."""
        self._progress_at = now

    def expect(self, *, something: bool) -> None:
        """Set when to ask: only if an acknowledgement of something is due."""
        if something:
            self._next_at = max(self._progress_at, self._asked_at) + self._pause()
        else:
            self._next_at = math.inf

    def due(self) -> float:
        """Return when to look again."""
        return min(self._next_at, self._unanswered_since + self._patience())

    def wants_to_ask(self, now: float) -> bool:
        """Return whether it is time for a query."""
        return now >= self._next_at

    def ask(self, mark: int, now: float) -> int:
        """Note a query, sent after everything before `mark`; return its number."""
        self.asked += 1
        self._mark = mark
        self._asked_at = now
        self._unanswered_since = min(self._unanswered_since, now)
        self._next_at = now + self._pause()
        return self.asked

    def silence(self, heard_at: float, now: float) -> float:
        """Return for how long nobody has answered, if that is too long; else 0.

        Args:
            heard_at: when something last came over this connection.
        """
        if heard_at > self._asked_at:
            self._unanswered_since = math.inf
        return now - self._unanswered_since if now >= self._unanswered_since + self._patience() else 0.0

    def mark_of(self, query: int) -> int:
        """Return the mark of a query that was answered; 0 if a later one is still open.

        Raises:
            ProtocolViolation: there was no such query.
        """
        if query > self.asked:
            raise ProtocolViolation(f"answers query {query}, and {self.asked} were sent")
        return self._mark if query and query == self.asked else 0

    def _pause(self) -> float:
        return max(self._limits.query_after_s, 4 * self._window.smooth_rtt_s)

    def _patience(self) -> float:
        """A query waits behind what is in flight, and so does its answer."""
        return self._patience_s + self._window.in_flight / self._limits.slowest_link
