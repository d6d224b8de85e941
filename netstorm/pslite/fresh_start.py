"""When BBR takes a link for far slower than it is, and should find out anew. Pure.

BBR takes a link for the most that it has delivered in the last ten round trips, and learns that there is
more by sending a quarter more every eight round trips [1]_. So a link that has become five times as fast is
used for seconds as if it had not. And it may take a link for slower than it ever was: of the last ten round
trips only those count in which there was enough to send, so if there was little for a while and then
packets are lost and a time-out comes, the first that count again are those in which TCP sends a handful of
packets to find out what was lost. Seen on an emulated WAN: links of 35 Mbit/s taken for .2 to 2, and 3 to
17 s until they were used again. A connection that is new is there after six round trips.

So a connection is told to start anew if it has less than half of the bandwidth that its link is known to
have, or if its bandwidth climbs while there is no queue. If the link does carry no more, that costs what it
costs when a connection begins: for some round trips more is sent than the link carries. And if the link has
fallen and nobody has noticed yet, then it is noticed.

References:
    .. [1] Cardwell et al., BBR: congestion-based congestion control, ACM Queue 14 (2016).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from netstorm.pslite.progress import Progress

__all__ = ["FreshStart"]

_TOO_LITTLE: Final = 0.5
"""Part of what the link is known to carry that BBR has at most."""

_CLIMBS: Final = 1.4
_CLIMBS_WITHIN_S: Final = 2.5
"""BBR's bandwidth is so many times what it was within this time: more than one of its steps."""

_NO_QUEUE: Final = 1.15
"""Round trips are so many times the shortest at most: not even the last step has filled the link."""

_GAINED: Final = 1.25
"""Starting anew was worth it if BBR has so many times what it had."""

_SETTLES_S: Final = 1.0
"""For so long a connection that has started, or started anew, is left alone."""

_LONGEST_S: Final = 16.0
"""And for so long at most if nothing came of it again and again."""


class FreshStart:
    """One connection, looked at again and again."""

    __slots__ = ("_had", "_of_late", "_pause_s", "_sent_again", "_started")

    def __init__(self) -> None:
        self._started = math.inf
        """When the connection was new, on the local clock; infinite: nobody has looked yet."""
        self._had = 0.0
        """The bandwidth at which it was told to start anew; 0: it is known what came of it."""
        self._pause_s = _SETTLES_S
        self._of_late: Final[deque[tuple[float, float]]] = deque()
        """When it had which bandwidth."""
        self._sent_again = 0

    def due(self, progress: Progress, known: float, now: float) -> bool:
        """Return whether BBR should start anew.

        Args:
            progress: what the kernel says now.
            known: what the link carries, in bit/s; 0: not known.
            now: s, on the local clock.
        """
        self._started = min(self._started, now)
        bandwidth, of_late = progress.bandwidth, self._of_late
        lost, self._sent_again = progress.sent_again > self._sent_again, progress.sent_again
        if bandwidth == 0.0:
            return False  # it is not BBR, or has seen nothing yet
        while of_late and of_late[0][0] < now - _CLIMBS_WITHIN_S:
            of_late.popleft()
        of_late.append((now, bandwidth))
        if now < self._started + _SETTLES_S:
            of_late.clear()
            return False
        if self._had:
            in_vain = bandwidth < _GAINED * self._had
            self._pause_s = min(2 * self._pause_s, _LONGEST_S) if in_vain else _SETTLES_S
            self._had = 0.0
        if now < self._started + self._pause_s:
            return False
        climbs = bandwidth > _CLIMBS * min(before for _, before in of_late)
        no_queue = not lost and progress.round_trip_s <= _NO_QUEUE * progress.shortest_s
        if bandwidth >= _TOO_LITTLE * known and not (climbs and no_queue):
            return False
        self._started, self._had = now, bandwidth
        of_late.clear()
        return True
