"""When BBR takes a link for far slower than it is, and should find out anew. Pure.

BBR takes a link for the most that it has delivered in the last ten round trips [1]_. Of these only those
count in which there was enough to send, so if there was little for a while and then packets are lost and a
time-out comes, the first that count again are those in which TCP sends a handful of packets to find out
what was lost. From then on the link is used as if it were so slow, and BBR learns that there is more by
sending a quarter more every eight round trips. Seen on an emulated WAN: links of 35 Mbit/s taken for .2 to
2, and 3 to 17 s until they were used again. A connection that is new is there after six round trips.

So a connection that has less than half of the bandwidth that its link is known to have is told to start
anew. If the link has fallen and nobody has noticed yet, that costs what it costs when a connection begins:
for some round trips more is sent than the link carries. And it is noticed.

Where links have only become faster BBR is left to climb: to have it start anew whenever its bandwidth grew
brought it there a second or two sooner, but what it sees while queues overflow is up to half too much, and
policies that rest on that are worse than late ones.

References:
    .. [1] Cardwell et al., BBR: congestion-based congestion control, ACM Queue 14 (2016).
"""

from __future__ import annotations

import math
from typing import Final

__all__ = ["BbrRestart"]

_TOO_LITTLE: Final = 0.5
"""Part of what the link is known to carry that BBR has at most."""

_GAINED: Final = 1.25
"""Starting anew was worth it if BBR has so many times what it had."""

_SETTLES_S: Final = 1.0
"""For so long a connection that has started, or started anew, is left alone."""

_LONGEST_S: Final = 16.0
"""And for so long at most if nothing came of it again and again."""


class BbrRestart:
    """One connection, looked at again and again."""

    __slots__ = ("_had", "_pause_s", "_started")

    def __init__(self) -> None:
        self._started = math.inf
        """When the connection was new, on the local clock; infinite: nobody has looked yet."""
        self._had = 0.0
        """The bandwidth at which it was told to start anew; 0: it is known what came of it."""
        self._pause_s = _SETTLES_S

    def due(self, bandwidth: float, known: float, now: float) -> bool:
        """Return whether BBR should start anew.

        Args:
            bandwidth: what BBR takes the link for, in bit/s; 0: it has seen nothing yet, or it is not BBR.
            known: what the link carries, in bit/s; 0: not known.
            now: s, on the local clock.
        """
        self._started = min(self._started, now)
        if bandwidth == 0.0 or now < self._started + _SETTLES_S:
            return False
        if self._had:
            in_vain = bandwidth < _GAINED * self._had
            self._pause_s = min(2 * self._pause_s, _LONGEST_S) if in_vain else _SETTLES_S
            self._had = 0.0
        if bandwidth >= _TOO_LITTLE * known or now < self._started + self._pause_s:
            return False
        self._started, self._had = now, bandwidth
        return True
