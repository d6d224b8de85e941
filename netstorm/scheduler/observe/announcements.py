"""What nodes have last said of themselves and of the links into them, and which policies there were. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from netstorm.protocol.messages import LinkMeasure, Measured, NodeStatus
from netstorm.scheduler.awareness.network_estimate import LinkEstimate
from netstorm.topology.policy import Policy

__all__ = ["Announcements", "PolicyHistory", "TimedStatus"]

_KEPT: Final = 6
"""Reports of a node from which its present pace is told: those of the last 5 heartbeats."""

_PAST: Final = 20
"""Former policies whose reasons are remembered."""


@dataclass(frozen=True, slots=True)
class TimedStatus:
    """A report of a node, and when it came."""

    at: float
    status: NodeStatus


class Announcements:
    """The newest words of each rank, by rank."""

    def __init__(self, nodes: int) -> None:
        self._reports: Final = tuple(deque[TimedStatus](maxlen=_KEPT) for _ in range(nodes))
        self._links: Final[dict[tuple[int, int], tuple[float, LinkMeasure]]] = {}

    def status(self, rank: int, status: NodeStatus, now: float) -> None:
        """Take a rank's word on how it is doing."""
        self._reports[rank].append(TimedStatus(now, status))

    def measured(self, rank: int, measured: Measured, now: float) -> None:
        """Take a rank's word on the links into it. What it cannot know is left out."""
        for link in measured.links:
            if 0 <= link.source < len(self._reports) and link.source != rank:
                self._links[link.source, rank] = (now, link)

    def reports(self, rank: int) -> tuple[TimedStatus, ...]:
        """Return a rank's last reports, the newest last."""
        return tuple(self._reports[rank])

    def links(self, now: float) -> Callable[[], list[LinkEstimate]]:
        """Return what will say, in any thread, what was last said of each link, as it was said."""
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


class PolicyHistory:
    """Which policy has been in force since when, and the last ones before it."""

    def __init__(self, policy: Policy, now: float) -> None:
        self.since = now
        self._former: deque[tuple[int, str, float, float]] = deque(maxlen=_PAST)
        self._policy = policy

    def installed(self, policy: Policy, now: float) -> None:
        """A policy has taken the place of the one before."""
        before = self._policy
        self._former.append((before.version, before.reason, self.since, now))
        self._policy, self.since = policy, now

    def former(self) -> tuple[tuple[int, str, float, float], ...]:
        """Return version, reason, begin and end of the last policies that are not in force any more."""
        return tuple(self._former)
