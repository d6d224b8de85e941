"""The default estimator of a link's rate: which samples still count, and whether the link has changed. Pure.

Its samples are busy periods, of chunks that arrived (`NETSTORM_ESTIMATOR=busy`), and what the sender's kernel
has delivered (`tcp`). Samples that are too old, or from before the link changed, are dropped. How a rate
follows from the others is in `rate_samples`; docs/measurements/estimators.md has the measurements behind the
thresholds.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from netstorm.pslite.measurement.busy_periods import BusyPeriod
from netstorm.pslite.measurement.estimate import Estimate
from netstorm.pslite.measurement.rate_samples import (
    RATE_QUANTILE,
    Sample,
    contended_s,
    estimate,
    newest_samples,
    newest_window,
    quantile,
    sample_of,
    shared_s,
    total_duration,
)
from netstorm.pslite.measurement.tcp_progress import DeliverySample

__all__ = ["RateEstimator"]

_MEMORY_S: Final = 20.0
"""Samples that are older than the newest by more than this are dropped."""

_MOST_SAMPLES: Final = 512
"""A bound on memory."""

_JUMP: Final = 0.25
_JUMP_SAMPLES: Final = 4
_JUMP_S: Final = 0.1
"""The link has changed if the last 4 samples, which last at least 0.1 s, all differ from the earlier rate by
a quarter, to the same side. The earlier samples are then dropped."""

_JUMP_KERNEL_SAMPLES: Final = 2
"""Number of samples that show a change if the sender's kernel made them. One is enough if TCP saturated the
link and it is slower, or if BBR has found it to be faster."""

_KERNEL_PREFERRED_S: Final = 2.0
"""For so long after a sample of the kernel, chunks that arrived do not count."""

_LOW: Final = 0.8
_LOW_SAMPLES: Final = 6
"""A kernel's sample below this part of the known rate, while TCP did not saturate the link, counts only after
so many in a row: until then TCP itself may be the limit."""

_WINDOW_LIMITED: Final = 0.125
"""If TCP's window allows less than this part of the known rate, TCP itself was the limit: after a time-out
the window is a handful of packets."""

_PAUSE_S: Final = 0.3
_RAMP_S: Final = 0.6
"""After a pause TCP needs some round trips to reach the link's rate again. Samples that are slow until then
show no change."""

_UNSHARED: Final = 0.1
"""Part of a sample in which other links may be busy while it still counts as unshared."""

_LEAST_UNSHARED_S: Final = 0.2
"""Unshared samples are preferred only if they last at least this long together: a late batch looks like many
fast chunks."""

_LARGEST_UNSHARED_ERROR: Final = 0.15
_FASTER_ERRORS: Final = 2.0
"""Unshared samples are preferred if they are faster by so many standard errors, and their error is not larger
than this."""


class RateEstimator:
    """The samples of one link that still count."""

    __slots__ = ("_began", "_ended", "_kernel_until", "_low", "_samples", "jumped")

    def __init__(self) -> None:
        self._samples: Final[deque[Sample]] = deque(maxlen=_MOST_SAMPLES)
        self.jumped = False
        """The last call of `add_periods` or `add_delivery` found that the link has changed."""
        self._began = self._ended = -math.inf
        """When the link became busy after its last pause, and when it was last busy."""
        self._kernel_until = -math.inf
        """End of the newest sample of the sender's kernel."""
        self._low = 0
        """Number of low samples of the kernel in a row, without TCP saturating the link."""

    def add_periods(self, periods: Iterable[BusyPeriod]) -> bool:
        """Add new busy periods, in order; return whether any of them measures the link."""
        self.jumped = measures = False
        for period in periods:
            if period.start > self._ended + _PAUSE_S:
                self._began = period.start
            self._ended = period.end
            if (
                period.start_known
                and period.duration > 0
                and period.end > self._kernel_until + _KERNEL_PREFERRED_S
            ):
                measures = True
                self._samples.append(sample_of(period))
                self._drop_before_jump()
        self._drop_old()
        return measures

    def add_delivery(self, found: DeliverySample, shift: float, others_busy_s: float) -> bool:
        """Add what the sender's kernel has delivered; return whether it measures the link.

        Args:
            found: what was delivered.
            shift: what is added to its times to get those of the busy periods, in s.
            others_busy_s: for how long other links of the node were busy meanwhile.
        """
        self.jumped = False
        start, end = found.start + shift, found.end + shift
        duration, kept = end - start, self._samples
        sample = Sample(found.bits / duration, duration, 1, start, end, others_busy_s, 0.0, delivered=True)
        known = quantile(newest_window(reversed(kept), 1), RATE_QUANTILE) if kept else 0.0
        if found.lower_bound > (1 + _JUMP) * known > 0.0:
            return self._restart(sample._replace(rate=found.lower_bound))
        if found.bits == 0.0 or found.window_rate < _WINDOW_LIMITED * known:
            return False
        if found.saturated and sample.rate < (1 - _JUMP) * known:
            return self._restart(sample)
        if not found.saturated and sample.rate < _LOW * known:
            self._low += 1
            if self._low < _LOW_SAMPLES:
                return False
        else:
            self._low = 0
        self._kernel_until = end
        kept.append(sample)
        self._drop_before_jump()
        self._drop_old()
        return True

    def estimate(self, at_least: int, *, independent: bool) -> Estimate | None:
        """Return the rate; None if there are too few chunks.

        Samples during which no other link was busy are used alone if they are faster than the others.

        Args:
            at_least: least number of chunks (`PROBE_CHUNK_NUM`).
            independent: the node's links do not slow one another.
        """
        kept = self._samples
        others_busy_s = contended_s if independent else shared_s
        newest = newest_samples(reversed(kept), at_least)
        if newest is None:
            return None
        together = estimate(newest, sum(map(others_busy_s, newest.samples)))
        alone = (sample for sample in reversed(kept) if others_busy_s(sample) <= _UNSHARED * sample.duration)
        newest = newest_samples(alone, at_least, _LEAST_UNSHARED_S)
        unshared = None if newest is None else estimate(newest, 0.0)
        if unshared is None or unshared.error > _LARGEST_UNSHARED_ERROR:
            return together
        if unshared.rate > together.rate * (1 + _FASTER_ERRORS * unshared.error):
            return unshared
        return replace(together, shared=0.0)  # the link is as fast whether others are busy or not

    def _restart(self, sample: Sample) -> bool:
        """Keep only this sample: the kernel has shown that the link has changed."""
        self.jumped = True
        self._samples.clear()
        self._samples.append(sample)
        self._low, self._kernel_until = 0, sample.end
        return True

    def _drop_old(self) -> None:
        kept = self._samples
        while kept and kept[-1].end - kept[0].end > _MEMORY_S:
            kept.popleft()

    def _drop_before_jump(self) -> None:
        """Keep only the last samples if they show another rate than those before."""
        kept = self._samples
        exact = kept[-1].delivered
        number = _JUMP_KERNEL_SAMPLES if exact else _JUMP_SAMPLES
        if len(kept) < number + 2:
            return
        newest_first = reversed(kept)
        last = list(itertools.islice(newest_first, number))
        if total_duration(last) < _JUMP_S:
            return
        before = quantile(newest_window(newest_first, 1), 0.5)
        steady = exact or last[-1].start >= self._began + _RAMP_S
        if (steady and max(last).rate < (1 - _JUMP) * before) or min(last).rate > (1 + _JUMP) * before:
            self.jumped = True
            kept.clear()
            kept.extend(reversed(last))
