"""Dropped messages: counted by reason, and logged with their sender at a limited rate. Pure."""

from __future__ import annotations

import logging
from typing import Final

from netstorm.observe.counters import Counters

__all__ = ["Drops"]

_log = logging.getLogger(__name__)

_EVERY_S: Final = 10.0
"""Least time between two log lines of the same reason and sender."""

_REMEMBERED: Final = 1024
"""Most (sender, reason) pairs that are remembered: senders are cheap to make up."""


class Drops:
    """Counts every dropped message as `dropped_REASON`, and logs the first of a kind, then a few."""

    def __init__(self, counters: Counters) -> None:
        self._counters: Final = counters
        self._quiet: dict[tuple[str, str], tuple[float, int]] = {}
        """By pair: until when it is not logged, and how many messages were not logged since."""

    def note(self, reason: str, sender: str, detail: str, now: float) -> None:
        """Record a dropped message.

        Args:
            reason: one word, part of the counter's name.
            sender: who sent it, for a person.
            detail: what was wrong with it.
            now: the time.
        """
        self._counters.add(f"dropped_{reason}")
        until, unlogged = self._quiet.get((sender, reason), (now, 0))
        if now < until:
            self._quiet[sender, reason] = (until, unlogged + 1)
            return
        if len(self._quiet) >= _REMEMBERED:
            self._quiet.clear()
        self._quiet[sender, reason] = (now + _EVERY_S, 0)
        more = f" (and {unlogged} more since)" if unlogged else ""
        _log.warning("dropped a message from %s: %s%s", sender, detail, more)
