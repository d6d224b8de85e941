"""The shortest round trips of a node's connections, by its kernel, and which of them to report. Pure.

TCP takes the first one from the connection's handshake, before anything waits in a queue. All of them are
reported again from time to time, since a report may be lost and a restarted scheduler knows nothing.
"""

from __future__ import annotations

import math
from typing import Final

from netstorm.protocol.frames import Peer

__all__ = ["RoundTrips"]

_SAME: Final = 0.02
"""Relative change up to which a round trip counts as unchanged."""

_REPEAT_S: Final = 30.0
"""How often all round trips are reported."""


class RoundTrips:
    """The round trips of one node, by peer."""

    def __init__(self) -> None:
        self._shortest: Final[dict[Peer, float]] = {}
        self._changed: Final[set[Peer]] = set()
        self._repeated_at = -math.inf

    @property
    def changed(self) -> bool:
        """Whether some round trip has changed since the last report."""
        return bool(self._changed)

    def of(self, peer: Peer) -> float:
        """Return the shortest round trip in s; 0: unknown."""
        return self._shortest.get(peer, 0.0)

    def peers(self) -> list[Peer]:
        """Return the peers whose round trip is known."""
        return list(self._shortest)

    def record(self, peer: Peer, seconds: float) -> None:
        """Record the kernel's value; 0: the kernel does not know it."""
        before = self.of(peer)
        if seconds > 0.0 and abs(seconds - before) > _SAME * before:
            self._shortest[peer] = seconds
            self._changed.add(peer)

    def take_changes(self, now: float) -> list[Peer]:
        """Return the peers to report now (s on the local clock), and count them as reported."""
        if now >= self._repeated_at + _REPEAT_S:
            self._repeated_at = now
            self._changed.update(self._shortest)
        peers = sorted(self._changed)
        self._changed.clear()
        return peers
