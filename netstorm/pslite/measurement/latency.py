"""A link's one-way latency, from messages and their acknowledgements. Pure.

The two ways are measured on two clocks. Their sum, the round trip, does not depend on how far these clocks
are apart, so the latency is half of it.
"""

from __future__ import annotations

import math
from typing import Final

from netstorm.pslite.measurement.busy_periods import RunningMinimum

__all__ = ["LatencyEstimator"]


class LatencyEstimator:
    """The shortest times between this node and a peer, there and back."""

    __slots__ = ("_back", "_bits", "_there")

    def __init__(self) -> None:
        self._there: Final = RunningMinimum()
        """Of a chunk, including its transfer."""
        self._bits = 0.0
        """Size of the chunk that was the fastest."""
        self._back: Final = RunningMinimum()

    def acknowledged(self, bits: float, sent: float, stamped: float, heard: float) -> None:
        """Record the acknowledgement of a chunk.

        Args:
            bits: size of the chunk.
            sent: when it was sent, in s on the local clock.
            stamped: when the receiver sent the acknowledgement, in s on the receiver's clock.
            heard: when the acknowledgement arrived, in s on the local clock.
        """
        self._back.offer(heard - stamped, heard)
        self._there.offer(stamped - sent, heard)
        if self._there.value == stamped - sent:
            self._bits = bits

    def there_s(self, rate: float) -> float:
        """Return the latency to the peer plus the offset of its clock; `rate` of the link in bit/s, 0:
        unknown.
        """
        return self._there.value - (self._bits / rate if rate > 0 else 0.0)

    def latency_s(self, rate: float) -> float:
        """Return the one-way latency, half of the round trip; -1: unknown."""
        total = self.there_s(rate) + self._back.value
        return max(0.0, total / 2) if rate > 0 and total < math.inf else -1.0
