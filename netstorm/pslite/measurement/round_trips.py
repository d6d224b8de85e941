"""The shortest round trips of a node's connections, by its kernel, and which of them are to be told. Pure.

TCP takes the first one from the connection's own handshake, before anything waits in a queue. A report may be
lost, and a scheduler that was started again knows nothing: so all are told again once in a while.
"""

from __future__ import annotations

import math
from typing import Final

from netstorm.protocol.ids import Peer

__all__ = ["RoundTrips"]

_OTHER: Final = 0.02
"""One that has changed by no more, as a part of it, is the same."""

_AGAIN_S: Final = 30.0
"""How often all are told."""


class RoundTrips:
    """Of one node."""

    def __init__(self) -> None:
        self._shortest: Final[dict[Peer, float]] = {}
        self._new: Final[set[Peer]] = set()
        self._told_at = -math.inf

    @property
    def news(self) -> bool:
        """Whether there is one that nobody was told."""
        return bool(self._new)

    def of(self, peer: Peer) -> float:
        """Return the shortest one, in s; 0: not known."""
        return self._shortest.get(peer, 0.0)

    def peers(self) -> list[Peer]:
        """Return those whose is known."""
        return list(self._shortest)

    def take(self, peer: Peer, seconds: float) -> None:
        """Take what the kernel says; 0: it does not know."""
        before = self.of(peer)
        if seconds > 0.0 and abs(seconds - before) > _OTHER * before:
            self._shortest[peer] = seconds
            self._new.add(peer)

    def tell(self, now: float) -> list[Peer]:
        """Return whose are to be told now, in s of the local clock; they will have been."""
        if now >= self._told_at + _AGAIN_S:
            self._told_at = now
            self._new.update(self._shortest)
        told = sorted(self._new)
        self._new.clear()
        return told
