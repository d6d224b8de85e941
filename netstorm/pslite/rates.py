"""How fast one link is: samples of its traffic, and the estimates that follow from them. Pure."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

__all__ = [
    "BbrRestart",
    "BusyLink",
    "BusyPeriod",
    "DeliveryMonitor",
    "DeliverySample",
    "Estimate",
    "LatencyEstimator",
    "PaperEstimator",
    "RateEstimator",
    "RunningMinimum",
    "SampleWindow",
    "TcpProgress",
]


# The default estimator of a link's rate: which samples still count, and whether the link has changed.
#
# Its samples are busy periods, of chunks that arrived (`NETSTORM_ESTIMATOR=busy`), and what the sender's
# kernel has delivered (`tcp`). Samples that are too old, or from before the link changed, are dropped. How a
# rate follows from the others is in `estimate`; docs/measurements/estimators.md has the measurements
# behind the thresholds.

_SAMPLES_MEMORY_S: Final = 20.0
"""Samples that are older than the newest by more than this are dropped."""

_MOST_SAMPLES: Final = 512
"""A bound on memory."""

_JUMP: Final = 0.25
_JUMP_SAMPLES: Final = 4
_JUMP_S: Final = 0.1
"""The link has changed if the last samples, at least 4, which last at least 0.1 s together, all differ from
the earlier rate by a quarter, to the same side. The earlier samples are then dropped. A chunk takes .02 s on
a link that has become fast, and is a sample of its own if it comes alone: four would never last long enough.
"""

_CHECKED_AFTER_S: Final = _JUMP_S / 8
"""Whether the link has changed is looked at again after samples of so long: each look compares hundreds of
them, if one takes a millisecond."""

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
show no change, if they grow."""

_GROWS: Final = 1.1
"""Samples grow if the newest is faster than the oldest by more: TCP doubles its rate in a round trip."""

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

    __slots__ = ("_began", "_ended", "_kernel_until", "_low", "_samples", "_unchecked_s", "jumped")

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
        self._unchecked_s = 0.0
        """Duration of the samples since the last look for a change."""

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
                self._unchecked_s += period.duration
                if self._unchecked_s >= _CHECKED_AFTER_S:
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
        while kept and kept[-1].end - kept[0].end > _SAMPLES_MEMORY_S:
            kept.popleft()

    def _drop_before_jump(self) -> None:
        """Keep only the last samples if they show another rate than those before."""
        self._unchecked_s, kept = 0.0, self._samples
        exact = kept[-1].delivered
        number = _JUMP_KERNEL_SAMPLES if exact else _JUMP_SAMPLES
        newest_first = reversed(kept)
        last: list[Sample] = []
        lasted = 0.0
        for sample in newest_first:
            last.append(sample)
            lasted += sample.duration
            if len(last) >= number and lasted >= _JUMP_S:
                break
        if len(kept) < len(last) + 2 or lasted < _JUMP_S:
            return
        before = quantile(newest_window(newest_first, 1), 0.5)
        steady = exact or last[-1].start >= self._began + _RAMP_S or last[0].rate <= _GROWS * last[-1].rate
        if (steady and max(last).rate < (1 - _JUMP) * before) or min(last).rate > (1 + _JUMP) * before:
            self.jumped = True
            kept.clear()
            kept.extend(reversed(last))


# Samples of one link's rate, and the estimate that follows from some of them.
#
# The estimate looks at the newest samples, since rates change. It takes a high quantile of their rates,
# weighted by duration: many things make a sample slow without the link being slow.

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


# When a link was busy, and how much it carried: from the times at which chunks were sent and arrived.
#
# A chunk's transfer starts when it was sent plus the link's latency or, if later, when the chunk before it on
# that link had arrived (docs/concepts/awareness.md). So a chunk that was sent while earlier ones still filled
# the link needs no clock at all: its transfer lasts from their arrival to its own. For other chunks the
# latency is the shortest time that anything small (an acknowledgement) took, measured by the same two clocks.
# What is subtracted has the same clock error as what it is subtracted from.
#
# One link is seen here by itself: `netstorm.pslite.link_meter` compares several.

_PERIOD_S: Final = 0.05
"""A busy period that is longer takes no more chunks. Chunks are handed over in batches, some ms late; in a
period of this length that does not matter."""

_BATCH_S: Final = 0.001
_BATCH_PART: Final = 0.25
"""Chunks that arrive within this time, or within this part of a chunk's transfer, were handed over together,
or come one after the other after a stall. Their transfer time is in that of the first one."""

_BATCH: Final = 64
"""Most chunks of a batch: on links of many Gbit/s all chunks arrive that close together."""

_BATCH_LASTS_S: Final = 0.01
"""Longest time in which a batch is handed over. All chunks of a link that has become more than four times as
fast arrive within a part of the transfer that is expected: they are no batch.
"""

_MINIMUM_MEMORY_S: Final = 10.0
"""The smallest value counts for so long at least, and for twice as long at most. Routes and clocks change."""

_MOST_PERIODS: Final = 2048
"""Busy periods that may wait for a judgement: 100 s of them."""


class BusyPeriod:
    """A time in which a link was busy without a pause. Times are in s on the receiver's clock."""

    __slots__ = (
        "back_to_back",
        "batch_at",
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
        self.batch_at = end
        """When the first chunk arrived of those that may have been handed over together."""
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
        if at - self._since > _MINIMUM_MEMORY_S:
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
                together = arrived - earlier < batch_s and arrived - current.batch_at < _BATCH_LASTS_S
                if not together:
                    current.batch_at = arrived
                if short or (together and current.chunks < _BATCH):
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


# What a link carried, from the amounts that its sender's kernel reports as delivered.
#
# Chunks say less. Data behind a lost packet is handed over late and all at once, so chunks arrive in gaps and
# bursts for seconds after a link has become slower, and a slow link has few of them. What TCP has delivered,
# in order or not, is exact from one sample to the next, if TCP had data to send all the time.
#
# That is the link's rate, unless TCP itself was the limit: while BBR looks for the shortest round trip
# (PROBE_RTT [1]_), while it takes the link for slower than it is, or when acknowledgements were late. When a
# link becomes slower, TCP goes on as before for a while, so packets are lost or, where queues are long, round
# trips become many times as long. A low rate without either says nothing at first. In a race on the changing
# network, nearly all samples of links that had fallen showed losses of more than a tenth. Those that were
# slow for no such reason showed one lost packet at most, and round trips of up to 3.1 times the shortest.
#
# When a link becomes faster, TCP finds out slowly: BBR sends a quarter more every eight round trips, if it
# has enough to send. But BBR knows what was delivered within a round trip, however little there was to send.
# If that is more than it ever was of late, the link carries at least as much.
#
# References:
#     .. [1] Cardwell et al., BBR: congestion-based congestion control, ACM Queue 14 (2016).

_BUSY: Final = 0.9
"""Part of the time between two samples for which TCP must have had data in flight."""

_RECEIVER_LIMITED: Final = 0.1
"""Part of the time between two samples for which the receiver may have been the limit."""

_LEAST_SEGMENTS: Final = 16
"""Fewer delivered segments say nothing: the next sample covers a longer time."""

_PROBE_RTT_WINDOW: Final = 4
"""Most segments in flight while BBR looks for the shortest round trip."""

_GROWTH: Final = 1.02
"""BBR's bandwidth has grown if it is so many times that of the last sample."""

_NOISE: Final = 1.03
"""BBR's bandwidth is so many times the link's rate: it is the largest of many readings."""

_LONG_QUEUE: Final = 4.0
_LOSS: Final = 0.02
"""The link is saturated if round trips are so many times as long as the shortest one, or if so many packets
are lost for each delivered one. Permanent queues, one's own and those of the way back, make round trips up to
three times as long."""


class TcpProgress(NamedTuple):
    """How much a TCP connection has delivered, by the kernel of its sender."""

    delivered: int
    """Segments that have arrived at the other end, in order or not."""
    segment: int
    """Bytes of one segment."""
    retransmitted: int
    """Segments."""
    unsent: int
    """Bytes that have not been sent yet."""
    window: int
    """Segments that may be in flight."""
    busy_s: float
    """For how long data was in flight or waiting, in all."""
    receiver_limited_s: float
    """For how long the receiver's window was the limit, in all."""
    smoothed_rtt_s: float
    min_rtt_s: float
    """The shortest round trip of late."""
    bandwidth: float = 0.0
    """Bit/s: the most that BBR saw the link deliver in its last ten round trips; 0: it is not BBR."""


@dataclass(frozen=True, slots=True)
class DeliverySample:
    """What a link carried while its sender had data to send all the time."""

    start: float
    """Seconds on the local clock."""
    end: float
    bits: float
    """0: TCP itself was the limit."""
    saturated: bool
    """TCP sent more than the link carries: the link could not have carried more."""
    lower_bound: float = 0.0
    """Bit/s that the link was found to carry for the first time of late; 0: nothing new."""
    window_rate: float = math.inf
    """Bit/s that TCP's window would have allowed without any queue."""


class DeliveryMonitor:
    """One connection, sampled periodically."""

    __slots__ = ("_at", "_before", "busy")

    def __init__(self) -> None:
        self._before: TcpProgress | None = None
        self._at = 0.0
        self.busy = 0.0
        """Part of the time between the last two samples in which data was in flight."""

    @property
    def has_backlog(self) -> bool:
        """Whether the last sample showed unsent data."""
        return self._before is not None and self._before.unsent > 0

    def reset(self) -> None:
        """Forget the last sample: the connection is gone, or the kernel says nothing any more."""
        self._before, self.busy = None, 0.0

    def sample(self, progress: TcpProgress, now: float) -> DeliverySample | None:
        """Add the kernel's present values; `now` in s on the local clock.

        Returns:
            What the link carried since the last sample; None if that says nothing about the link.
        """
        was, then = self._before, self._at
        if was is None or progress.delivered < was.delivered or progress.busy_s < was.busy_s or now <= then:
            self._before, self._at, self.busy = progress, now, 0.0  # another connection
            return None
        segments, took = progress.delivered - was.delivered, now - then
        self.busy = min(1.0, (progress.busy_s - was.busy_s) / took)
        backlogged = was.unsent > 0 and progress.unsent > 0 and self.busy >= _BUSY
        if backlogged and segments < _LEAST_SEGMENTS:
            return None  # the next sample covers all of this time
        self._before, self._at = progress, now
        lossy = progress.retransmitted - was.retransmitted > _LOSS * segments
        grown = not lossy and progress.bandwidth > _GROWTH * was.bandwidth > 0.0
        lower_bound = progress.bandwidth / _NOISE if grown else 0.0
        if (
            not backlogged
            or progress.receiver_limited_s - was.receiver_limited_s > _RECEIVER_LIMITED * took
            or min(was.window, progress.window) <= _PROBE_RTT_WINDOW
        ):
            if not grown:
                return None
            return DeliverySample(then, now, 0.0, saturated=False, lower_bound=lower_bound)
        saturated = lossy or any(
            state.smoothed_rtt_s > _LONG_QUEUE * state.min_rtt_s for state in (was, progress)
        )
        window = min(was.window, progress.window) * progress.segment * 8.0
        return DeliverySample(
            then,
            now,
            segments * progress.segment * 8.0,
            saturated=saturated,
            lower_bound=lower_bound,
            window_rate=window / progress.min_rtt_s if progress.min_rtt_s else math.inf,
        )


# When BBR takes a link for far slower than it is, and should be restarted.
#
# BBR takes a link for the most that it has delivered in the last ten round trips [1]_, and counts only those
# round trips in which there was enough to send. After a pause, losses and a time-out, the first ones that
# count may be those in which TCP sent a handful of packets to find out what was lost. BBR then uses the link
# as if it were that slow, and sends only a quarter more every eight round trips. On an emulated WAN, links of
# 35 Mbit/s were taken for 0.2 to 2 Mbit/s, and it took 3 to 17 s until they were used again. A new connection
# gets there after six round trips.
#
# So BBR is restarted on a connection that has less than half of the bandwidth that its link is known to have.
# If the link has fallen and nobody has noticed yet, that costs what a new connection costs: for some round
# trips more is sent than the link carries.
#
# Where links have only become faster, BBR is left alone. Restarting it whenever its bandwidth grew brought it
# there a second or two sooner. But what it sees while queues overflow is up to half too much, and policies
# that rest on that are worse than late ones (docs/measurements/estimators.md, "BBR that takes a link for
# slow: restarting it").
#
# References:
#     .. [1] Cardwell et al., BBR: congestion-based congestion control, ACM Queue 14 (2016).

_TOO_SLOW: Final = 0.5
"""BBR is restarted if its bandwidth is less than this part of what the link is known to carry."""

_GAINED: Final = 1.25
"""A restart was useful if BBR's bandwidth is then so many times what it was."""

_SETTLES_S: Final = 1.0
"""A new or restarted connection is left alone for so long."""

_LONGEST_S: Final = 16.0
"""The pause doubles after each useless restart, up to this."""


class BbrRestart:
    """One connection, checked periodically."""

    __slots__ = ("_had", "_pause_s", "_started")

    def __init__(self) -> None:
        self._started = math.inf
        """When the connection was new or restarted, on the local clock; infinite: it was not checked yet."""
        self._had = 0.0
        """The bandwidth at which it was restarted; 0: the outcome is known."""
        self._pause_s = _SETTLES_S

    def due(self, bandwidth: float, known: float, now: float) -> bool:
        """Return whether BBR should be restarted; the caller does it then.

        Args:
            bandwidth: BBR's estimate of the link, in bit/s; 0: it has none yet, or it is not BBR.
            known: what the link carries, in bit/s; 0: unknown.
            now: s on the local clock.
        """
        self._started = min(self._started, now)
        if bandwidth == 0.0 or now < self._started + _SETTLES_S:
            return False
        if self._had:
            useless = bandwidth < _GAINED * self._had
            self._pause_s = min(2 * self._pause_s, _LONGEST_S) if useless else _SETTLES_S
            self._had = 0.0
        if bandwidth >= _TOO_SLOW * known or now < self._started + self._pause_s:
            return False
        self._started, self._had = now, bandwidth
        return True


SINGLE_CHUNK_ERROR: Final = 0.5
"""Standard error, as a fraction of the rate, of a link that was measured once."""

LEAST_ERROR: Final = 0.01
"""Standard error, as a fraction of the rate, that even the most regular samples have: TCP's headers and the
size of a batch are not known exactly."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A link's rate, and how far it can be trusted."""

    rate: float
    """Bit/s."""
    error: float
    """Standard error, as a fraction of `rate`."""
    chunks: int
    """Number of chunks that the estimate rests on."""
    shared: float = 0.0
    """Part of the measured time in which other links of the node were busy."""
    delivered: bool = False
    """The newest sample comes from the sender's kernel."""


# The paper's estimator of a link's rate: the mean over the last chunks.
#
# The estimate is the mean of size / (arrival - sent_at) over `PROBE_CHUNK_NUM` chunks of at least
# `PROBE_CHUNK_SIZE` bytes [1]_. It needs synchronised clocks. It counts the latency as transfer time and,
# where several chunks are in flight, also the time that a chunk waits behind those before it.
#
# References:
#     .. [1] Li et al., arXiv 2404.11352, Eq. (14).


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


# A link's one-way latency, from messages and their acknowledgements.
#
# The two ways are measured on two clocks. Their sum, the round trip, does not depend on how far these clocks
# are apart, so the latency is half of it.


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
