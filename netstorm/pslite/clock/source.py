"""Which server a node asks for the time. Pure.

It is always the scheduler or, as in the paper (arXiv 2404.11352 §VI), the parent in a tree; roots ask the
scheduler. A parent may not have opened its port, or may be behind a firewall that drops UDP. A node that gets
no answer asks the scheduler, and tries the parent again later.
"""

from __future__ import annotations

import math
from typing import Final, TypeAlias

__all__ = ["Address", "ClockSource"]

Address: TypeAlias = tuple[str, int]
"""Host and UDP port."""

_UNANSWERED: Final = 3
"""Unanswered requests in a row after which a parent is given up; single packets get lost."""

_PAUSE_S: Final = 120.0
"""For how long the scheduler is then asked instead."""


class ClockSource:
    """The choice of one node. Times are in s on the local clock."""

    def __init__(self, scheduler: Address) -> None:
        self.scheduler = scheduler
        """May change: another scheduler may take the job over."""
        self._parent: Address | None = None
        self._unanswered = 0
        self._scheduler_until = -math.inf

    def set_parent(self, parent: Address | None) -> None:
        """Ask this node from now on; None: the scheduler."""
        if parent != self._parent:
            self._parent = parent
            self._unanswered = 0
            self._scheduler_until = -math.inf

    def next_server(self, now: float) -> Address:
        """Return the server to ask; the request counts as unanswered until `answered`."""
        if self._parent is None or now < self._scheduler_until:
            return self.scheduler
        if self._unanswered >= _UNANSWERED:
            self._unanswered = 0
            self._scheduler_until = now + _PAUSE_S
            return self.scheduler
        self._unanswered += 1
        return self._parent

    def answered(self) -> None:
        """Record a valid answer."""
        self._unanswered = 0
