"""Which caps access lines have: by what all links carried at the same time, and by nodes' reports. Pure."""

from __future__ import annotations

import logging
import math
from typing import Final

from netstorm.protocol.messages import Measured
from netstorm.scheduler.awareness.access_lines import AccessLines
from netstorm.scheduler.awareness.link_reports import Rates
from netstorm.scheduler.awareness.readings import Readings
from netstorm.scheduler.awareness.throughput_samples import RATES, Line

__all__ = ["AccessCaps"]

_log = logging.getLogger(__name__)

_BEGINS: Final = 0.85
_ENDS: Final = 0.95
"""A cap counts below the first part of what its links could carry together, and until the second: with one
threshold noise would make caps come and go.
"""

_BELIEVED_S: Final = 300.0
"""How long a cap is believed without new readings: a policy may have no links share that line
(docs/measurements/awareness.md, "Access caps by what all links carry").
"""

_REPORT_WINDOW_S: Final = 60.0
"""Nodes' reports of their access lines rest on that much of the past (`pslite.measurement.access_line`)."""


class _Cap:
    """The cap of one direction of a node's access line."""

    __slots__ = ("counts", "detected", "readings")

    def __init__(self) -> None:
        self.readings = Readings()
        self.counts = False
        """Policies are planned with it."""
        self.detected = False
        """Links were seen to share it, whatever its node reports."""

    def clear(self) -> None:
        """Forget the cap."""
        self.readings, self.detected = Readings(), False

    def known(self, now: float) -> float:
        """Return the cap, in bit/s; 0: unknown."""
        return self.readings.value if self.readings and self.readings.age(now) <= _BELIEVED_S else 0.0

    def shared(self, now: float) -> float:
        """Return the cap that links were seen to share, in bit/s; 0: none."""
        return self.known(now) if self.detected else 0.0


class AccessCaps:
    """The caps of all access lines of a job."""

    def __init__(self, size: int) -> None:
        """Begin without any cap; `size`: the number of nodes."""
        self._size: Final = size
        self._lines: Final = AccessLines(size)
        self._caps: Final[dict[Line, _Cap]] = {(end, rank): _Cap() for end in (0, 1) for rank in range(size)}
        self._reports_from = -math.inf
        """From when on nodes' reports are about links alone."""

    @property
    def contended(self) -> bool:
        """Whether links carry less beside others: they share lines, known or unknown."""
        return self._lines.contended

    def record(self, rank: int, report: Measured, now: float) -> int:
        """Record what a node's links have carried, and its caps; return how many values are implausible."""
        refused = self._lines.record(rank, report.throughput, now)
        for end, value in enumerate((report.egress, report.ingress)):
            cap = self._caps[end, rank]
            if value == 0.0 or now < self._reports_from or self.contended or cap.shared(now):
                continue
            if value == math.inf:
                cap.clear()
            elif RATES.allow(value):
                cap.readings.add(value, 0.0, now)
            else:
                refused += 1
        return refused

    def find_shared(self, now: float) -> list[Line]:
        """Find out which links share lines; return the lines of which that is new."""
        if now < self._lines.due():
            return []
        for line, cap in self._caps.items():
            shared = cap.shared(now)
            if shared and self._lines.exceeds(line, shared, now):
                cap.clear()
                self._lines.reset_line(line)
        contended = self.contended
        new = []
        for line, value in self._lines.find_caps(now).items():
            cap = self._caps[line]
            if not RATES.allow(value):
                continue
            if not cap.shared(now):
                cap.readings, cap.detected = Readings(), True
                new.append(line)
            cap.readings.add(value, 0.0, now)
        if self.contended == contended:
            return new
        _log.info("the network is %s contended", "now" if self.contended else "no longer")
        if not self.contended:
            return new
        for cap in self._caps.values():
            if not cap.detected:  # nodes judge by their chunks, often wrongly under contention
                cap.clear()
        return list(self._caps)

    def reset(self, now: float) -> None:
        """Discard everything: it was measured beside pairs that turned out to be no links."""
        self._lines.reset(now)
        for cap in self._caps.values():
            cap.clear()
        self._reports_from = now + _REPORT_WINDOW_S

    def upper_bound(self, pair: tuple[int, int]) -> float:
        """Return the most that a (source, target) link can carry, in bit/s, as far as its lines show."""
        return self._lines.upper_bound(pair)

    def may_have_slowed(self, pair: tuple[int, int], now: float) -> bool:
        """Return whether what others carried may have slowed a (source, target) link in the last seconds."""
        return any(
            self._lines.may_have_slowed((end, rank), self._caps[end, rank].shared(now), pair, now)
            for end, rank in enumerate(pair)
        )

    def contention_known(self, line: Line, now: float) -> bool:
        """Return whether it is known when a line slows its links, so that at other times it does not."""
        return self.contended or self._caps[line].shared(now) > 0.0

    def known(self, now: float) -> dict[int, tuple[float, float]]:
        """Return the known caps out of and into each rank, in bit/s; 0: unknown."""
        return {
            rank: (self._caps[0, rank].known(now), self._caps[1, rank].known(now))
            for rank in range(self._size)
        }

    def counting(self, end: int, rates: Rates, now: float) -> dict[int, float]:
        """Return the caps to plan with, in bit/s by rank; `end`: 0 for egress, 1 for ingress."""
        caps = {}
        for rank in range(self._size):
            cap = self._caps[end, rank]
            if not cap.readings:  # as of most nodes
                cap.counts = False
                continue
            pairs = (((rank, other), (other, rank))[end] for other in range(self._size))
            links = [rate for pair in pairs if (rate := rates.get(pair)) is not None]
            together = sum(link.value for link in links)
            limit = _ENDS if cap.counts else _BEGINS
            cap.counts = len(links) > 1 and 0.0 < cap.known(now) < limit * together
            if cap.counts:
                caps[rank] = cap.readings.value
        return caps

    def counts(self, line: Line) -> bool:
        """Return whether policies are planned with a cap of this line."""
        return self._caps[line].counts

    def error(self, now: float) -> float:
        """Return the largest standard error of the caps that count, as a fraction."""
        return max((cap.readings.error(now) for cap in self._caps.values() if cap.counts), default=0.0)
