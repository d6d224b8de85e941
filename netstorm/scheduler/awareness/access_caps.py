"""Which caps access lines have: by what all links carried at the same time, and by what nodes say. Pure."""

from __future__ import annotations

import logging
import math
from typing import Final

from netstorm.protocol.messages import Measured
from netstorm.scheduler.awareness.access_lines import AccessLines, Line
from netstorm.scheduler.awareness.link_context import ABLE_MORE, SLOW_SIBLING, CapDirection, Rates
from netstorm.scheduler.awareness.readings import Readings
from netstorm.topology.networks.elements import Bounds

__all__ = ["RATES", "AccessCaps"]

_log = logging.getLogger(__name__)

RATES: Final = Bounds(100.0, 1e13, "from 100bit/s to 10Tbit/s")
"""Narrower than what a file may say: a report beyond it is a mistake, and would spoil every plan."""

_BEGINS: Final = 0.85
_ENDS: Final = 0.95
"""Part of what its links could carry together up to which a node's access line counts as a cap. The two
differ, or noise would make caps come and go."""

_FOR_S: Final = 300.0
"""How long a cap that nobody sees any more is believed in: a policy may have no links share that line."""

_LINES_S: Final = 60.0
"""What a node says of its access lines rests on so much of the past (`pslite.measurement.access_line`)."""


class _Cap:
    """Of one direction of a node's access line."""

    __slots__ = ("counts", "readings", "seen")

    def __init__(self) -> None:
        self.readings = Readings()
        """Empty again, once it is known that there is none."""
        self.counts = False
        self.seen = False
        """Links have been seen to share it, so a node that says that they don't is wrong."""

    def forget(self) -> None:
        """Know of none."""
        self.readings, self.seen = Readings(), False

    def known(self, now: float) -> float:
        """Return it, in bit/s; 0: nobody knows of any."""
        return self.readings.value if self.readings and self.readings.age(now) <= _FOR_S else 0.0

    def shared(self, now: float) -> float:
        """Return what links have been seen to share, in bit/s; 0: nothing."""
        return self.known(now) if self.seen else 0.0


class AccessCaps:
    """Of all access lines of a job."""

    def __init__(self, size: int) -> None:
        """Know of none; `size`: the number of nodes."""
        self._size: Final = size
        self._access: Final = AccessLines(size)
        self._caps: Final[dict[Line, _Cap]] = {(end, rank): _Cap() for end in (0, 1) for rank in range(size)}
        self._said_from = -math.inf
        """From when on what nodes say is about links alone."""

    @property
    def crowded(self) -> bool:
        """Whether links carry less in company: they share lines, be these known or not."""
        return self._access.crowded

    def take(self, rank: int, report: Measured, now: float) -> int:
        """Take what a node has carried, and what it says of its lines; return how many values cannot be."""
        refused = self._access.take(rank, report.throughput, now)
        for end, value in enumerate((report.egress, report.ingress)):
            cap = self._caps[end, rank]
            if value == 0.0 or now < self._said_from or self.crowded or cap.shared(now):
                continue
            if value == math.inf:
                cap.forget()
            elif RATES.allow(value):
                cap.readings.add(value, 0.0, now)
            else:
                refused += 1
        return refused

    def look(self, now: float) -> list[Line]:
        """Find out which links share lines; return the lines of which it was not known."""
        if now < self._access.due():
            return []
        for line, cap in self._caps.items():
            shared = cap.shared(now)
            if shared and self._access.beyond(line, shared, now):
                cap.forget()
                self._access.forget_line(line)
        crowded = self.crowded
        news = []
        for line, value in self._access.look(now).items():
            cap = self._caps[line]
            if not RATES.allow(value):
                continue
            if not cap.shared(now):
                cap.readings, cap.seen = Readings(), True
                news.append(line)
            cap.readings.add(value, 0.0, now)
        if self.crowded == crowded:
            return news
        how = "less in company: they share lines" if self.crowded else "the same in any company"
        _log.info("links carry %s", how)
        if not self.crowded:
            return news
        for cap in self._caps.values():
            if not cap.seen:  # then what nodes say by chunks is often wrong
                cap.forget()
        return list(self._caps)

    def forget(self, now: float) -> None:
        """What was carried, and said, so far was about the company of what are no links."""
        self._access.forget(now)
        for cap in self._caps.values():
            cap.forget()
        self._said_from = now + _LINES_S

    def most(self, pair: tuple[int, int]) -> float:
        """Return what a link, (source, target), can carry at most, in bit/s, as far as its lines tell."""
        return self._access.most(pair)

    def limit(self, pair: tuple[int, int], now: float) -> bool:
        """Return whether a link, (source, target), may have been slow of late for what others carried."""
        return any(
            self._access.limits((end, rank), self._caps[end, rank].shared(now), pair, now)
            for end, rank in enumerate(pair)
        )

    def tells(self, line: Line, now: float) -> bool:
        """Return whether it is known when others on a line are the limit, so that else they do not matter."""
        return self.crowded or self._caps[line].shared(now) > 0.0

    def known(self, now: float) -> dict[int, tuple[float, float]]:
        """Return, by rank, what its links share out and in, in bit/s, as far as is known; 0: nobody knows."""
        return {
            rank: (self._caps[0, rank].known(now), self._caps[1, rank].known(now))
            for rank in range(self._size)
        }

    def side(self, end: int, rates: Rates, now: float) -> CapDirection:
        """Return the caps that count; `end`: which end of a link is at those lines."""
        caps, most = {}, {}
        for rank in range(self._size):
            cap = self._caps[end, rank]
            if not cap.readings:  # as of most nodes
                cap.counts = False
                continue
            pairs = (((rank, other), (other, rank))[end] for other in range(self._size))
            here = [found for pair in pairs if (found := rates.get(pair)) is not None]
            most[rank] = max((found.value for found in here), default=0.0)
            able = sum(
                (ABLE_MORE if found.held[end] and found.value >= SLOW_SIBLING * most[rank] else 1.0)
                * found.value
                for found in here
            )
            limit = _ENDS if cap.counts else _BEGINS
            cap.counts = len(here) > 1 and 0.0 < cap.known(now) < limit * able
            if cap.counts:
                caps[rank] = cap.readings.value
        return CapDirection(caps, most)

    def error(self, now: float) -> float:
        """Return the largest error of those that count, as a fraction."""
        return max((cap.readings.error(now) for cap in self._caps.values() if cap.counts), default=0.0)
