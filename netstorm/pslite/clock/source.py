"""Whom a node asks for the time. Pure.

Always the scheduler, or as in the paper (arXiv 2404.11352 §VI) along the trees: roots ask the scheduler, and
everybody else its parent. A parent may be a process that has not opened its port, or sit behind a firewall
that lets no UDP through: who gets no answer asks the scheduler, and tries the parent again later.
"""

from __future__ import annotations

import math
from typing import Final, TypeAlias

__all__ = ["Address", "ClockSource"]

Address: TypeAlias = tuple[str, int]
"""Host and UDP port."""

_UNANSWERED: Final = 3
"""Requests in a row after which a parent is given up: packets get lost."""

_PAUSE_S: Final = 120.0
"""How long the scheduler is asked instead."""


class ClockSource:
    """One node's choice. Times are local s."""

    def __init__(self, scheduler: Address) -> None:
        self._scheduler: Final = scheduler
        self._parent: Address | None = None
        self._unanswered = 0
        self._scheduler_until = -math.inf

    def follow(self, parent: Address | None) -> None:
        """Ask this node from now on; None: the scheduler."""
        if parent != self._parent:
            self._parent = parent
            self._unanswered = 0
            self._scheduler_until = -math.inf

    def ask(self, now: float) -> Address:
        """Return whom to ask; it counts as unanswered until `answered`."""
        if self._parent is None or now < self._scheduler_until:
            return self._scheduler
        if self._unanswered >= _UNANSWERED:
            self._unanswered = 0
            self._scheduler_until = now + _PAUSE_S
            return self._scheduler
        self._unanswered += 1
        return self._parent

    def answered(self) -> None:
        """Note an answer that could be used."""
        self._unanswered = 0
