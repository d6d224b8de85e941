"""Which links share access lines, by what all links carried at the same time, by their sources' kernels.
Pure.

Looked at are half seconds in which links had more to send all the time. Two questions:

*Is the network crowded?* Links that share nothing carry the same in any company, and what shares lines does
not. So the rates of a link in two half seconds are compared, some seconds apart at most, between which what
others carried at one of its ends has changed clearly. In recorded jobs of nine nodes whose links changed
every 20 s, .38 to .8 of these were the same to within a tenth; in two of six nodes behind access lines, .02
to .28, from the first ten seconds on. It is asked of the network as a whole: a line at the other end makes a
link unsteady, too. In a crowded network what a link carries in company says nothing of what it could.

*What are the caps?* Behind a common line the total keeps to a ceiling while the links trade: TCP's flows are
never equally fast for long, and what one of them loses the others gain. If the total of several links is near
its highest often, and yet what each of them carried then differs clearly from one such half second to
another, and links there are not steady, that is a cap. The middle one of these differences was 1 to 3 % of
the total where nothing was shared, also while links changed, and 4 to 14 % behind most of the lines that were
the limit.

Chunks do not show that: behind a line that drops packets they are handed over late and all at once. Of what
enters a node only the scheduler can say it: it is what many sources have sent.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from netstorm.protocol.messages import ThroughputReport

__all__ = ["AccessLines", "Line", "Rule", "ceiling_of"]

Line: TypeAlias = tuple[int, int]
"""0: out of a node, 1: into one; and the node's rank."""

_OPEN_S: Final = 2.5
"""How long after its first report a half second waits for those of other nodes, which come once a second."""

_MOST_RATE: Final = 1e13
"""Bit/s; what is more is a mistake."""

_MOST_OPEN: Final = 64
"""Half seconds that wait at a time; a node that reports more is out of its mind."""

_UNDER_WAY_S: Final = 10.0
"""How long after a new policy what the one before has begun is under way."""

_MEMORY_S: Final = 60.0

_AFTER_S: Final = 5.0
"""Half seconds are compared that are no further apart, since links change."""

_OTHERS: Final = 0.2
"""Part of the most that a line has carried by which what others carried must differ."""

_SAME: Final = 0.1
"""A link that carried as much, to within that part, is steady."""

_MOST_COMPARED: Final = 32
"""Of one line and half second: with many nodes there are many."""

_ENOUGH: Final = 200
_ENOUGH_OF_A_LINE: Final = 20
"""So few say nothing."""

_CROWDED: Final = 0.3
_NOT_CROWDED: Final = 0.36
"""Part of them that are steady below which a network is crowded, and above which it is not: the two differ,
or it would come and go. A line whose own part is not below the former has no cap."""

_PLACE: Final = 0.9
"""Where in the order of the totals the ceiling is: what is above it was delivered before, and acknowledged
late."""

_NEAR: Final = 0.05
"""Totals that are so near to it are at the ceiling."""

_LEAST: Final = 6
"""Half seconds at the ceiling, and pairs of them."""

_MOST: Final = 40
"""At the ceiling, of which the newest are compared."""

_SOON_S: Final = 8.0
"""They are compared if they are no further apart, since links change."""

_EVERY_S: Final = 2.0
_FEW: Final = 16
"""How often lines are looked at; with more nodes less often, as there are more of them."""

_FULL: Final = 0.7
"""Part of its cap from which on a line slows what it carries."""

_HALF_FULL: Final = 0.4
"""The same, in a crowded network, of the most that it has carried: nobody knows its cap."""

_COMPANY: Final = 0.2
"""Part of what a line carries that must be of other links for these to matter."""

_LATELY_S: Final = 5.0
"""An estimate may rest on what was carried so long before."""

_BEYOND: Final = 1.15
_BEYOND_TIMES: Final = 3
"""A line that carried so many times its cap, as often, has another one, or none."""


class Rule(NamedTuple):
    """What makes a ceiling a cap."""

    often: float
    """Part of the half seconds that are at the ceiling."""
    traded: float
    """Part of the total that links have won or lost between two of them."""


_ANYWHERE: Final = Rule(0.25, 0.04)
_IF_CROWDED: Final = Rule(0.15, 0.03)
"""Of 12 access lines seven were named in a recorded job, with errors of 7 % at most, and four in another one,
of which one was 16 % too low; none in four on links that change.
"""


class _Total(NamedTuple):
    """What a line carried in some half second while some links had more to send."""

    at: float
    total: float
    """Bit/s."""
    rates: dict[int, float]
    """Of those links, by the rank at the other end."""


class _Compared(NamedTuple):
    """Rates of links at a line in some half second, beside those before it in other company."""

    at: float
    number: int
    steady: int


@dataclass(slots=True)
class _HalfSecond:
    """What was carried in it, as far as it was reported."""

    at: float
    """When it was first heard of."""
    rates: dict[tuple[int, int], float] = field(default_factory=dict)
    totals: dict[Line, float] = field(default_factory=dict)
    eager: dict[Line, dict[int, float]] = field(default_factory=dict)

    def add(self, source: int, target: int, rate: float, *, eager: bool) -> None:
        self.rates[source, target] = rate
        for line, other in (((0, source), target), ((1, target), source)):
            self.totals[line] = self.totals.get(line, 0.0) + rate
            if eager:
                self.eager.setdefault(line, {})[other] = rate


class AccessLines:
    """All access lines of a job.

    Attributes:
        crowded: what links carry depends on what others do.
    """

    def __init__(self, size: int) -> None:
        """Know nothing; `size`: the number of nodes."""
        self.crowded = False
        self._size: Final = size
        self._every_s: Final = _EVERY_S * max(1.0, size / _FEW)
        self._open: Final[dict[int, _HalfSecond]] = {}
        self._over: Final[deque[_HalfSecond]] = deque()
        """Of late."""
        self._totals: Final[dict[Line, deque[_Total]]] = {}
        self._most: Final[dict[Line, float]] = {}
        self._compared: Final[dict[Line, deque[_Compared]]] = {}
        self._new: Final[set[Line]] = set()
        self._looked_at = self._from = -math.inf

    def take(self, source: int, carried: Iterable[ThroughputReport], now: float) -> int:
        """Take what the links out of a node have carried; return how many values cannot be."""
        refused = 0
        if now < self._from:
            return refused
        for one in carried:
            found = self._open.get(one.number)
            if found is None:
                if len(self._open) >= _MOST_OPEN:
                    refused += 1
                    continue
                found = self._open[one.number] = _HalfSecond(now)
            for target, rate, eager in ((link.target, link.rate, link.backlogged) for link in one.links):
                if not (0 <= target < self._size and target != source and 0.0 <= rate <= _MOST_RATE):
                    refused += 1
                elif (source, target) not in found.rates:
                    found.add(source, target, rate, eager=eager)
        return refused

    def forget_line(self, line: Line) -> None:
        """It is another one than it was."""
        for known in (self._totals, self._most, self._compared):
            known.pop(line, None)
        self._new.discard(line)

    def forget(self, now: float) -> None:
        """What was carried so far, and is under way, was carried in the company of what are no links."""
        self.crowded, self._from = False, now + _UNDER_WAY_S
        self._open.clear()
        self._over.clear()
        self._totals.clear()
        self._most.clear()
        self._compared.clear()

    def due(self) -> float:
        """Return when `look` may find something."""
        return self._looked_at + self._every_s

    def look(self, now: float) -> dict[Line, float]:
        """Return the lines that have a cap, and that in bit/s, as far as there is something new."""
        self._looked_at = now
        for number in [one for one, found in self._open.items() if now >= found.at + _OPEN_S]:
            self._close(self._open.pop(number))
        while self._over and self._over[0].at < now - _LATELY_S:
            self._over.popleft()
        found = {line: self._steadiness(line, now) for line in list(self._compared)}
        number = sum(one.number for one in found.values())
        if number >= _ENOUGH:
            part = sum(one.steady for one in found.values()) / number
            self.crowded = part < (_NOT_CROWDED if self.crowded else _CROWDED)
        rule = _IF_CROWDED if self.crowded else _ANYWHERE
        unsteady = [
            line
            for line in sorted(self._new)
            if (one := found.get(line)) is not None
            and one.number >= _ENOUGH_OF_A_LINE
            and one.steady < _CROWDED * one.number
        ]
        self._new.clear()
        caps = {line: ceiling_of(self._totals[line], rule) for line in unsteady}
        return {line: cap for line, cap in caps.items() if cap}

    def most(self, link: tuple[int, int]) -> float:
        """Return what a link, (source, target), can carry at most, in bit/s, if the network is crowded: as
        much as its lines have in half a second. What TCP has seen for a moment may be more.
        """
        if not self.crowded:
            return math.inf
        return min(self._most.get((end, rank), math.inf) for end, rank in enumerate(link))

    def limits(self, line: Line, cap: float, link: tuple[int, int], now: float) -> bool:
        """Return whether a link may have been slow of late for what others carried on a line at one end.

        Args:
            line: that one.
            cap: of the line, in bit/s; 0: not known.
            link: source and target.
            now: the time.
        """
        if not (cap or self.crowded):
            return False
        full = _FULL * cap if cap else _HALF_FULL * self._most.get(line, 0.0)
        for one in self._lately(now):
            total, own = one.totals.get(line, 0.0), one.rates.get(link, 0.0)
            if own and total >= full and total - own >= _COMPANY * total:
                return True
        return False

    def beyond(self, line: Line, cap: float, now: float) -> bool:
        """Return whether it has carried more than a line of this cap can."""
        above = sum(one.totals.get(line, 0.0) > _BEYOND * cap for one in self._lately(now))
        return above >= _BEYOND_TIMES

    def _lately(self, now: float) -> Iterator[_HalfSecond]:
        return (one for one in itertools.chain(self._open.values(), self._over) if one.at >= now - _LATELY_S)

    def _close(self, found: _HalfSecond) -> None:
        """Nothing more is awaited of a half second."""
        self._over.append(found)
        for line, rates in found.eager.items():
            kept = self._totals.setdefault(line, deque())
            while kept and kept[0].at < found.at - _MEMORY_S:
                kept.popleft()
            now = _Total(found.at, found.totals[line], rates)
            kept.append(now)
            self._new.add(line)
            self._most[line] = most = max(one.total for one in kept)
            same = list(itertools.islice(_steady(kept, now, most), _MOST_COMPARED))
            if same:
                self._compared.setdefault(line, deque()).append(_Compared(now.at, len(same), sum(same)))

    def _steadiness(self, line: Line, now: float) -> _Compared:
        """Return what is known of a line since a minute ago."""
        kept = self._compared[line]
        while kept and kept[0].at < now - _MEMORY_S:
            kept.popleft()
        return _Compared(now, sum(one.number for one in kept), sum(one.steady for one in kept))


def _steady(kept: deque[_Total], now: _Total, most: float) -> Iterator[bool]:
    """Yield of each link, and half second before with other company at this line, whether it did the same."""
    for one in itertools.islice(reversed(kept), 1, None):
        if one.at < now.at - _AFTER_S:
            return
        for other, rate in now.rates.items():
            before = one.rates.get(other, 0.0)
            if before and abs((now.total - rate) - (one.total - before)) > _OTHERS * most:
                yield abs(math.log(rate / before)) < _SAME


def ceiling_of(totals: Iterable[_Total], rule: Rule) -> float:
    """Return the cap of a line, in bit/s, that carried this; 0: there is none, or nobody knows."""
    all_of_them = [one for one in totals if len(one.rates) > 1]
    if len(all_of_them) < _LEAST:
        return 0.0
    ceiling = sorted(one.total for one in all_of_them)[int(_PLACE * (len(all_of_them) - 1))]
    near = [one for one in all_of_them if abs(one.total - ceiling) <= _NEAR * ceiling]
    if len(near) < max(_LEAST, rule.often * len(all_of_them)):
        return 0.0
    traded = _traded(near[-_MOST:])
    if len(traded) < _LEAST or float(np.median(traded)) < rule.traded * ceiling:
        return 0.0
    return math.fsum(one.total for one in near) / len(near)


def _traded(near: list[_Total]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return how much, in bit/s, links have won or lost from one half second to another, of all pairs."""
    others = sorted({other for one in near for other in one.rates})
    rates = np.array([[one.rates.get(other, np.nan) for other in others] for one in near])
    at = np.array([one.at for one in near])
    first, second = np.triu_indices(len(near), 1)
    soon = at[second] - at[first] <= _SOON_S
    moved = np.abs(rates[first[soon]] - rates[second[soon]])
    both = np.isfinite(moved)
    traded: np.ndarray[tuple[int], np.dtype[np.float64]] = np.nansum(moved, axis=1)[both.sum(axis=1) > 1] / 2
    return traded
