"""When a link was busy, and how much it carried: from the times at which chunks were sent and arrived. Pure.

A chunk's transfer starts when it was sent plus the link's latency or, if later, when the chunk before it on
that link had arrived (docs/concepts/awareness.md). So a chunk that was sent while earlier ones still filled
the link needs no clock at all: its transfer lasts from their arrival to its own. For other chunks the latency
is the shortest time that anything small (an acknowledgement) took, measured by the same two clocks. What is
subtracted has the same clock error as what it is subtracted from.

One link is seen here by itself: `netstorm.pslite.measurement.access_line` compares several.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

__all__ = ["BusyLink", "BusyPeriod", "RunningMinimum"]

_PERIOD_S: Final = 0.05
"""A busy period that is longer takes no more chunks. Chunks are handed over in batches, some ms late; in a
period of this length that does not matter."""

_BATCH_S: Final = 0.001
_BATCH_PART: Final = 0.25
"""Chunks that arrive within this time, or within this part of a chunk's transfer, were handed over together,
or come one after the other after a stall. Their transfer time is in that of the first one."""

_BATCH: Final = 64
"""Most chunks of a batch: on links of many Gbit/s all chunks arrive that close together."""

_MEMORY_S: Final = 10.0
"""The smallest value counts for so long at least, and for twice as long at most. Routes and clocks change."""

_MOST_PERIODS: Final = 2048
"""Busy periods that may wait for a judgement: 100 s of them."""


class BusyPeriod:
    """A time in which a link was busy without a pause. Times are in s on the receiver's clock."""

    __slots__ = (
        "back_to_back",
        "bits",
        "chunks",
        "contended_s",
        "duration",
        "end",
        "shared_s",
        "start",
        "start_known",
    )

    def __init__(
        self, start: float, end: float, bits: float, *, back_to_back: bool, start_known: bool
    ) -> None:
        self.start: Final = start
        self.end = end
        self.duration = end - start
        self.bits = bits
        self.chunks = 1
        self.back_to_back: Final = back_to_back
        """It began when the chunk before it had arrived, so no clock was needed."""
        self.start_known: Final = start_known
        """Its start was measured. Otherwise it was computed from the rate, so it measures nothing and only
        shows that the link was busy."""
        self.shared_s = 0.0
        """For how long other links of the same node and direction were busy meanwhile."""
        self.contended_s = 0.0
        """For how long other links of the node at the other end were busy meanwhile."""


class RunningMinimum:
    """The smallest value of the last 10 to 20 s."""

    __slots__ = ("_earlier", "_now", "_since", "value")

    def __init__(self) -> None:
        self.value = math.inf
        """Infinite if there was none."""
        self._now = self._earlier = math.inf
        self._since = -math.inf

    def offer(self, value: float, at: float) -> None:
        """Record a value at the time `at`."""
        if at - self._since > _MEMORY_S:
            self._earlier, self._now, self._since = self._now, value, at
            self.value = min(value, self._earlier)
        elif value < self._now:
            self._now = value
            self.value = min(value, self._earlier)


class BusyLink:
    """One direction of a link.

    Attributes:
        rate: bit/s, 0: unknown; whoever estimates it sets it.
        periods: busy periods that have not been taken yet, in order.
        arrived: when the last data message arrived.
    """

    __slots__ = ("_largest_transit", "_open", "_transit", "arrived", "periods", "rate")

    def __init__(self) -> None:
        self.rate = 0.0
        self.periods: Final[deque[BusyPeriod]] = deque(maxlen=_MOST_PERIODS)
        self.arrived = -math.inf
        self._open: BusyPeriod | None = None
        self._transit: Final = RunningMinimum()
        """Of small messages."""
        self._largest_transit: Final = RunningMinimum()
        """Of chunks, including their transfer: an upper bound."""

    @property
    def transit_s(self) -> float:
        """Latency plus the receiver's clock less the sender's, in s; infinite if nothing small ever
        arrived.
        """
        return self._transit.value

    def add_small_message(self, sent: float, arrived: float) -> None:
        """Record a message that is so small that only the latency counts, on any connection."""
        self._transit.offer(arrived - sent, arrived)

    def add_chunk(self, bits: float, sent: float, arrived: float, *, contended: bool = False) -> None:
        """Record a chunk that measures the link; `contended`: other links out of its sender were busy."""
        earlier = self.arrived
        if arrived < earlier:  # a clock was set back
            self.arrived, self._open = arrived, None
            return
        self.arrived = arrived
        self._largest_transit.offer(arrived - sent, arrived)
        transit = self._transit.value
        known = transit < math.inf
        start = sent + (transit if known else self._largest_transit.value)
        current = self._open
        if start <= earlier:
            if current is not None:
                batch_s = _BATCH_S
                if self.rate > 0:
                    batch_s = max(batch_s, _BATCH_PART * bits / self.rate)
                short = current.back_to_back and earlier - current.start < _PERIOD_S
                if short or (arrived - earlier < batch_s and current.chunks < _BATCH):
                    if contended:
                        current.contended_s += arrived - earlier
                    current.end = arrived
                    current.duration = arrived - current.start
                    current.bits += bits
                    current.chunks += 1
                    return
            self._begin(BusyPeriod(earlier, arrived, bits, back_to_back=True, start_known=True))
        elif known:
            self._begin(BusyPeriod(min(start, arrived), arrived, bits, back_to_back=False, start_known=True))
        else:
            start = max(earlier, arrived - (bits / self.rate if self.rate > 0 else 0.0))
            self._begin(BusyPeriod(start, arrived, bits, back_to_back=False, start_known=False))
        if contended and self._open is not None:
            self._open.contended_s = self._open.duration

    def add_unmeasured(self, arrived: float) -> None:
        """Record a message on the same connection that measures nothing."""
        self.arrived, self._open = arrived, None

    def take_until(self, horizon: float) -> list[BusyPeriod]:
        """Return the busy periods that have ended by then, and drop them."""
        taken = []
        periods = self.periods
        while periods and periods[0].end <= horizon:
            taken.append(periods.popleft())
        if taken and taken[-1] is self._open:
            self._open = None
        return taken

    def _begin(self, period: BusyPeriod) -> None:
        self._open = period
        self.periods.append(period)
