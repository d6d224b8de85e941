"""What a link carried, from the amounts that its sender's kernel reports as delivered. Pure.

Chunks say less. Data behind a lost packet is handed over late and all at once, so chunks arrive in gaps and
bursts for seconds after a link has become slower, and a slow link has few of them. What TCP has delivered, in
order or not, is exact from one sample to the next, if TCP had data to send all the time.

That is the link's rate, unless TCP itself was the limit: while BBR looks for the shortest round trip
(PROBE_RTT [1]_), while it takes the link for slower than it is, or when acknowledgements were late. When a
link becomes slower, TCP goes on as before for a while, so packets are lost or, where queues are long, round
trips become many times as long. A low rate without either says nothing at first. In a race on the changing
network, nearly all samples of links that had fallen showed losses of more than a tenth. Those that were slow
for no such reason showed one lost packet at most, and round trips of up to 3.1 times the shortest.

When a link becomes faster, TCP finds out slowly: BBR sends a quarter more every eight round trips, if it has
enough to send. But BBR knows what was delivered within a round trip, however little there was to send. If
that is more than it ever was of late, the link carries at least as much.

References:
    .. [1] Cardwell et al., BBR: congestion-based congestion control, ACM Queue 14 (2016).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = ["DeliveryMonitor", "DeliverySample", "Progress"]

_BUSY: Final = 0.9
"""Part of the time between two samples for which TCP must have had data in flight."""

_RECEIVER_LIMITED: Final = 0.1
"""Part of the time between two samples for which the receiver may have been the limit."""

_LEAST_SEGMENTS: Final = 16
"""Fewer delivered segments say nothing: the next sample covers a longer time."""

_PROBE_RTT_WINDOW: Final = 4
"""Most segments in flight while BBR looks for the shortest round trip."""

_GROWTH: Final = 1.02
"""BBR's bandwidth has grown if it is so many times that of the last sample."""

_NOISE: Final = 1.03
"""BBR's bandwidth is so many times the link's rate: it is the largest of many readings."""

_LONG_QUEUE: Final = 4.0
_LOSS: Final = 0.02
"""The link is saturated if round trips are so many times as long as the shortest one, or if so many packets
are lost for each delivered one. Permanent queues, one's own and those of the way back, make round trips up to
three times as long."""


class Progress(NamedTuple):
    """How much a TCP connection has delivered, by the kernel of its sender."""

    delivered: int
    """Segments that have arrived at the other end, in order or not."""
    segment: int
    """Bytes of one segment."""
    retransmitted: int
    """Segments."""
    unsent: int
    """Bytes that have not been sent yet."""
    window: int
    """Segments that may be in flight."""
    busy_s: float
    """For how long data was in flight or waiting, in all."""
    receiver_limited_s: float
    """For how long the receiver's window was the limit, in all."""
    smoothed_rtt_s: float
    min_rtt_s: float
    """The shortest round trip of late."""
    bandwidth: float = 0.0
    """Bit/s: the most that BBR saw the link deliver in its last ten round trips; 0: it is not BBR."""


@dataclass(frozen=True, slots=True)
class DeliverySample:
    """What a link carried while its sender had data to send all the time."""

    start: float
    """Seconds on the local clock."""
    end: float
    bits: float
    """0: TCP itself was the limit."""
    saturated: bool
    """TCP sent more than the link carries: the link could not have carried more."""
    lower_bound: float = 0.0
    """Bit/s that the link was found to carry for the first time of late; 0: nothing new."""
    window_rate: float = math.inf
    """Bit/s that TCP's window would have allowed without any queue."""


class DeliveryMonitor:
    """One connection, sampled periodically."""

    __slots__ = ("_at", "_before", "busy")

    def __init__(self) -> None:
        self._before: Progress | None = None
        self._at = 0.0
        self.busy = 0.0
        """Part of the time between the last two samples in which data was in flight."""

    @property
    def has_backlog(self) -> bool:
        """Whether the last sample showed unsent data."""
        return self._before is not None and self._before.unsent > 0

    def reset(self) -> None:
        """Forget the last sample: the connection is gone, or the kernel says nothing any more."""
        self._before, self.busy = None, 0.0

    def sample(self, progress: Progress, now: float) -> DeliverySample | None:
        """Add the kernel's present values; `now` in s on the local clock.

        Returns:
            What the link carried since the last sample; None if that says nothing about the link.
        """
        was, then = self._before, self._at
        if was is None or progress.delivered < was.delivered or progress.busy_s < was.busy_s or now <= then:
            self._before, self._at, self.busy = progress, now, 0.0  # another connection
            return None
        segments, took = progress.delivered - was.delivered, now - then
        self.busy = min(1.0, (progress.busy_s - was.busy_s) / took)
        backlogged = was.unsent > 0 and progress.unsent > 0 and self.busy >= _BUSY
        if backlogged and segments < _LEAST_SEGMENTS:
            return None  # the next sample covers all of this time
        self._before, self._at = progress, now
        lossy = progress.retransmitted - was.retransmitted > _LOSS * segments
        grown = not lossy and progress.bandwidth > _GROWTH * was.bandwidth > 0.0
        lower_bound = progress.bandwidth / _NOISE if grown else 0.0
        if (
            not backlogged
            or progress.receiver_limited_s - was.receiver_limited_s > _RECEIVER_LIMITED * took
            or min(was.window, progress.window) <= _PROBE_RTT_WINDOW
        ):
            if not grown:
                return None
            return DeliverySample(then, now, 0.0, saturated=False, lower_bound=lower_bound)
        saturated = lossy or any(
            state.smoothed_rtt_s > _LONG_QUEUE * state.min_rtt_s for state in (was, progress)
        )
        window = min(was.window, progress.window) * progress.segment * 8.0
        return DeliverySample(
            then,
            now,
            segments * progress.segment * 8.0,
            saturated=saturated,
            lower_bound=lower_bound,
            window_rate=window / progress.min_rtt_s if progress.min_rtt_s else math.inf,
        )
