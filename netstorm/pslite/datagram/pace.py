"""How fast a lane sends: a minimal rate control, from measured rates and by delay. Pure.

MLT (Wang et al., NSDI 2024, 4.3) lets rates rise while packets see a short delay and fall, in proportion, if
it is long, as TIMELY does (Mittal et al., SIGCOMM 2015); lost packets are no signal, unless they are many.
Its delays are those of a data centre, microseconds. Here they are of wide-area links, and of processes that
other ones keep from running for some milliseconds: a rate that fell with each such delay would end near
nothing. So what rises or falls is not the rate itself but the highest of what was delivered in the last
round trips, as in BBR (Cardwell et al., ACM Queue 14, 2016), which also gives the cycle: try more, drain the
queue, hold.
"""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["Pace"]

_LOW_S: Final = 0.005
_HIGH_S: Final = 0.06
"""Queueing delays below which there is no queue, and above which the rate falls; a quarter of the shortest
round trip is added to the latter."""

_FALL: Final = 0.8
"""MLT's β."""

_MORE: Final = 1.25
_LESS: Final = 0.75
"""Of what is delivered: tried in the first round trip of a cycle; sent in the second if there is a queue."""

_CYCLE: Final = 8
"""Round trips of a cycle, and those of which the highest delivery counts."""

_FULL: Final = 1.25
"""A rate that doubles is the link's once what is delivered grows by less than this, three times in a row."""

_FOUND: Final = 1.1
"""If trying more delivers so many times as much, the link has more, and the rate doubles again."""

_MANY: Final = 0.15
"""Share of packets that may be lost before the rate falls to what is delivered: with more, a queue may
overflow that is too short for its delay to show."""

_SAMPLES: Final = 8
_SAMPLE: Final = 70_000
"""Bytes of which a share that is lost says something."""

_ROUND_S: Final = 0.01
"""Shortest time over which anything is measured: that for which a thread may wait for a processor."""

_BURST_S: Final = 0.02
_PACKET: Final = 1400
_BURST: Final = 8 * _PACKET
"""What may leave at once, in time and in bytes. On a busy machine a thread waits for a processor for as long:
with 2 ms, a lane had a tenth of its rate there."""

_TOGETHER_S: Final = 0.004
"""Packets of so much time leave together, up to eight: a turn of the thread costs as much as five of them."""

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
        self._latest_s: Final[deque[float]] = deque(maxlen=_SAMPLES)
        """The latest round trips, of which the shortest counts: a queue delays all, a busy processor some."""
        self._all_lost = self._all = 0.0
        """Bytes of late: those of the last round trip, half of those of the one before, and so on."""
        self._flat = self._place = 0
        self._before = 0.0
        self._best = 0.0
        self._recent: Final[deque[float]] = deque(maxlen=_CYCLE)
        """What was delivered in the last round trips that the rate has limited."""

    @property
    def window(self) -> int:
        """Bytes that may be in flight: without it, a path that carries nothing would be sent to for long."""
        return int(self.rate * (1.25 * self.min_rtt_s + _HIGH_S)) + 2 * _BURST

    def wait_s(self, now: float) -> float:
        """Return how long the next packet has to wait for its turn."""
        self._earn(now)
        if self._credit > 0:
            return 0.0
        self._limited = True
        together = min(max(_PACKET, self.rate * _TOGETHER_S), _BURST)
        return (together - self._credit) / self.rate

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
        self._latest_s.append(round_trip_s)

    def _end_round(self, now: float) -> None:
        took_s = now - self._round_began
        shortest_s = min(self.min_rtt_s, self._earlier_min_s)
        queue_s = min(self._latest_s, default=shortest_s) - shortest_s
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

    def _adapt(self, queue_s: float, shortest_s: float, delivered: float, share_lost: float) -> None:
        if not self._limited:
            return  # what the link can do was not tried
        self._recent.append(delivered)
        high_s = _HIGH_S + shortest_s / 4
        if queue_s > high_s and delivered < max(self._recent) / 2:
            self._recent.clear()  # the link has slowed down: what it delivered before does not count
            self._recent.append(delivered)
        most = max(self._recent)
        if share_lost > _MANY:
            self._settle(min(self.rate, most))
        elif self._starts:
            self._flat = self._flat + 1 if delivered < _FULL * self._best else 0
            self._best = max(self._best, delivered)
            if queue_s > _LOW_S or self._flat > 2:
                self._settle(most * (_LESS if queue_s > _LOW_S else 1.0))
            else:
                self.rate = min(2 * self.rate, _FASTEST)
        elif queue_s > high_s:
            self._settle(most * max(_LESS, 1 - _FALL * (1 - high_s / queue_s)))
        else:
            self._cycle(most, queue_s)

    def _cycle(self, most: float, queue_s: float) -> None:
        self._place = (self._place + 1) % _CYCLE
        gain = 1.0
        if self._place == 0:
            gain, self._before = _MORE, most
        elif self._place == 1 and queue_s > _LOW_S:
            gain = _LESS
        elif self._place == 2 and most > _FOUND * self._before and queue_s < _LOW_S:
            self._starts, self._flat, self._best, gain = True, 0, most, 2.0
        self.rate = min(_FASTEST, max(_SLOWEST, most * gain))

    def _settle(self, rate: float) -> None:
        self.rate = max(_SLOWEST, rate)
        self._starts, self._place = False, 2
