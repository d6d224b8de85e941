"""When BBR takes a link for far slower than it is, and should be restarted. Pure.

BBR takes a link for the most that it has delivered in the last ten round trips [1]_, and counts only those
round trips in which there was enough to send. After a pause, losses and a time-out, the first ones that count
may be those in which TCP sent a handful of packets to find out what was lost. BBR then uses the link as if it
were that slow, and sends only a quarter more every eight round trips. On an emulated WAN, links of 35 Mbit/s
were taken for 0.2 to 2 Mbit/s, and it took 3 to 17 s until they were used again. A new connection gets there
after six round trips.

So BBR is restarted on a connection that has less than half of the bandwidth that its link is known to have.
If the link has fallen and nobody has noticed yet, that costs what a new connection costs: for some round
trips more is sent than the link carries.

Where links have only become faster, BBR is left alone. Restarting it whenever its bandwidth grew brought it
there a second or two sooner. But what it sees while queues overflow is up to half too much, and policies that
rest on that are worse than late ones (docs/measurements/estimators.md,
"BBR that takes a link for slow: restarting it").

References:
    .. [1] Cardwell et al., BBR: congestion-based congestion control, ACM Queue 14 (2016).
"""

from __future__ import annotations

import math
from typing import Final

__all__ = ["BbrRestart"]

_TOO_SLOW: Final = 0.5
"""BBR is restarted if its bandwidth is less than this part of what the link is known to carry."""

_GAINED: Final = 1.25
"""A restart was useful if BBR's bandwidth is then so many times what it was."""

_SETTLES_S: Final = 1.0
"""A new or restarted connection is left alone for so long."""

_LONGEST_S: Final = 16.0
"""The pause doubles after each useless restart, up to this."""


class BbrRestart:
    """One connection, checked periodically."""

    __slots__ = ("_had", "_pause_s", "_started")

    def __init__(self) -> None:
        self._started = math.inf
        """When the connection was new or restarted, on the local clock; infinite: it was not checked yet."""
        self._had = 0.0
        """The bandwidth at which it was restarted; 0: the outcome is known."""
        self._pause_s = _SETTLES_S

    def due(self, bandwidth: float, known: float, now: float) -> bool:
        """Return whether BBR should be restarted; the caller does it then.

        Args:
            bandwidth: BBR's estimate of the link, in bit/s; 0: it has none yet, or it is not BBR.
            known: what the link carries, in bit/s; 0: unknown.
            now: s on the local clock.
        """
        self._started = min(self._started, now)
        if bandwidth == 0.0 or now < self._started + _SETTLES_S:
            return False
        if self._had:
            useless = bandwidth < _GAINED * self._had
            self._pause_s = min(2 * self._pause_s, _LONGEST_S) if useless else _SETTLES_S
            self._had = 0.0
        if bandwidth >= _TOO_SLOW * known or now < self._started + self._pause_s:
            return False
        self._started, self._had = now, bandwidth
        return True
