"""The paper's estimator of a link's rate: the mean over the last chunks. Pure.

The estimate is the mean of size / (arrival - sent_at) over `PROBE_CHUNK_NUM` chunks of at least
`PROBE_CHUNK_SIZE` elements [1]_. It needs synchronised clocks. It counts the latency as transfer time and,
where several chunks are in flight, also the time that a chunk waits behind those before it.

References:
    .. [1] Li et al., arXiv 2404.11352, Eq. (14).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from netstorm.pslite.measurement.estimate import LEAST_ERROR, SINGLE_CHUNK_ERROR, Estimate

__all__ = ["PaperEstimator"]


class PaperEstimator:
    """The mean over the last chunks of size / (arrival - sent_at)."""

    __slots__ = ("_rates", "impossible")

    def __init__(self, chunks: int) -> None:
        """Average over `chunks` (`PROBE_CHUNK_NUM`)."""
        self._rates: Final[deque[float]] = deque(maxlen=chunks)
        self.impossible = 0
        """Chunks that arrived before they were sent, according to wrong clocks. They are left out."""

    def add_chunk(self, bits: float, sent: float, arrived: float) -> None:
        """Record a chunk; times in s on the cluster clock."""
        if arrived > sent:
            self._rates.append(bits / (arrived - sent))
        else:
            self.impossible += 1

    def estimate(self) -> Estimate | None:
        """Return the mean; None while there are too few chunks."""
        rates = self._rates
        number = len(rates)
        if number < (rates.maxlen or 1):
            return None
        mean = sum(rates) / number
        if number == 1:
            return Estimate(mean, SINGLE_CHUNK_ERROR, 1)
        variance = sum((rate - mean) ** 2 for rate in rates) / (number - 1)
        return Estimate(mean, max(LEAST_ERROR, math.sqrt(variance / number) / mean), number)
