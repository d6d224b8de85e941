"""Which links share access lines, judged by what all links carried in the same half seconds. Pure.

Only half seconds count in which links had more to send all the time. Two questions are answered:

*Is the network contended?* Links that share nothing carry the same whatever their neighbours carry. So a
link's rates in two half seconds are compared if what others carried at one of its ends has changed clearly.
This is decided for the network as a whole: a shared line at its other end makes a link unsteady, too. In a
contended network, what a link carries beside others does not show what it could carry alone.

*Which lines have caps?* See `cap_detection`.

Chunks do not show this: behind a line that drops packets they are handed over late and all at once. Only the
scheduler knows what enters a node, since it is the sum of what many sources have sent.

All thresholds: docs/measurements/awareness.md, "Links that share lines: is a network contended?" and "Access
caps by what all links carry", from recorded jobs.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from netstorm.protocol.messages import ThroughputReport
from netstorm.scheduler.awareness.cap_detection import CONTENDED, UNCONTENDED, LineTotal, ceiling_of
from netstorm.scheduler.awareness.throughput_samples import HalfSecond, Line, ThroughputSamples

__all__ = ["AccessLines"]

_UNDER_WAY_S: Final = 10.0
"""How long after a new policy the transfers of the old one still finish."""

_MEMORY_S: Final = 60.0

_COMPARED_S: Final = 5.0
"""Half seconds further apart are not compared, since links change."""

_OTHERS: Final = 0.2
"""Part of a line's peak by which what others carried must differ for a comparison."""

_SAME: Final = 0.1
"""A link whose rates differ by less than that part is steady."""

_MOST_COMPARED: Final = 32
"""Comparisons per line and half second: bounds the cost with many nodes."""

_ENOUGH: Final = 200
_ENOUGH_OF_A_LINE: Final = 20
"""Comparisons below which nothing is concluded."""

_CONTENDED: Final = 0.3
_UNCONTENDED: Final = 0.36
"""A network is contended while less than the first part of the comparisons are steady, until more than the
second are. A line of whose own comparisons more than the first part are steady has no cap.
"""

_EVERY_S: Final = 2.0
_FEW: Final = 16
"""How often lines are examined; with more nodes than that less often, since there are more lines."""

_FULL: Final = 0.7
"""Part of its cap from which on a line slows its links."""

_HALF_FULL: Final = 0.4
"""The same in a contended network, of the line's peak, where its cap is unknown."""

_COMPANY: Final = 0.2
"""Least part of a line's total that other links must carry to slow a link."""

_BEYOND: Final = 1.15
_BEYOND_TIMES: Final = 3
"""A line that carried so many times its cap, as often, has another cap, or none."""


class _Comparisons(NamedTuple):
    """Comparisons of link rates at one line between which others carried clearly more or less."""

    at: float
    number: int
    steady: int


class AccessLines:
    """All access lines of a job.

    Attributes:
        contended: what links carry depends on what others carry.
    """

    def __init__(self, size: int) -> None:
        """Begin without any knowledge; `size`: the number of nodes."""
        self.contended = False
        self._every_s: Final = _EVERY_S * max(1.0, size / _FEW)
        self._samples: Final = ThroughputSamples(size)
        self._totals: Final[dict[Line, deque[LineTotal]]] = {}
        self._peaks: Final[dict[Line, float]] = {}
        self._comparisons: Final[dict[Line, deque[_Comparisons]]] = {}
        self._updated: Final[set[Line]] = set()
        self._examined_at = -math.inf

    def record(self, source: int, carried: Iterable[ThroughputReport], now: float) -> int:
        """Record what the links out of a node have carried; return the number of implausible values."""
        return self._samples.record(source, carried, now)

    def reset_line(self, line: Line) -> None:
        """Discard what is known of a line."""
        for known in (self._totals, self._peaks, self._comparisons):
            known.pop(line, None)
        self._updated.discard(line)

    def reset(self, now: float) -> None:
        """Discard everything: it was carried beside pairs that turned out to be no links."""
        self.contended = False
        self._samples.restart(now + _UNDER_WAY_S)
        for line in list(self._totals):
            self.reset_line(line)

    def due(self) -> float:
        """Return the time of the next `find_caps`."""
        return self._examined_at + self._every_s

    def find_caps(self, now: float) -> dict[Line, float]:
        """Return the caps, in bit/s, of lines of which there is something new."""
        self._examined_at = now
        for sample in self._samples.close(now):
            self._add(sample)
        found = {line: self._recent_comparisons(line, now) for line in list(self._comparisons)}
        number = sum(line.number for line in found.values())
        if number >= _ENOUGH:
            steady = sum(line.steady for line in found.values()) / number
            self.contended = steady < (_UNCONTENDED if self.contended else _CONTENDED)
        rule = CONTENDED if self.contended else UNCONTENDED
        unsteady = [
            line
            for line in sorted(self._updated)
            if (comparisons := found.get(line)) is not None
            and comparisons.number >= _ENOUGH_OF_A_LINE
            and comparisons.steady < _CONTENDED * comparisons.number
        ]
        self._updated.clear()
        caps = {line: ceiling_of(self._totals[line], rule) for line in unsteady}
        return {line: cap for line, cap in caps.items() if cap}

    def upper_bound(self, link: tuple[int, int]) -> float:
        """Return the most that a (source, target) link can carry, in bit/s.

        In a contended network that is as much as its lines have carried in half a second: TCP's own figure of
        a moment may be higher.
        """
        if not self.contended:
            return math.inf
        return min(self._peaks.get((end, rank), math.inf) for end, rank in enumerate(link))

    def may_have_slowed(self, line: Line, cap: float, link: tuple[int, int], now: float) -> bool:
        """Return whether what others carried on a line may have slowed a link in the last seconds.

        Args:
            line: at one end of the link.
            cap: of the line, in bit/s; 0: unknown.
            link: source and target.
            now: the time.
        """
        if not (cap or self.contended):
            return False
        full = _FULL * cap if cap else _HALF_FULL * self._peaks.get(line, 0.0)
        for sample in self._samples.recent(now):
            total, own = sample.totals.get(line, 0.0), sample.rates.get(link, 0.0)
            if own and total >= full and total - own >= _COMPANY * total:
                return True
        return False

    def exceeds(self, line: Line, cap: float, now: float) -> bool:
        """Return whether a line has carried more than this cap allows."""
        above = sum(sample.totals.get(line, 0.0) > _BEYOND * cap for sample in self._samples.recent(now))
        return above >= _BEYOND_TIMES

    def _add(self, sample: HalfSecond) -> None:
        for line, rates in sample.saturated.items():
            totals = self._totals.setdefault(line, deque())
            while totals and totals[0].at < sample.at - _MEMORY_S:
                totals.popleft()
            newest = LineTotal(sample.at, sample.totals[line], rates)
            totals.append(newest)
            self._updated.add(line)
            self._peaks[line] = peak = max(total.total for total in totals)
            steady = list(itertools.islice(_compared(totals, newest, peak), _MOST_COMPARED))
            if steady:
                self._comparisons.setdefault(line, deque()).append(
                    _Comparisons(newest.at, len(steady), sum(steady))
                )

    def _recent_comparisons(self, line: Line, now: float) -> _Comparisons:
        """Return the sum of the comparisons of the last minute."""
        kept = self._comparisons[line]
        while kept and kept[0].at < now - _MEMORY_S:
            kept.popleft()
        return _Comparisons(now, sum(one.number for one in kept), sum(one.steady for one in kept))


def _compared(totals: deque[LineTotal], newest: LineTotal, peak: float) -> Iterator[bool]:
    """Yield for each link, and earlier half second with other traffic, if the link carried the same."""
    for earlier in itertools.islice(reversed(totals), 1, None):
        if earlier.at < newest.at - _COMPARED_S:
            return
        for other, rate in newest.rates.items():
            before = earlier.rates.get(other, 0.0)
            if before and abs((newest.total - rate) - (earlier.total - before)) > _OTHERS * peak:
                yield abs(math.log(rate / before)) < _SAME
