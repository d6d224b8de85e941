"""What all links carried in the same half seconds, gathered from the reports of all nodes. Pure.

Each node reports what its kernel's TCP has delivered on its outgoing links, by numbered half seconds. Reports
come once a second, so a half second stays open for a while, until those of all nodes have arrived.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from netstorm.protocol.messages import ThroughputReport
from netstorm.topology.network import Bounds

__all__ = ["RATES", "HalfSecond", "Line", "ThroughputSamples"]

Line: TypeAlias = tuple[int, int]
"""One direction of an access line: 0 out of a node, 1 into it; and the node's rank."""

RATES: Final = Bounds(100.0, 1e13, "from 100bit/s to 10Tbit/s")
"""Plausible measured rates, in bit/s: others are errors, and would spoil every plan."""

_OPEN_S: Final = 2.5
"""How long a half second waits for the reports of other nodes, which come once a second."""

_MOST_OPEN: Final = 64
"""Half seconds that may be open at a time: bounds the memory that wrong reports take."""

_RECENT_S: Final = 5.0
"""Samples older than that no longer explain a rate: a node's estimate rests on chunks of the last seconds."""


@dataclass(slots=True)
class HalfSecond:
    """What was carried in one half second, as far as it is reported."""

    at: float
    """Time of the first report."""
    rates: dict[tuple[int, int], float] = field(default_factory=dict)
    """Bit/s, by (source, target)."""
    totals: dict[Line, float] = field(default_factory=dict)
    """Bit/s, by access line."""
    saturated: dict[Line, dict[int, float]] = field(default_factory=dict)
    """Bit/s of the links that had more to send all the time, by access line and the rank at the other end."""

    def add(self, source: int, target: int, rate: float, *, saturated: bool) -> None:
        """Add what one link carried."""
        self.rates[source, target] = rate
        for line, other in (((0, source), target), ((1, target), source)):
            self.totals[line] = self.totals.get(line, 0.0) + rate
            if saturated:
                self.saturated.setdefault(line, {})[other] = rate


class ThroughputSamples:
    """The last half seconds of a job with `size` nodes."""

    def __init__(self, size: int) -> None:
        self._size: Final = size
        self._open: Final[dict[int, HalfSecond]] = {}
        self._closed: Final[deque[HalfSecond]] = deque()
        self._from = -math.inf

    def record(self, source: int, carried: Iterable[ThroughputReport], now: float) -> int:
        """Record what the links out of a node have carried; return the number of implausible values."""
        rejected = 0
        if now < self._from:
            return rejected
        for report in carried:
            sample = self._open.get(report.number)
            if sample is None:
                if len(self._open) >= _MOST_OPEN:
                    rejected += 1
                    continue
                sample = self._open[report.number] = HalfSecond(now)
            for link in report.links:
                if not (0 <= link.target < self._size and link.target != source) or not (
                    0.0 <= link.rate <= RATES.most
                ):
                    rejected += 1
                elif (source, link.target) not in sample.rates:
                    sample.add(source, link.target, link.rate, saturated=link.backlogged)
        return rejected

    def close(self, now: float) -> list[HalfSecond]:
        """Return the half seconds whose time to wait for reports is over."""
        numbers = [number for number, sample in self._open.items() if now >= sample.at + _OPEN_S]
        closed = [self._open.pop(number) for number in numbers]
        self._closed.extend(closed)
        while self._closed and self._closed[0].at < now - _RECENT_S:
            self._closed.popleft()
        return closed

    def recent(self, now: float) -> Iterator[HalfSecond]:
        """Yield the half seconds of the last few seconds, open ones included."""
        samples = itertools.chain(self._open.values(), self._closed)
        return (sample for sample in samples if sample.at >= now - _RECENT_S)

    def restart(self, at: float) -> None:
        """Discard everything, and what is reported before `at`."""
        self._from = at
        self._open.clear()
        self._closed.clear()
