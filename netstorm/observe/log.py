"""What a process counts, what it drops, and where its log goes."""

from __future__ import annotations

import logging
from typing import Final

from netstorm.addresses import plain_address
from netstorm.protocol.frames import printable
from netstorm.settings import Settings

__all__ = ["Counters", "Drops", "configure_logging"]


_FORMAT: Final = "%(asctime)s netstorm %(levelname)s %(message)s"


def configure_logging(settings: Settings) -> None:
    """Send the package's log to standard error, unless the program has set up logging itself.

    Twice does no harm.
    """
    logger = logging.getLogger("netstorm")
    level = logging.getLevelName(settings.log_level.upper())
    if settings.verbose:
        level = min(level, logging.INFO if settings.verbose == 1 else logging.DEBUG)
    logger.setLevel(level)
    if logging.getLogger().handlers or logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.propagate = False


class Counters:
    """Named numbers of a process that only grow. One thread writes; any thread may take a snapshot."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount` to the counter `name`."""
        self._values[name] = self._values.get(name, 0) + amount

    def get(self, name: str) -> float:
        """Return a counter's value; 0 if nothing was added."""
        return self._values.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        """Return a copy of all counters."""
        return dict(self._values)


_log = logging.getLogger(__name__)

_EVERY_S: Final = 10.0
"""Least time between two log lines of the same reason and sender."""

_MOST_LINES: Final = 20
"""Of one reason in that time, whoever the senders are: strangers can be many."""

_MOST_CHARACTERS: Final = 500
"""Of what was wrong with a message: it may quote the message."""

_REMEMBERED: Final = 1024
"""Most (sender, reason) pairs that are remembered: senders are cheap to make up."""


class Drops:
    """Counts every dropped message as `dropped_REASON`, and logs the first of a kind, then a few, however
    many senders there are.
    """

    def __init__(
        self, counters: Counters, *, counted_as: str = "dropped", what: str = "dropped a message"
    ) -> None:
        """Count something else, such as refused connections, under another name."""
        self._counters: Final = counters
        self._counted_as: Final = counted_as
        self._what: Final = what
        self._quiet: dict[tuple[str, str], tuple[float, int]] = {}
        """By pair: until when it is not logged, and how many messages were not logged since."""
        self._lines: Final[dict[str, tuple[float, int, int]]] = {}
        """By reason: until when lines are counted, how many there were, and how many were left out."""

    def note(self, reason: str, sender: str, detail: str, now: float) -> None:
        """Record a dropped message.

        Args:
            reason: one word, part of the counter's name.
            sender: who sent it, for a person.
            detail: what was wrong with it.
            now: the time.
        """
        self._counters.add(f"{self._counted_as}_{reason}")
        until, unlogged = self._quiet.get((sender, reason), (now, 0))
        if now < until:
            self._quiet[sender, reason] = (until, unlogged + 1)
            return
        if len(self._quiet) >= _REMEMBERED:
            self._quiet.clear()
        self._quiet[sender, reason] = (now + _EVERY_S, 0)
        left_out = self._take_line(reason, now)
        if left_out is None:
            return
        more = f" (and {unlogged} more since)" if unlogged else ""
        others = f" (and {left_out} from others)" if left_out else ""
        if len(detail) > _MOST_CHARACTERS:
            detail = detail[:_MOST_CHARACTERS] + "..."
        _log.warning("%s from %s: %s%s%s", self._what, plain_address(sender), printable(detail), more, others)

    def _take_line(self, reason: str, now: float) -> int | None:
        """Return how many lines of a reason were left out before this one; None: it is left out, too."""
        until, lines, left_out = self._lines.get(reason, (now, 0, 0))
        if now >= until:
            self._lines[reason] = (now + _EVERY_S, 1, 0)
            return left_out
        if lines >= _MOST_LINES:
            self._lines[reason] = (until, lines, left_out + 1)
            return None
        self._lines[reason] = (until, lines + 1, left_out)
        return 0
