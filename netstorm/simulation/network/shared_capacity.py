"""Flows that share capacities on virtual time, max-min fairly, as TCP connections with equal round trips do.

A flow serves one message at a time, at the rate that its resources allow; the other messages wait. Latency is
added elsewhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from netstorm.pslite.memory_network import Timeline, Timer
from netstorm.topology.prediction import MaxMin

__all__ = ["Flow", "SharedCapacity"]


class Flow:
    """Messages in order over the same resources. Made by `SharedCapacity.open`."""

    __slots__ = ("left", "messages", "number", "rate", "resources", "since", "timer")

    def __init__(self, number: int, resources: tuple[int, ...]) -> None:
        self.number: Final = number
        self.resources: Final = resources
        self.messages: Final[deque[tuple[float, Callable[[], None]]]] = deque()
        """(Bits, called when they are sent); the first is in service."""
        self.left = 0.0
        """Bits of the first message that were not sent at `since`."""
        self.since = 0.0
        self.rate = 0.0
        self.timer: Timer | None = None
        """Set to when the first message is sent or, if the rate has fallen since, to an earlier time."""

    def ends(self) -> float:
        """Return when the first message is sent, at the present rate."""
        return self.since + max(0.0, self.left) / self.rate if self.rate > 0 else math.inf


class SharedCapacity:
    """Resources 0..R-1, and flows over them."""

    def __init__(self, timeline: Timeline, capacities: Sequence[float]) -> None:
        """Begin without a flow; capacities in bit/s."""
        self._timeline: Final = timeline
        self._capacities: Final = list(capacities)
        self._sharing: Final = MaxMin(capacities)
        self._flows: Final[dict[int, Flow]] = {}
        self._limits: Final[dict[int, float]] = {}
        """New limits of flows, for the next `_settle`."""
        self._changed = False
        self._settles = False
        self.bits: Final = [0.0] * len(self._capacities)
        """By resource: bits of all messages that are sent."""

    def set_capacity(self, resource: int, capacity: float) -> None:
        """Change a capacity from now on, also for what is in service."""
        self._capacities[resource] = capacity
        self._changed = True
        self._settle_soon()

    def open(self, resources: Sequence[int], limit: float = math.inf) -> Flow:
        """Return a new flow over these resources, at least one, with a rate of at most `limit` bit/s."""
        flow = Flow(self._sharing.add(resources, limit), tuple(resources))
        self._flows[flow.number] = flow
        return flow

    def set_limit(self, flow: Flow, limit: float) -> None:
        """Change the limit of a flow from now on, also for what is in service."""
        self._limits[flow.number] = limit
        self._changed = True
        self._settle_soon()

    def send(self, flow: Flow, bits: float, through: Callable[[], None]) -> None:
        """Add a message to a flow; call `through` when its last bit is sent."""
        flow.messages.append((bits, through))
        if len(flow.messages) == 1:
            flow.left, flow.since, flow.rate = bits, self._timeline.now, 0.0
            self._sharing.start(flow.number)
            self._settle_soon()

    def close(self, flow: Flow) -> None:
        """Remove a flow and its messages."""
        if self._flows.pop(flow.number, None) is None:
            return
        if flow.timer is not None:
            flow.timer.cancel()
        flow.messages.clear()
        self._sharing.remove(flow.number)
        self._settle_soon()

    def _settle_soon(self) -> None:
        """Compute new rates after everything else that happens at this virtual time."""
        if not self._settles:
            self._settles = True
            self._timeline.after(0.0, self._settle)

    def _settle(self) -> None:
        self._settles = False
        if self._changed:
            self._changed = False
            self._sharing.set_capacities(self._capacities, self._limits)
            self._limits.clear()
        now = self._timeline.now
        for number in self._sharing.settle():
            flow = self._flows[number]
            flow.left -= flow.rate * (now - flow.since)
            flow.since, flow.rate = now, self._sharing.rates[number]
            if flow.timer is None or flow.ends() < flow.timer.time:
                self._watch(flow)

    def _watch(self, flow: Flow) -> None:
        if flow.timer is not None:
            flow.timer.cancel()
        flow.timer = self._timeline.at(flow.ends(), lambda: self._check_sent(flow))

    def _check_sent(self, flow: Flow) -> None:
        """End the first message of a flow, unless its rate has fallen in the meantime."""
        flow.timer = None
        now = self._timeline.now
        if flow.ends() > now:
            self._watch(flow)
            return
        bits, through = flow.messages.popleft()
        for resource in flow.resources:
            self.bits[resource] += bits
        if flow.messages:
            flow.left, flow.since = flow.messages[0][0], now
            self._watch(flow)
        else:
            self._sharing.stop(flow.number)
            self._settle_soon()
        through()
