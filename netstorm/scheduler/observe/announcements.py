"""Announcements: what nodes last reported of themselves and of the links into them. Pure."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from netstorm.protocol.messages import LinkMeasure, Measured, NodeStatus
from netstorm.scheduler.awareness.network_estimate import LinkEstimate

__all__ = ["MOST_CHARACTERS", "Announcements", "TimedStatus"]

_log = logging.getLogger(__name__)

MOST_CHARACTERS: Final = 300
"""Of a text that a node says of itself."""

_REMEMBERED_TEXTS: Final = 32

_LOG_EVERY_S: Final = 1.0
"""A node cannot fill the log."""

_REMEMBERED: Final = 6
"""Reports of a node from which its present rates are computed: those of the last 5 heartbeat intervals."""


@dataclass(frozen=True, slots=True)
class TimedStatus:
    """A report of a node, and when it came."""

    at: float
    status: NodeStatus


class Announcements:
    """The newest reports of each rank."""

    def __init__(self, nodes: int) -> None:
        self._reports: Final = tuple(deque[TimedStatus](maxlen=_REMEMBERED) for _ in range(nodes))
        self._logged: Final[deque[str]] = deque(maxlen=_REMEMBERED_TEXTS)
        """What ranks have said of compression, which all say one after the other."""
        self._logged_at = -math.inf
        self._links: Final[dict[tuple[int, int], tuple[float, LinkMeasure]]] = {}

    def record_status(self, rank: int, status: NodeStatus, now: float) -> None:
        """Record a rank's report of itself."""
        self._reports[rank].append(TimedStatus(now, status))
        text = status.compression[:MOST_CHARACTERS]
        if text and text not in self._logged and now - self._logged_at >= _LOG_EVERY_S:
            self._logged.append(text)
            self._logged_at = now
            _log.info("compression: %s", "".join(each for each in text if each.isprintable()))

    def record_links(self, rank: int, measured: Measured, now: float) -> None:
        """Record a rank's report of the links into it. Links that cannot exist are left out."""
        for link in measured.links:
            if 0 <= link.source < len(self._reports) and link.source != rank:
                self._links[link.source, rank] = (now, link)

    def reports(self, rank: int) -> tuple[TimedStatus, ...]:
        """Return a rank's last reports of itself, the newest last."""
        return tuple(self._reports[rank])

    def links(self, now: float) -> Callable[[], list[LinkEstimate]]:
        """Return a function that makes estimates of all links, as last reported. Any thread may call it."""
        links = self._links.copy()
        return lambda: [
            LinkEstimate(
                source=source,
                target=target,
                rate=measure.rate,
                error=measure.error,
                latency=measure.latency,
                age=now - at if measure.rate > 0 else math.inf,
                censored=False,
            )
            for (source, target), (at, measure) in sorted(links.items())
        ]
