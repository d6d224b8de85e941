"""What went over each link of a process, present or past. Pure."""

from __future__ import annotations

from typing import Final

from netstorm.protocol.frames import Peer
from netstorm.pslite.session.link_counters import LinkCounters

__all__ = ["LinkStatistics"]


class LinkStatistics:
    """Counters by peer and by which side opened the connection. Successive sessions of a link share them."""

    def __init__(self, most: int) -> None:
        """Keep the counters of at most so many links; the oldest are dropped first."""
        self._most: Final = most
        self._counters: Final[dict[tuple[Peer, bool], LinkCounters]] = {}

    def counters(self, peer: Peer, *, opened_here: bool) -> LinkCounters:
        """Return a link's counters."""
        if len(self._counters) > self._most:
            del self._counters[next(iter(self._counters))]
        return self._counters.setdefault((peer, opened_here), LinkCounters())

    def snapshot(self) -> dict[tuple[Peer, bool], dict[str, int]]:
        """Return all numbers by name, by peer and whether the link was opened here."""
        return {link: counters.snapshot() for link, counters in self._counters.items()}
