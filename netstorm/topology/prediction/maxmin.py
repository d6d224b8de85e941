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
from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["MaxMin"]

_SAME: Final = 1e-9
"""Levels that differ by less, relative to their size, are the same: rounding must not ripple on."""


class MaxMin:
    """Flows over resources 0..R-1; those that are started share what they use.

    Attributes:
        rates: by flow, in the unit of the capacities; 0 while it is stopped.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        """Begin without a flow."""
        self.rates: Final[list[float]] = []
        self._uses: Final[list[tuple[int, ...]]] = []
        self._limits: Final[list[float]] = []
        self._started: Final[list[bool]] = []
        self._moved: Final[dict[int, None]] = {}
        """Started flows whose rate may be another one; a dict, since its order is that of insertion."""
        self._capacities = list(capacities)
        self._forget()

    def add(self, uses: Sequence[int], limit: float = math.inf) -> int:
        """Return the number of a new flow, stopped, that never takes more than `limit`.

        Args:
            uses: its resources, at least one, each once.
            limit: in the unit of the capacities.
        """
        flow = len(self._uses)
        self._uses.append(tuple(uses))
        self._limits.append(limit)
        self._started.append(False)
        self.rates.append(0.0)
        self._place(flow)
        return flow

    def remove(self, flow: int) -> None:
        """Forget a flow; its number is not used again."""
        if self._started[flow]:
            self.stop(flow)
        for resource in self._uses[flow]:
            self._users[resource].remove(flow)
            self._wanted[resource] -= self._bound[flow]
        self._uses[flow] = self._shared[flow] = ()

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

    def set_capacities(self, capacities: Sequence[float], limits: Mapping[int, float] | None = None) -> None:
        """Change the capacities, and the limits of some flows; their rates change in `settle`. O(flows)."""
        self._capacities = list(capacities)
        for flow, limit in (limits or {}).items():
            self._limits[flow] = limit
        self._forget()
        for flow in range(len(self._uses)):
            self._place(flow)
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
        if not self._moved:
            return []
        changed = []
        level = self._level
        for flow in self._moved:
            rate = self._bound[flow]
            for resource in self._shared[flow]:
                rate = min(rate, level[resource])
            if rate != self.rates[flow]:
                self.rates[flow] = rate
                changed.append(flow)
        self._moved.clear()
        return changed

    def _forget(self) -> None:
        """Begin to place flows anew."""
        count = len(self._capacities)
        self._users: list[list[int]] = [[] for _ in range(count)]
        self._wanted = [0.0] * count
        """By resource: what its users would take if they were alone."""
        self._is_shared = [False] * count
        """Whether a resource can be too small for its users: the others have no level."""
        self._bound: list[float] = []
        """By flow: what it gets if it is alone."""
        self._shared: list[tuple[int, ...]] = []
        """By flow: those of its resources that have a level."""
        self._active: list[dict[int, None]] = [{} for _ in range(count)]
        """By resource with a level: its started users."""
        self._level = [math.inf] * count
        self._dirty: list[tuple[float, int]] = []
        self._is_dirty = [False] * count

    def _place(self, flow: int) -> None:
        """Tell a flow what it shares, and its resources, which may be shared from now on."""
        uses = self._uses[flow]
        bound = min((self._capacities[resource] for resource in uses), default=0.0)
        bound = min(bound, self._limits[flow])
        self._bound.append(bound)
        self._shared.append(tuple(resource for resource in uses if self._is_shared[resource]))
        for resource in uses:
            users = self._users[resource]
            users.append(flow)
            self._wanted[resource] += bound
            if (
                self._is_shared[resource]
                or len(users) == 1
                or self._wanted[resource] <= self._capacities[resource]
            ):
                continue
            self._is_shared[resource] = True
            for user in users:
                self._shared[user] = (*self._shared[user], resource)
                if self._started[user]:
                    self._active[resource][user] = None
            self._mark(resource)

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
