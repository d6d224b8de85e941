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
from dataclasses import dataclass, replace
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

_ENOUGH_S: Final = 0.2
"""Least time that stretches must take together to be preferred to all: a batch that came late looks like many
fast chunks."""

_TOO_UNSURE: Final = 0.15
_FASTER: Final = 2.0
"""How many standard errors count as a difference, if the error is not larger than this."""

_SLOWEST: Final = 0.35
_FASTEST: Final = 0.15
"""Parts of the time, by rate, that are left out: a stall makes a stretch slow, nothing makes a link fast but
what was late before. On an emulated WAN whose processors were short, errors were least with these."""

_TRIMMED: Final = 2.0
"""By what the standard error of the rest is too small: half of the deviations are left out."""

_FEW: Final = 6
"""With fewer stretches none is left out."""

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

        Best are those that needed no clock. Those in which no other link was busy are taken by themselves if
        they are faster than the others.

        Args:
            at_least: how many chunks are enough (`PROBE_CHUNK_NUM`).
            independent: the node's links don't slow one another.
        """
        kept: Sequence[Stretch] = self._stretches
        if sum(one.chunks for one in kept) < at_least:
            return None
        in_line = [one for one in kept if one.in_line]
        best = in_line if _enough(in_line, at_least) else kept
        shares = [_shared_s(one, independent=independent) for one in best]
        all_together = _ratio(best, shares)
        alone = [
            one
            for one, shared in zip(best, shares, strict=True)
            if shared <= _ALONE * max(one.duration, 1e-9)
        ]
        if all_together is None or not _enough(alone, at_least):
            return all_together
        unshared = _ratio(alone, [0.0] * len(alone))
        if unshared is None or unshared.error > _TOO_UNSURE:
            return all_together
        if unshared.rate > all_together.rate * (1 + _FASTER * unshared.error):
            return unshared
        return replace(all_together, shared=0.0)  # as fast whether others are busy or not


def _enough(stretches: Sequence[Stretch], at_least: int) -> bool:
    return (
        sum(one.chunks for one in stretches) >= at_least
        and sum(one.duration for one in stretches) >= _ENOUGH_S
    )


def _shared_s(stretch: Stretch, *, independent: bool) -> float:
    own = 0.0 if independent else stretch.shared_s
    return min(stretch.duration, max(own, stretch.crowded_s))


def _ratio(stretches: Sequence[Stretch], shares: Sequence[float]) -> Estimate | None:
    """Return bits over durations, newer ones weighing more, with its standard error from their differences.

    The slowest and the fastest are left out: a reader or a sender that had no processor for a while. The
    error of a ratio of sums is that of its residuals (Cochran, Sampling Techniques, section 6.4).

    Args:
        stretches: in order.
        shares: for how long of each others were busy, too; in s.
    """
    newest = stretches[-1].end
    rows = [
        (one.bits / one.duration, math.exp((one.end - newest) / _FADES_S), one, shared)
        for one, shared in zip(stretches, shares, strict=True)
        if one.duration > 0
    ]
    rows.sort(key=lambda row: row[0])
    total = sum(weight * one.duration for _, weight, one, _ in rows)
    trimmed = len(rows) >= _FEW
    least, most = (_SLOWEST * total, (1 - _FASTEST) * total) if trimmed else (0.0, total)
    duration = bits = shared_s = before = 0.0
    kept = []
    for _, weight, one, shared in rows:
        place = before + weight * one.duration / 2
        before += weight * one.duration
        if not least <= place <= most:
            continue
        kept.append((weight, one))
        duration += weight * one.duration
        bits += weight * one.bits
        shared_s += weight * shared
    if duration <= 0:
        return None
    rate = bits / duration
    residuals = sum((weight * (one.bits - rate * one.duration)) ** 2 for weight, one in kept)
    weights = [weight for weight, _ in kept]
    effective = sum(weights) ** 2 / sum(weight * weight for weight in weights)
    error = _UNKNOWN
    if effective > 1.5:
        error = math.sqrt(residuals * effective / (effective - 1)) / (rate * duration)
        error = min(max(error * _TRIMMED if trimmed else error, _LEAST), _UNKNOWN)
    return Estimate(rate, error, sum(one.chunks for one in stretches), min(shared_s / duration, 1.0))
