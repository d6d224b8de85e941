"""Two estimators of a link's rate: the paper's, and the one over busy periods. Pure.

The paper's [1]_ is the mean of size / (arrival - sent_at) over a number of chunks, tiny ones left out. It
needs synchronised clocks, takes the latency for transfer time, and, where several chunks are under way, the
time that a chunk waits behind those before it.

The busy-period estimator (design, section 4) divides the bits of stretches in which the link was busy by
their durations. Since it divides sums, it does not matter in what batches chunks were handed over.

References:
    .. [1] Li et al., arXiv 2404.11352, Eq. (14).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.pslite.busy_link import Stretch

__all__ = ["Estimate", "History", "PaperEstimator"]

_FADES_S: Final = 3.0
"""A stretch that is older by this weighs a third: shorter than UPDATE_TIME, so that a new rate is seen by the
next policy; longer than a few chunks take on the slowest links."""

_MEMORY_S: Final = 20.0
"""Stretches older than this, compared to the newest, are forgotten."""

_MOST: Final = 512

_ALONE: Final = 0.1
"""Part of a stretch in which other links may be busy without it counting as shared."""

_UNKNOWN: Final = 0.5
"""Standard error, as a fraction, of what was measured once."""

_LEAST: Final = 0.01
"""Standard error that even the most even samples have: headers of TCP, the size of a batch."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A link's rate."""

    rate: float
    """Bit/s."""
    error: float
    """Standard error, as a fraction of `rate`."""
    chunks: int
    """How many chunks it rests on."""
    shared: float = 0.0
    """Part of the time it rests on in which other links of the node were busy."""


class PaperEstimator:
    """The mean over the last chunks of size / (arrival - sent_at)."""

    __slots__ = ("_rates", "impossible")

    def __init__(self, chunks: int) -> None:
        """Average over `chunks` (`PROBE_CHUNK_NUM`)."""
        self._rates: Final[deque[float]] = deque(maxlen=chunks)
        self.impossible = 0
        """Chunks that arrived before they were sent, by clocks that are wrong. They are left out."""

    def chunk(self, bits: float, sent: float, arrived: float) -> None:
        """Take note of a chunk; times in s on the cluster clock."""
        if arrived > sent:
            self._rates.append(bits / (arrived - sent))
        else:
            self.impossible += 1

    def estimate(self) -> Estimate | None:
        """Return the mean; None before there are enough chunks."""
        rates = self._rates
        number = len(rates)
        if number < (rates.maxlen or 1):
            return None
        mean = sum(rates) / number
        if number == 1:
            return Estimate(mean, _UNKNOWN, 1)
        variance = sum((rate - mean) ** 2 for rate in rates) / (number - 1)
        return Estimate(mean, max(_LEAST, math.sqrt(variance / number) / mean), number)


class History:
    """The stretches of one link that still count."""

    __slots__ = ("_stretches",)

    def __init__(self) -> None:
        self._stretches: Final[deque[Stretch]] = deque(maxlen=_MOST)

    def extend(self, stretches: Iterable[Stretch]) -> None:
        """Add what is new, in order, and forget what is old."""
        kept = self._stretches
        kept.extend(one for one in stretches if one.measures)
        while kept and kept[-1].end - kept[0].end > _MEMORY_S:
            kept.popleft()

    def estimate(self, at_least: int, *, independent: bool) -> Estimate | None:
        """Return the rate, from the best stretches of which there are enough; None if there are not.

        Best are those in which no other link was busy and that needed no clock.

        Args:
            at_least: how many chunks are enough (`PROBE_CHUNK_NUM`).
            independent: the node's links don't slow one another: stretches in which others were busy are as
                good as others.
        """
        kept = self._stretches
        alone = (
            kept if independent else [one for one in kept if one.shared_s <= _ALONE * max(one.duration, 1e-9)]
        )
        for choice in (alone, kept):
            for best in ([one for one in choice if one.in_line], choice):
                if sum(one.chunks for one in best) >= at_least:
                    found = _ratio(best)
                    if found is not None:
                        return found
        return None


def _ratio(stretches: Sequence[Stretch]) -> Estimate | None:
    """Return bits over durations, newer ones weighing more, with its standard error from their differences.

    The error of a ratio of sums is that of its residuals (Cochran, Sampling Techniques, §6.4).
    """
    newest = stretches[-1].end
    weights = [math.exp((one.end - newest) / _FADES_S) for one in stretches]
    duration = sum(weight * one.duration for weight, one in zip(weights, stretches, strict=True))
    if duration <= 0:
        return None
    rate = sum(weight * one.bits for weight, one in zip(weights, stretches, strict=True)) / duration
    residuals = sum(
        (weight * (one.bits - rate * one.duration)) ** 2
        for weight, one in zip(weights, stretches, strict=True)
    )
    effective = sum(weights) ** 2 / sum(weight * weight for weight in weights)
    error = _UNKNOWN
    if effective > 1.5:
        error = math.sqrt(residuals * effective / (effective - 1)) / (rate * duration)
        error = min(max(error, _LEAST), _UNKNOWN)
    shared = sum(weight * one.shared_s for weight, one in zip(weights, stretches, strict=True)) / duration
    return Estimate(rate, error, sum(one.chunks for one in stretches), min(shared, 1.0))
