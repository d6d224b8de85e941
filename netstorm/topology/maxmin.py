"""Max-min fair rates of flows that come and go: progressive filling, done again only where something changed.

Each resource has a level: the most that it gives to any one flow. A flow's rate is the least level of its
resources, and a resource's level is what fills it when each flow takes no more than the levels of its other
resources allow. Rates for which both hold are the max-min fair ones [1]_, and there are no others; so after a
change only levels that it reaches are worked out again, the lowest first, until nothing moves [2]_.

References:
    .. [1] Bertsekas and Gallager, Data Networks, 2nd edition, §6.5.2.
    .. [2] Charny, Clark and Jain, Congestion control with explicit rate indication, ICC 1995: the levels
       settle in finitely many steps, in whatever order they are worked out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Final

__all__ = ["MaxMin"]

_SAME: Final = 1e-9
"""Levels that differ by less, relative to their size, are the same: rounding must not ripple on."""


class MaxMin:
    """Flows 0..F-1 over resources 0..R-1; those that are started share what they use.

    Attributes:
        rates: by flow, in the unit of the capacities; 0 while it is stopped.
    """

    def __init__(self, uses: Sequence[Sequence[int]], capacities: Sequence[float]) -> None:
        """Begin with no flow started.

        Args:
            uses: by flow, the resources that it uses, at least one, each once.
            capacities: by resource.
        """
        self._uses: Final = tuple(tuple(resources) for resources in uses)
        self.rates: Final = [0.0] * len(self._uses)
        self._started = [False] * len(self._uses)
        self._moved: dict[int, None] = {}
        """Started flows whose rate may be another one; a dict, since its order is that of insertion."""
        self._reset(capacities)

    def start(self, flow: int) -> None:
        """Let a flow take its part; nothing changes before `settle`."""
        self._started[flow] = True
        self._moved[flow] = None
        for resource in self._shared[flow]:
            self._active[resource][flow] = None
            self._mark(resource)

    def stop(self, flow: int) -> None:
        """Take a flow out; nothing changes for the others before `settle`."""
        self._started[flow] = False
        self.rates[flow] = 0.0
        self._moved.pop(flow, None)
        for resource in self._shared[flow]:
            del self._active[resource][flow]
            self._mark(resource)

    def set_capacities(self, capacities: Sequence[float]) -> None:
        """Change the capacities; nothing changes for the flows before `settle`."""
        self._reset(capacities)
        for flow, started in enumerate(self._started):
            if started:
                self.start(flow)

    def settle(self) -> list[int]:
        """Bring all rates up to date; return the started flows whose rate is another one now."""
        while self._dirty:
            _, resource = heapq.heappop(self._dirty)
            if self._is_dirty[resource]:
                self._is_dirty[resource] = False
                self._refill(resource)
        changed = []
        for flow in self._moved:
            rate = self._bound[flow]
            for resource in self._shared[flow]:
                rate = min(rate, self._level[resource])
            if rate != self.rates[flow]:
                self.rates[flow] = rate
                changed.append(flow)
        self._moved.clear()
        return changed

    def _reset(self, capacities: Sequence[float]) -> None:
        """Tell the resources that flows really share from those that only bound one flow."""
        users: list[list[int]] = [[] for _ in capacities]
        for flow, resources in enumerate(self._uses):
            for resource in resources:
                users[resource].append(flow)
        self._capacities = list(capacities)
        self._bound = [min(capacities[resource] for resource in resources) for resources in self._uses]
        """By flow: what it gets if it is alone."""
        shares = [
            len(using) > 1 and sum(self._bound[flow] for flow in using) > capacity
            for using, capacity in zip(users, capacities, strict=True)
        ]
        self._shared = [tuple(one for one in resources if shares[one]) for resources in self._uses]
        self._active: list[dict[int, None]] = [{} for _ in capacities]
        self._level = [math.inf] * len(capacities)
        self._is_dirty = [False] * len(capacities)
        self._dirty: list[tuple[float, int]] = []

    def _mark(self, resource: int) -> None:
        if not self._is_dirty[resource]:
            self._is_dirty[resource] = True
            heapq.heappush(self._dirty, (self._level[resource], resource))

    def _refill(self, resource: int) -> None:
        """Work out one level, and mark the resources that must follow."""
        level, bound, shared = self._level, self._bound, self._shared
        active = self._active[resource]
        demands = []
        for flow in active:
            demand = bound[flow]
            for other in shared[flow]:
                if level[other] < demand and other != resource:
                    demand = level[other]
            demands.append(demand)
        before, now = level[resource], _fill(demands, self._capacities[resource])
        if now == before or abs(now - before) <= _SAME * min(now, before):
            return
        level[resource] = now
        lower = min(now, before)
        moved, is_dirty = self._moved, self._is_dirty
        for flow in active:
            if bound[flow] <= lower:
                continue  # neither level, the old one or the new, is what holds it back
            moved[flow] = None
            for other in shared[flow]:
                # What asks for more than a level, before and now, does not move that level.
                if other != resource and lower < level[other] and not is_dirty[other]:
                    self._mark(other)


def _fill(demands: list[float], capacity: float) -> float:
    """Return the level at which demands, none getting more than that, fill a capacity; inf: they cannot."""
    demands.sort()
    left, count = capacity, len(demands)
    for demand in demands:
        if demand * count >= left:
            return left / count
        left -= demand
        count -= 1
    return math.inf
