"""Two estimators of a link's rate: the paper's, and the one over busy periods. Pure.

The paper's [1]_ is the mean of size / (arrival - sent_at) over a number of chunks, tiny ones left out. It
needs synchronised clocks, takes the latency for transfer time, and, where several chunks are under way, the
time that a chunk waits behind those before it.

The busy-period estimator (design, section 4) looks at stretches in which the link was busy: at the newest
of them, since rates change, and at a high place in the order of their rates, since much makes a stretch slow
that does not make the link so.

References:
    .. [1] Li et al., arXiv 2404.11352, Eq. (14).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from netstorm.pslite.measurement.busy_periods import BusyPeriod
from netstorm.pslite.measurement.tcp_progress import Delivered

__all__ = ["Estimate", "History", "PaperEstimator"]

_MEMORY_S: Final = 20.0
"""Stretches older than this, compared to the newest, are forgotten."""

_MOST: Final = 512

_FEW: Final = 6
_BUSY_S: Final = 0.6
"""The newest stretches count: so many at least, which took so long together at least. On an emulated WAN a
rate that had changed was right after a second, and one that had not no worse than with ten times as much."""

_PLACE: Final = 0.6
"""Where in the order of their rates, by time, the link's is: a stall, a lost packet or TCP's own probing
makes stretches slow for a while; nothing makes a link fast but what was late before."""

_JUMP: Final = 0.25
_SUDDEN: Final = 4
_SUDDEN_S: Final = 0.1
"""If the last so many stretches, which took so long, are all off by that from what was before, and to the
same side, the link has changed, and what was before counts no more."""

_SUDDEN_DELIVERED: Final = 2
"""How many of them will do if the sender's kernel says what was delivered; one will, if TCP pressed the link
and it is slower, or if BBR has found it to be faster."""

_DELIVERED_FOR_S: Final = 2.0
"""How long what the kernel has said counts more than chunks that have arrived since."""

_LOW: Final = 0.8
_LOW_FOR: Final = 6
"""What the sender's kernel says to be slower than that part of what is known, while TCP did not press the
link, is TCP's own doing: unless it has said so as often in a row."""

_SHUT: Final = 0.125
"""After a time-out TCP's window lets a handful of packets through: where that is so small a part of what the
link carries, TCP itself was the limit."""

_PAUSE_S: Final = 0.3
_RAMP_S: Final = 0.6
"""After a pause TCP takes some round trips to find out what the link carries: that it is slow until then is
no change.
"""

_ALONE: Final = 0.1
"""Part of a stretch in which other links may be busy without it counting as shared."""

_ENOUGH_S: Final = 0.2
"""Least time that stretches must take together to be preferred to all: a batch that came late looks like many
fast chunks."""

_TOO_UNSURE: Final = 0.15
_FASTER: Final = 2.0
"""How many standard errors count as a difference, if the error is not larger than this."""

_OF_NORMAL: Final = 1.2533
"""Standard deviation of normal values over the mean of their absolute deviations."""

_QUANTILE_ERROR: Final = 1.27
"""Standard error of this quantile of normal values over that of their mean."""

_UNKNOWN: Final = 0.5
"""Standard error, as a fraction, of what was measured once."""

_ONE_LOOK: Final = 0.1
"""The same if the sender's kernel says so."""

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
    delivered: bool = False
    """The sender's kernel says so, of late."""


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


class _Sample(NamedTuple):
    """What a stretch says of a link; the slower one is the smaller one."""

    rate: float
    duration: float
    chunks: int
    start: float
    end: float
    shared_s: float
    """How long other links of the node, or of the one at the other end, were busy."""
    crowded_s: float
    """How long those of the one at the other end were."""
    delivered: bool = False
    """The sender's kernel says so; else the chunks that arrived."""


def _sample(stretch: BusyPeriod) -> _Sample:
    duration = stretch.duration
    return _Sample(
        stretch.bits / duration,
        duration,
        stretch.chunks,
        stretch.start,
        stretch.end,
        min(duration, max(stretch.shared_s, stretch.crowded_s)),
        min(duration, stretch.crowded_s),
    )


class _Window(NamedTuple):
    """Some samples of one link, newest first."""

    samples: list[_Sample]
    busy_s: float
    """How long they took together."""
    chunks: int


_duration: Final = operator.attrgetter("duration")
_shared_s: Final = operator.attrgetter("shared_s")
_crowded_s: Final = operator.attrgetter("crowded_s")


class History:
    """The stretches of one link that still count."""

    __slots__ = ("_began", "_delivered_at", "_ended", "_low", "_samples", "jumped")

    def __init__(self) -> None:
        self._samples: Final[deque[_Sample]] = deque(maxlen=_MOST)
        self.jumped = False
        """The last `extend` has found that the rate is another one than before."""
        self._began = self._ended = -math.inf
        """When the link began to be busy without a longer pause, and was so last."""
        self._delivered_at = -math.inf
        """Until when the sender's kernel has said something."""
        self._low = 0
        """How often in a row it has said that the link is slow, without TCP pressing it."""

    def extend(self, stretches: Iterable[BusyPeriod]) -> bool:
        """Add what is new, in order, and forget what is old or was before a change; return whether some of it
        measures.
        """
        self.jumped = measures = False
        for one in stretches:
            if one.start > self._ended + _PAUSE_S:
                self._began = one.start
            self._ended = one.end
            if one.measures and one.duration > 0 and one.end > self._delivered_at + _DELIVERED_FOR_S:
                measures = True
                self._samples.append(_sample(one))
                self._forget_before_a_jump()
        self._forget_what_is_old()
        return measures

    def deliver(self, found: Delivered, shift: float, shared_s: float) -> bool:
        """Add what the sender's kernel says; return whether it says something.

        Args:
            found: what was delivered.
            shift: what is added to its times to have those of the other stretches.
            shared_s: how long other links of the node were busy meanwhile.
        """
        self.jumped = False
        start, end = found.start + shift, found.end + shift
        duration, kept = end - start, self._samples
        one = _Sample(found.bits / duration, duration, 1, start, end, shared_s, 0.0, delivered=True)
        known = _quantile(_window(reversed(kept), 1), _PLACE) if kept else 0.0
        if found.at_least > (1 + _JUMP) * known > 0.0:
            return self._jump(one._replace(rate=found.at_least))
        if found.bits == 0.0 or found.allowed < _SHUT * known:
            return False
        if found.pressed and one.rate < (1 - _JUMP) * known:
            return self._jump(one)
        if not found.pressed and one.rate < _LOW * known:
            self._low += 1
            if self._low < _LOW_FOR:
                return False
        else:
            self._low = 0
        self._delivered_at = end
        kept.append(one)
        self._forget_before_a_jump()
        self._forget_what_is_old()
        return True

    def estimate(self, at_least: int, *, independent: bool) -> Estimate | None:
        """Return the rate; None if there are not enough chunks.

        Stretches in which no other link was busy are taken by themselves if they are faster than the others.

        Args:
            at_least: how many chunks are enough (`PROBE_CHUNK_NUM`).
            independent: the node's links don't slow one another.
        """
        kept = self._samples
        shared_s = _crowded_s if independent else _shared_s
        newest = _newest(reversed(kept), at_least)
        if newest is None:
            return None
        all_together = _estimate(newest, sum(map(shared_s, newest.samples)))
        alone = (one for one in reversed(kept) if shared_s(one) <= _ALONE * one.duration)
        newest = _newest(alone, at_least, _ENOUGH_S)
        unshared = None if newest is None else _estimate(newest, 0.0)
        if unshared is None or unshared.error > _TOO_UNSURE:
            return all_together
        if unshared.rate > all_together.rate * (1 + _FASTER * unshared.error):
            return unshared
        return replace(all_together, shared=0.0)  # as fast whether others are busy or not

    def _jump(self, one: _Sample) -> bool:
        """Keep only this sample: the sender's kernel says so that the link has changed."""
        self.jumped = True
        self._samples.clear()
        self._samples.append(one)
        self._low, self._delivered_at = 0, one.end
        return True

    def _forget_what_is_old(self) -> None:
        kept = self._samples
        while kept and kept[-1].end - kept[0].end > _MEMORY_S:
            kept.popleft()

    def _forget_before_a_jump(self) -> None:
        """Keep only the last stretches, if they show another rate than those before."""
        kept = self._samples
        exact = kept[-1].delivered
        number = _SUDDEN_DELIVERED if exact else _SUDDEN
        if len(kept) < number + 2:
            return
        newest_first = reversed(kept)
        last = list(itertools.islice(newest_first, number))
        if sum(map(_duration, last)) < _SUDDEN_S:
            return
        before = _quantile(_window(newest_first, 1), 0.5)
        steady = exact or last[-1].start >= self._began + _RAMP_S
        if (steady and max(last).rate < (1 - _JUMP) * before) or min(last).rate > (1 + _JUMP) * before:
            self.jumped = True
            kept.clear()
            kept.extend(reversed(last))


def _window(newest_first: Iterable[_Sample], at_least: int) -> _Window:
    """Return the newest samples that are enough."""
    taken: list[_Sample] = []
    busy_s, chunks = 0.0, 0
    for one in newest_first:
        if len(taken) >= _FEW and busy_s >= _BUSY_S and chunks >= at_least:
            break
        taken.append(one)
        busy_s += one.duration
        chunks += one.chunks
    return _Window(taken, busy_s, chunks)


def _newest(newest_first: Iterable[_Sample], at_least: int, at_least_s: float = 0.0) -> _Window | None:
    """Return the newest samples; None if that are fewer chunks than enough, or shorter than enough, in s.

    What the kernel says is exact: one look is enough.
    """
    newest = _window(newest_first, at_least)
    exact = any(one.delivered for one in newest.samples)
    enough = newest.samples and (exact or newest.chunks >= at_least) and newest.busy_s >= at_least_s
    return newest if enough else None


def _quantile(window: _Window, part: float) -> float:
    """Return the rate that is not exceeded for this part of the time."""
    rows = sorted(window.samples)
    left = part * window.busy_s
    for one in rows:
        left -= one.duration
        if left <= 0:
            return one.rate
    return rows[-1].rate


def _estimate(window: _Window, shared_s: float) -> Estimate:
    """Return the rate by some samples, and its error by how they scatter around it.

    Args:
        window: the samples; there must be one.
        shared_s: for how long others were busy, too, in s.
    """
    rate, number = _quantile(window, _PLACE), len(window.samples)
    deviation = _OF_NORMAL * sum([abs(one.rate / rate - 1) for one in window.samples]) / number
    delivered = window.samples[0].delivered
    error = _ONE_LOOK if delivered else _UNKNOWN
    if number > 1:
        error = min(max(deviation * _QUANTILE_ERROR / math.sqrt(number - 1), _LEAST), _UNKNOWN)
    shared = min(shared_s / window.busy_s, 1.0)
    return Estimate(rate, error, window.chunks, shared, delivered)
