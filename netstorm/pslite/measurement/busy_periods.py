"""When a link was busy, and with how much: from what was sent when, and when it arrived. Pure.

A chunk's transfer starts when it was sent plus the link's latency or, if later, when the chunk before it on
that link had arrived (design, section 4). So a chunk that was sent while those before it still filled the
link needs no clock at all: its transfer lasts from their arrival to its own. For others the latency counts as
the two clocks show it, sender's clock error and receiver's included: what is subtracted is as wrong as what
it is subtracted from. It is the shortest time that anything small (an acknowledgement) took.

A link knows of no sharing: that is `netstorm.pslite.measurement.access_line`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

__all__ = ["BusyLink", "BusyPeriod", "RunningMinimum"]

_STRETCH_S: Final = 0.05
"""A stretch that is longer takes no more chunks: chunks are handed over in batches, ms late, and this is what
drowns it."""

_BATCH_S: Final = 0.001
_BATCH_PART: Final = 0.25
"""Chunks that arrive within this, or within this part of what one takes, were handed over together, or come
one behind the other after a stall: what they took is in the first one's time."""

_BATCH: Final = 64
"""But on links of many Gbit/s they all do, so not more than this."""

_MEMORY_S: Final = 10.0
"""How long the smallest value counts, at least; twice that at most. Routes and clocks change."""

_MOST: Final = 2048
"""Stretches that may wait for a judgement: 100 s of them."""


class BusyPeriod:
    """A time in which a link was busy without a pause. Times are those of the arrivals' clock."""

    __slots__ = ("bits", "chunks", "crowded_s", "duration", "end", "in_line", "measures", "shared_s", "start")

    def __init__(self, start: float, end: float, bits: float, *, in_line: bool, measures: bool) -> None:
        self.start: Final = start
        self.end = end
        self.duration = end - start
        self.bits = bits
        self.chunks = 1
        self.in_line: Final = in_line
        """Began when the chunk before it had arrived: no clock was needed."""
        self.measures: Final = measures
        """Its start is known; else it was worked out from the rate, and only tells that the link was busy."""
        self.shared_s = 0.0
        """How long other links of the same node and direction were busy meanwhile."""
        self.crowded_s = 0.0
        """How long those of the node at the other end were."""


class RunningMinimum:
    """The smallest value of the last 10 to 20 s."""

    __slots__ = ("_earlier", "_now", "_since", "value")

    def __init__(self) -> None:
        self.value = math.inf
        """Infinite if there was none."""
        self._now = self._earlier = math.inf
        self._since = -math.inf

    def offer(self, value: float, at: float) -> None:
        """Take a value of the time `at`."""
        if at - self._since > _MEMORY_S:
            self._earlier, self._now, self._since = self._now, value, at
            self.value = min(value, self._earlier)
        elif value < self._now:
            self._now = value
            self.value = min(value, self._earlier)


class BusyLink:
    """One direction of a link.

    Attributes:
        rate: bit/s, if known, else 0; whoever estimates it sets it.
        stretches: those that nobody has taken yet, in order.
    """

    __slots__ = ("_open", "_signal", "_upper", "arrived", "rate", "stretches")

    def __init__(self) -> None:
        self.rate = 0.0
        self.stretches: Final[deque[BusyPeriod]] = deque(maxlen=_MOST)
        self.arrived = -math.inf
        """When the last data message did."""
        self._open: BusyPeriod | None = None
        self._signal: Final = RunningMinimum()
        self._upper: Final = RunningMinimum()

    @property
    def transit_s(self) -> float:
        """Latency plus the arrivals' clock less the senders'; infinite if nothing small ever came."""
        return self._signal.value

    def signal(self, sent: float, arrived: float) -> None:
        """Take note of a message so small that only the latency counts, on whichever connection."""
        self._signal.offer(arrived - sent, arrived)

    def chunk(self, bits: float, sent: float, arrived: float, *, crowded: bool = False) -> None:
        """Take note of a chunk that measures; `crowded`: other links of its sender were busy."""
        earlier = self.arrived
        if arrived < earlier:  # a clock was set back
            self.arrived, self._open = arrived, None
            return
        self.arrived = arrived
        self._upper.offer(arrived - sent, arrived)
        transit = self._signal.value
        known = transit < math.inf
        start = sent + (transit if known else self._upper.value)
        current = self._open
        if start <= earlier:
            if current is not None:
                mates = _BATCH_S
                if self.rate > 0:
                    mates = max(mates, _BATCH_PART * bits / self.rate)
                short = current.in_line and earlier - current.start < _STRETCH_S
                if short or (arrived - earlier < mates and current.chunks < _BATCH):
                    if crowded:
                        current.crowded_s += arrived - earlier
                    current.end = arrived
                    current.duration = arrived - current.start
                    current.bits += bits
                    current.chunks += 1
                    return
            self._begin(BusyPeriod(earlier, arrived, bits, in_line=True, measures=True))
        elif known:
            self._begin(BusyPeriod(min(start, arrived), arrived, bits, in_line=False, measures=True))
        else:
            start = max(earlier, arrived - (bits / self.rate if self.rate > 0 else 0.0))
            self._begin(BusyPeriod(start, arrived, bits, in_line=False, measures=False))
        if crowded and self._open is not None:
            self._open.crowded_s = self._open.duration

    def other(self, arrived: float) -> None:
        """Take note of something on the same connection that measures nothing."""
        self.arrived, self._open = arrived, None

    def take_until(self, horizon: float) -> list[BusyPeriod]:
        """Return the stretches that have ended by then, and forget them."""
        taken = []
        stretches = self.stretches
        while stretches and stretches[0].end <= horizon:
            taken.append(stretches.popleft())
        if taken and taken[-1] is self._open:
            self._open = None
        return taken

    def _begin(self, stretch: BusyPeriod) -> None:
        self._open = stretch
        self.stretches.append(stretch)
