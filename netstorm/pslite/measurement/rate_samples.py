"""Samples of one link's rate, and the estimate that follows from some of them. Pure.

The estimate looks at the newest samples, since rates change. It takes a high quantile of their rates,
weighted by duration: many things make a sample slow without the link being slow.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Final, NamedTuple

from netstorm.pslite.measurement.busy_periods import BusyPeriod
from netstorm.pslite.measurement.estimate import LEAST_ERROR, SINGLE_CHUNK_ERROR, Estimate

__all__ = [
    "RATE_QUANTILE",
    "Sample",
    "SampleWindow",
    "contended_s",
    "estimate",
    "newest_samples",
    "newest_window",
    "quantile",
    "sample_of",
    "shared_s",
    "total_duration",
]

RATE_QUANTILE: Final = 0.6
"""The link's rate is this quantile of its samples' rates, weighted by duration. A stall, a lost packet or
TCP's own probing makes samples slow for a while. Only a delay before them makes samples fast."""

_LEAST_SAMPLES: Final = 6
_LEAST_BUSY_S: Final = 0.6
"""An estimate rests on at least so many of the newest samples, which last at least so long together. On an
emulated WAN a changed rate was then right after a second, and an unchanged one as good as with ten times as
much."""

_MEAN_TO_STANDARD_DEVIATION: Final = 1.2533
"""Standard deviation of normally distributed values over the mean of their absolute deviations."""

_QUANTILE_ERROR: Final = 1.27
"""Standard error of this quantile of normally distributed values over the standard error of their mean."""

_KERNEL_SAMPLE_ERROR: Final = 0.1
"""Standard error, as a fraction of the rate, of a single sample of the sender's kernel."""


class Sample(NamedTuple):
    """One measurement of a link. Samples are ordered by rate."""

    rate: float
    """Bit/s."""
    duration: float
    chunks: int
    start: float
    end: float
    shared_s: float
    """For how long other links of this node, or of the node at the other end, were busy."""
    contended_s: float
    """For how long other links of the node at the other end were busy."""
    delivered: bool = False
    """It comes from the sender's kernel, not from the chunks that arrived."""


class SampleWindow(NamedTuple):
    """Some samples of one link, newest first."""

    samples: list[Sample]
    busy_s: float
    """Their duration together."""
    chunks: int


shared_s: Final = operator.attrgetter("shared_s")
contended_s: Final = operator.attrgetter("contended_s")


def sample_of(period: BusyPeriod) -> Sample:
    """Return the sample that a busy period makes."""
    duration = period.duration
    return Sample(
        period.bits / duration,
        duration,
        period.chunks,
        period.start,
        period.end,
        min(duration, max(period.shared_s, period.contended_s)),
        min(duration, period.contended_s),
    )


def total_duration(samples: Iterable[Sample]) -> float:
    """Return the duration of some samples together, in s."""
    return sum(sample.duration for sample in samples)


def newest_window(newest_first: Iterable[Sample], at_least: int) -> SampleWindow:
    """Return as many of the newest samples as an estimate needs: `at_least` chunks, if there are so many."""
    taken: list[Sample] = []
    busy_s, chunks = 0.0, 0
    for sample in newest_first:
        if len(taken) >= _LEAST_SAMPLES and busy_s >= _LEAST_BUSY_S and chunks >= at_least:
            break
        taken.append(sample)
        busy_s += sample.duration
        chunks += sample.chunks
    return SampleWindow(taken, busy_s, chunks)


def newest_samples(
    newest_first: Iterable[Sample], at_least: int, at_least_s: float = 0.0
) -> SampleWindow | None:
    """Return the newest samples; None if they have fewer chunks than `at_least` or last less than
    `at_least_s`.

    A sample of the kernel is exact: one is enough, whatever the number of chunks.
    """
    newest = newest_window(newest_first, at_least)
    exact = any(sample.delivered for sample in newest.samples)
    enough = newest.samples and (exact or newest.chunks >= at_least) and newest.busy_s >= at_least_s
    return newest if enough else None


def quantile(window: SampleWindow, part: float) -> float:
    """Return the rate that is not exceeded for this part of the time; the window must not be empty."""
    rows = sorted(window.samples)
    left = part * window.busy_s
    for sample in rows:
        left -= sample.duration
        if left <= 0:
            return sample.rate
    return rows[-1].rate


def estimate(window: SampleWindow, others_busy_s: float) -> Estimate:
    """Return the rate of some samples, and its error from their scatter.

    Args:
        window: the samples; there must be at least one.
        others_busy_s: for how long other links were busy, too, in s.
    """
    rate, number = quantile(window, RATE_QUANTILE), len(window.samples)
    deviation = (
        _MEAN_TO_STANDARD_DEVIATION * sum([abs(sample.rate / rate - 1) for sample in window.samples]) / number
    )
    delivered = window.samples[0].delivered
    error = _KERNEL_SAMPLE_ERROR if delivered else SINGLE_CHUNK_ERROR
    if number > 1:
        error = min(max(deviation * _QUANTILE_ERROR / math.sqrt(number - 1), LEAST_ERROR), SINGLE_CHUNK_ERROR)
    shared = min(others_busy_s / window.busy_s, 1.0)
    return Estimate(rate, error, window.chunks, shared, delivered)
