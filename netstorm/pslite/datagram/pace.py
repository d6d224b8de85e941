"""How fast a lane sends: a minimal rate control by delay, as MLT's (Wang et al., NSDI 2024, 4.3). Pure.

Lost packets are no signal, unless they are many: what is lost comes again, or need not come. The delay of a
queue is one, as in TIMELY (Mittal et al., SIGCOMM 2015): while it is short the rate rises, step by step; if
it is long the rate falls, in proportion. MLT's thresholds are those of a data centre's microseconds; here
they are of wide-area links, and of processes that other ones keep from running for some milliseconds. And
what rises or falls is not the rate itself but what has been delivered, as in BBR: a wide-area link answers a
whole round trip later, and a rate that falls again and again for one and the same queue ends near nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["Pace"]

_LOW_S: Final = 0.005
_HIGH_S: Final = 0.025
"""Queueing delays below which the rate rises, and above which it falls; a quarter of the shortest round trip
is added to the latter."""

_RISE: Final = 0.1
"""Part by which the rate is above what is delivered while there is no queue; three times as much after five
such round trips in a row (TIMELY's hyperactive increase): a link whose rate has come back is used again
within a second."""

_FULL: Final = 1.25
"""A rate that doubles is the link's once what is delivered grows by less than this, three times in a row."""

_DRAIN: Final = 0.97
"""Part of what is delivered that is sent while there is a short queue."""

_ROUNDS: Final = 4
"""Round trips of which the highest delivery counts: not all of them have had enough to send."""

_FALL: Final = 0.8
"""MLT's β."""

_MANY: Final = 0.15
"""Share of packets that may be lost before the rate falls to what is delivered: with more, a queue may
overflow that is too short for its delay to show."""

_SAMPLE: Final = 70_000
"""Bytes of which a share that is lost says something."""

_ROUND_S: Final = 0.01
"""Shortest time over which anything is measured: that for which a thread may wait for a processor."""

_BURST_S: Final = 0.002
_BURST: Final = 8 * 1400
"""What may leave at once, in time and in bytes: timers are not more precise."""

_SLOWEST: Final = 20_000.0
"""Bytes/s that are always tried."""

_FASTEST: Final = 1.25e9
_MEMORY_S: Final = 10.0
"""For how long a shortest round trip counts; up to twice as long."""


class Pace:
    """The rate of one lane.

    Attributes:
        rate: in bytes/s.
        delivered: bytes/s that have arrived lately while packets were waiting; 0: unknown.
        round_trip_s: smoothed; of the path, its queues and the other side's turns.
        min_rtt_s: the shortest of late.
    """

    def __init__(self, round_trip_s: float, rate: float, now: float) -> None:
        """Begin with what is known of the link; `rate` 0: ten packets a round trip."""
        self.min_rtt_s = max(round_trip_s, 1e-4)
        self.round_trip_s = self.min_rtt_s
        self.rate = max(rate, 14_000 / max(self.min_rtt_s, _ROUND_S), _SLOWEST)
        self.delivered = 0.0
        self._earlier_min_s = self.min_rtt_s
        self._min_since = now
        self._credit = float(_BURST)
        self._credit_at = now
        self._starts = True
        """Nobody knows yet how fast the link is: the rate doubles with each round trip."""
        self._round_began = now
        self._acked = self._lost = 0
        self._limited = False
        """The rate has held a packet back in this round trip."""
        self._delays_s = 0.0
        self._samples = 0
        self._all_lost = self._all = 0.0
        """Bytes of late: those of the last round trip, half of those of the one before, and so on."""
        self._rises = self._flat = 0
        self._best = 0.0
        self._recent: Final[deque[float]] = deque(maxlen=_ROUNDS)
        """What was delivered in the last round trips that the rate has limited."""

    @property
    def window(self) -> int:
        """Bytes that may be in flight: without it, a path that carries nothing would be sent to for long."""
        return int(self.rate * (1.25 * self.min_rtt_s + 2 * _HIGH_S)) + 2 * _BURST

    def wait_s(self, now: float) -> float:
        """Return how long the next packet has to wait for its turn."""
        self._earn(now)
        if self._credit > 0:
            return 0.0
        self._limited = True
        return (1400 - self._credit) / self.rate

    def held_back(self) -> None:
        """Record that the window has held a packet back."""
        self._limited = True

    def sent(self, nbytes: int) -> None:
        """Record a packet."""
        self._credit -= nbytes

    def acknowledged(self, nbytes: int, round_trip_s: float | None, now: float) -> None:
        """Record what has arrived; `round_trip_s`: of the last packet of those, if it is known."""
        self._acked += nbytes
        if round_trip_s is not None:
            self._measure(max(round_trip_s, 1e-5), now)
        if now >= self._round_began + max(self.round_trip_s, _ROUND_S):
            self._end_round(now)

    def lost(self, nbytes: int) -> None:
        """Record what has not."""
        self._lost += nbytes

    def silent(self) -> None:
        """Record that nothing at all comes back: the rate halves, and what was known may be wrong."""
        self.rate = max(_SLOWEST, self.rate / 2)
        self._starts = False

    def _earn(self, now: float) -> None:
        most = max(_BURST, self.rate * _BURST_S)
        self._credit = min(most, self._credit + max(0.0, now - self._credit_at) * self.rate)
        self._credit_at = now

    def _measure(self, round_trip_s: float, now: float) -> None:
        if now >= self._min_since + _MEMORY_S:
            self._earlier_min_s, self._min_since = self.min_rtt_s, now
            self.min_rtt_s = round_trip_s
        self.min_rtt_s = min(self.min_rtt_s, round_trip_s)
        self.round_trip_s += (round_trip_s - self.round_trip_s) / 8
        self._delays_s += round_trip_s
        self._samples += 1

    def _end_round(self, now: float) -> None:
        took_s = now - self._round_began
        shortest_s = min(self.min_rtt_s, self._earlier_min_s)
        queue_s = self._delays_s / self._samples - shortest_s if self._samples else 0.0
        delivered = self._acked / took_s
        if self._limited:
            self.delivered = delivered
        self._all_lost = self._all_lost / 2 + self._lost
        self._all = self._all / 2 + self._lost + self._acked
        share_lost = self._all_lost / self._all if self._all >= _SAMPLE else 0.0
        self._adapt(queue_s, shortest_s, delivered, share_lost)
        self._round_began = now
        self._acked = self._lost = 0
        self._limited = False
        self._delays_s, self._samples = 0.0, 0

    def _adapt(self, queue_s: float, shortest_s: float, delivered: float, share_lost: float) -> None:
        high_s = _HIGH_S + shortest_s / 4
        if self._limited:
            self._recent.append(delivered)
        if queue_s > high_s:
            self._settle(min(self.rate, delivered) * (1 - min(0.5, _FALL * (1 - high_s / queue_s))))
        elif share_lost > _MANY:
            self._settle(min(self.rate, max(self._recent, default=delivered)))
        elif not self._limited:
            return
        elif self._starts:
            self._flat = self._flat + 1 if delivered < _FULL * self._best else 0
            self._best = max(self._best, delivered)
            if queue_s > _LOW_S or self._flat > 2:
                self._settle(self._best)
            else:
                self.rate = min(2 * self.rate, _FASTEST)
        elif queue_s < _LOW_S:
            self._rises += 1
            rise = _RISE * (3 if self._rises > 5 else 1)
            self.rate = min(_FASTEST, max(self._recent) * (1 + rise))
        else:
            self._settle(_DRAIN * max(self._recent))

    def _settle(self, rate: float) -> None:
        self.rate = max(_SLOWEST, rate)
        self._starts, self._rises = False, 0
