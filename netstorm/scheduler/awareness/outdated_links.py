"""How far the rate of a link is still believed that was not measured since others have changed. Pure.

Links of a WAN change together. A rate that was read before others changed is planned nearer to that of links
that were never measured: so a fast link is not believed to be fast for ever, and a slow one is tried again.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from netstorm.scheduler.awareness.link_reports import Rates

__all__ = ["RecentChanges", "recent_changes"]

_PRESENT_S: Final = 10.0
"""A link that was measured within that is in use: whether it has changed is known."""


@dataclass(frozen=True, slots=True)
class RecentChanges:
    """When links in use have last changed."""

    times: tuple[float, ...] = ()
    """In order, of those that have ever changed."""
    in_use: int = 0
    """Number of links in use, changed or not."""

    def part_since(self, read_at: float) -> float:
        """Return which part of the links in use has changed since a link was read, from 0 to 1.

        Without this rule the 15th round of jobs that find out by themselves which pairs are links took 1.21
        times as long as with a network file on the worst of eight backbones, and 1.13 with it; in the mean it
        is 1.04 either way (docs/measurements/awareness-rules.md, "Outdated links").
        """
        return (len(self.times) - bisect_right(self.times, read_at)) / self.in_use if self.times else 0.0


def recent_changes(rates: Rates, now: float) -> RecentChanges:
    """Return what has changed among the links in use."""
    in_use = [rate.readings.changed_at for rate in rates.values() if rate.readings.age(now) <= _PRESENT_S]
    times = tuple(sorted(time for time in in_use if time > -math.inf))
    return RecentChanges(times, len(in_use)) if times else RecentChanges()
