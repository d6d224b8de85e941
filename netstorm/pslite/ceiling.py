"""Whether the connections out of a node share an access line, by what its kernel has delivered on each. Pure.

Behind a common line the total keeps to a ceiling while the connections trade: TCP's flows are never equally
fast for long, and what one of them loses the others gain. Connections that share nothing are steady while
they have something to send; if one of them changes, the total does.

So looked at are windows of time in which several connections had something to send all the time. If their
total is at its highest often, and yet what each of them carried in these windows differs clearly from one to
the next, that is a cap. On emulated WANs the middle one of these differences was 1 to 3 % of the total where
nothing was shared, also while links changed, and 4 to 14 % behind most of the lines that were the limit.

Chunks do not show that: behind a line that drops packets they are handed over late and all at once. And it
needs no time in which fewer connections are busy, as `netstorm.pslite.access` does.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from netstorm.protocol.ids import Peer
from netstorm.pslite.progress import Progress

__all__ = ["Ceiling"]

_WINDOW_S: Final = 1.0
_ROUND_TRIPS: Final = 4.0
"""A window lasts so many round trips at least: what was delivered is known a round trip later, and these
differ."""

_BUSY: Final = 0.9
"""Part of a window in which a connection must have had something under way."""

_MEMORY_S: Final = 60.0
_PLACE: Final = 0.9
"""Where in the order of the windows' totals the ceiling is: what is above it was delivered in the window
before, and acknowledged late."""

_NEAR: Final = 0.05
"""Totals that are so near to it are at the ceiling."""

_LEAST: Final = 5
"""Windows at the ceiling, and pairs of them."""

_OFTEN: Final = 1 / 3
"""Part of the windows that are at the ceiling, behind a cap."""

_SOON_S: Final = 15.0
"""Windows are compared that are no further apart, since links change."""

_TRADED: Final = 0.03
"""Part of the total that connections have won or lost between two windows, behind a cap."""


@dataclass(frozen=True, slots=True)
class _Window:
    """What each connection carried in some time."""

    end: float
    total: float
    """Bit/s."""
    rates: Mapping[Peer, float]
    """Of those that had something to send all the time."""


class Ceiling:
    """All connections out of a node.

    Attributes:
        cap: bit/s that they share; 0: nobody knows of any.
    """

    def __init__(self) -> None:
        self.cap = 0.0
        self._windows: Final[deque[_Window]] = deque()
        """Those in which several had."""
        self._first: dict[Peer, Progress] = {}
        self._since = 0.0
        self._eager: set[Peer] = set()
        """Those that had, at each look since."""

    def look(self, told: Mapping[Peer, Progress], now: float) -> None:
        """Take how far all connections have come; `now` in s of the local clock."""
        waiting = {peer for peer, one in told.items() if one.waiting > 0}
        self._eager &= waiting
        lasts = now - self._since
        if lasts < max([_WINDOW_S, *(_ROUND_TRIPS * told[peer].shortest_s for peer in self._eager)]):
            return
        carried = {
            peer: (one.delivered - was.delivered) * one.segment * 8.0 / lasts
            for peer, one in told.items()
            if (was := self._first.get(peer)) is not None
            and one.delivered >= was.delivered  # else it is another connection
            and one.busy_s - was.busy_s >= _BUSY * lasts
        }
        rates = {peer: rate for peer, rate in carried.items() if peer in self._eager}
        if len(rates) > 1:
            self._windows.append(_Window(now, sum(carried.values()), rates))
        while self._windows and self._windows[0].end < now - _MEMORY_S:
            self._windows.popleft()
        self._first, self._since, self._eager = dict(told), now, waiting
        self.cap = self._cap()

    def _cap(self) -> float:
        windows = self._windows
        if len(windows) < _LEAST:
            return 0.0
        totals = sorted(one.total for one in windows)
        ceiling = totals[int(_PLACE * (len(totals) - 1))]
        near = [one for one in windows if abs(one.total - ceiling) <= _NEAR * ceiling]
        if len(near) < max(_LEAST, _OFTEN * len(windows)):
            return 0.0
        traded = list(_traded(near))
        if len(traded) < _LEAST or statistics.median(traded) < _TRADED * ceiling:
            return 0.0
        return statistics.fmean(one.total for one in near)


def _traded(windows: list[_Window]) -> Iterator[float]:
    """Yield how much, in bit/s, connections have won or lost from one window to another."""
    for one, other in itertools.combinations(windows, 2):
        both = one.rates.keys() & other.rates.keys()
        if len(both) > 1 and other.end - one.end <= _SOON_S:
            yield sum(abs(one.rates[peer] - other.rates[peer]) for peer in both) / 2
