"""What the rate to plan with rests on beside a link's own reports: access lines, and what others do. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final, TypeAlias

from netstorm.scheduler.awareness.link_reports import Rate

__all__ = ["ABLE_MORE", "SLOW_SIBLING", "CapDirection", "LinkContext", "Rates", "changes_of", "steady"]

ABLE_MORE: Final = 2.0
"""How much more a link may be able to carry than it did in company, if nobody has seen it alone. It may be
more still: then the next policy shows it. But processors that are busy look like access lines, and a slow
link must not be planned as a fast one for that.
"""

SLOW_SIBLING: Final = 0.6
"""Links that share a cap get about the same; TCP is not fairer than that among unequal round trips."""

_PRESENT_S: Final = 10.0
"""A link that was measured within that is measured at present."""

_STEADY: Final = 0.02
"""What is assumed of links that nobody has measured moves in steps of that, at least."""

Rates: TypeAlias = dict[tuple[int, int], Rate]

Changes: TypeAlias = tuple[tuple[float, ...], int]
"""When links that are measured at present have last changed, in order, and how many are measured; nothing and
0 if none of them has ever changed."""


@dataclass(frozen=True, slots=True)
class CapDirection:
    """Access lines, all in the same direction."""

    caps: dict[int, float]
    """Those that count, by rank."""
    most: dict[int, float]
    """The fastest link at each, by rank."""

    def binds(self, rank: int, rate: float) -> bool:
        """Return whether a link of this rate may be as slow as that only because of the line of `rank`."""
        return rank in self.caps and rate >= SLOW_SIBLING * self.most[rank]


@dataclass(frozen=True, slots=True)
class LinkContext:
    """What the rate to plan with rests on, beside the link's own reports."""

    sides: tuple[CapDirection, CapDirection]
    seldom: float | None
    """Rate of links never seen; None: not known either."""
    far: float | None
    """Their latency."""
    changes: Changes

    def uncapped(self, pair: tuple[int, int], found: Rate) -> float:
        """Return the rate of a link that may have been seen only while an access line was the limit."""
        rate = found.value
        if any(
            side.binds(rank, rate) and shares
            for side, rank, shares in zip(self.sides, pair, found.shares, strict=True)
        ):
            caps = (side.caps.get(rank, math.inf) for side, rank in zip(self.sides, pair, strict=True))
            rate = max(rate, min(*caps, ABLE_MORE * rate))
        return rate

    def outdated(self, read_at: float) -> float:
        """Return which part of the links that are measured at present has changed since a link was read."""
        times, present = self.changes
        return (len(times) - bisect_right(times, read_at)) / present if times else 0.0

    def other_lines(self, other: LinkContext) -> set[int]:
        """Return the ranks at whose access lines something is not as in another view."""
        found: set[int] = set()
        for mine, its in zip(self.sides, other.sides, strict=True):
            for one, another in ((mine.caps, its.caps), (mine.most, its.most)):
                found |= {rank for rank, _ in one.items() ^ another.items()}
        return found


def changes_of(rates: Rates, now: float) -> Changes:
    """Return what has changed among the links that are measured at present."""
    present = [one.readings.changed_at for one in rates.values() if one.readings.age(now) <= _PRESENT_S]
    times = tuple(sorted(time for time in present if time > -math.inf))
    return times, len(present) if times else 0


def steady(new: float | None, before: float | None) -> float | None:
    """Return the new value, or the one before if that does as well."""
    if new is None or before is None:
        return new
    return before if abs(new - before) <= _STEADY * before else new
