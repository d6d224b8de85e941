"""A link's rate by its sender's kernel, which knows what TCP has delivered a quarter of a second later. Pure.

Chunks say less: what came behind a lost packet is handed over late and all at once, so for seconds after a
link has become slower chunks arrive in gaps and bursts; and a link that has become a fifth as fast needs
seconds for the few chunks that an estimate takes. What TCP has delivered, in order or not, is exact from one
look to the next, if TCP had something to send all the time.

Then it is the link's rate, unless TCP itself was the limit: while it looks for the shortest round trip
(PROBE_RTT [1]_), or thinks of the link as slower than it is, or acknowledgements were late. When a link
becomes slower TCP goes on as before for a while: packets are lost or, where queues are long, round trips
become many times as long. So what was slow without either says nothing, at first. In a race on the changing
network nearly all looks at links that had fallen showed losses of more than a tenth, and those that were slow
for no such reason one lost packet at most, and round trips of up to 3.1 times the shortest.

A link that becomes faster is another matter: TCP finds out slowly (BBR sends a quarter more every eight round
trips, if it has enough to send), and what it delivers is what it has been given. But BBR knows what it has
delivered within a round trip, however little there was to send: if that is more than it ever was of late, the
link carries as much.

References:
    .. [1] Cardwell et al., BBR: congestion-based congestion control, ACM Queue 14 (2016).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = ["Delivered", "Progress", "Watch"]

_BUSY: Final = 0.9
"""Part of the time between two looks for which TCP must have had something under way."""

_STARVED: Final = 0.1
"""Part of it for which the receiver may have been the limit."""

_LEAST_SEGMENTS: Final = 16
"""Fewer say nothing: the next look is about a longer time."""

_PROBING: Final = 4
"""Segments under way at most while BBR looks for the shortest round trip."""

_GROWN: Final = 1.02
"""BBR's bandwidth has grown if it is so many times what it was at the last look."""

_NOISE: Final = 1.03
"""And is so many times the rate: it is the largest of many readings."""

_QUEUED: Final = 4.0
_LOST: Final = 0.02
"""Round trips so many times as long as the shortest one, or so many packets lost for each delivered: the link
carries all that it can. Queues that are always there, one's own and those of the way back, make round
trips up to three times as long."""


class Progress(NamedTuple):
    """How far a connection has come, by the kernel of its sender."""

    delivered: int
    """Segments that have arrived at the other end, in order or not."""
    segment: int
    """Bytes of one."""
    sent_again: int
    """Segments."""
    waiting: int
    """Bytes that have not been sent yet."""
    window: int
    """Segments that may be under way."""
    busy_s: float
    """For how long something was under way or waiting, in all."""
    starved_s: float
    """For how long the receiver was the limit."""
    round_trip_s: float
    shortest_s: float
    """The shortest round trip of late."""
    bandwidth: float = 0.0
    """Bit/s that BBR has seen the link deliver, the most of its last ten round trips; 0: it is not BBR."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a link carried while its sender had something to send all the time."""

    start: float
    """Seconds on the local clock."""
    end: float
    bits: float
    """0: TCP itself was the limit."""
    pressed: bool
    """TCP sent more than the link carries: it cannot have done more."""
    at_least: float = 0.0
    """Bit/s that it was found to carry for the first time of late; 0: nothing new."""
    allowed: float = math.inf
    """Bit/s that TCP's window would have let through, had there been no queue."""


class Watch:
    """One connection, looked at again and again."""

    __slots__ = ("_at", "_before", "busy")

    def __init__(self) -> None:
        self._before: Progress | None = None
        self._at = 0.0
        self.busy = 0.0
        """Part of the time between the last two looks in which something was under way."""

    @property
    def waits(self) -> bool:
        """Whether there was something to send when it was last looked at."""
        return self._before is not None and self._before.waiting > 0

    def forget(self) -> None:
        """The connection is gone, or nobody can tell any more."""
        self._before, self.busy = None, 0.0

    def look(self, progress: Progress, now: float) -> Delivered | None:
        """Take what the kernel says now, in s of the local clock; return what was carried since the
        last look, if that is the link's doing.
        """
        was, then = self._before, self._at
        if was is None or progress.delivered < was.delivered or progress.busy_s < was.busy_s or now <= then:
            self._before, self._at, self.busy = progress, now, 0.0  # another connection
            return None
        segments, took = progress.delivered - was.delivered, now - then
        self.busy = min(1.0, (progress.busy_s - was.busy_s) / took)
        waits = was.waiting > 0 and progress.waiting > 0 and self.busy >= _BUSY
        if waits and segments < _LEAST_SEGMENTS:
            return None  # the next look is about all of this
        self._before, self._at = progress, now
        lossy = progress.sent_again - was.sent_again > _LOST * segments
        grown = not lossy and progress.bandwidth > _GROWN * was.bandwidth > 0.0
        at_least = progress.bandwidth / _NOISE if grown else 0.0
        if (
            not waits
            or progress.starved_s - was.starved_s > _STARVED * took
            or min(was.window, progress.window) <= _PROBING
        ):
            return Delivered(then, now, 0.0, pressed=False, at_least=at_least) if grown else None
        pressed = lossy or any(one.round_trip_s > _QUEUED * one.shortest_s for one in (was, progress))
        window = min(was.window, progress.window) * progress.segment * 8.0
        allowed = window / progress.shortest_s if progress.shortest_s else math.inf
        return Delivered(
            then, now, segments * progress.segment * 8.0, pressed=pressed, allowed=allowed, at_least=at_least
        )
