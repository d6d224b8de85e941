"""The simulated network: how long messages take over links and access lines that they share, on virtual
time, and what is recorded of them.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from netstorm.errors import FrameError
from netstorm.lab.simulation.memory_network import Timeline, Timer
from netstorm.protocol.frames import open_frames
from netstorm.topology.network import Change, Link, Network, Rank
from netstorm.topology.prediction import MaxMin
from netstorm.topology.resources import Resources

__all__ = ["MessageLog", "SharedCapacity", "VirtualNetwork"]


# How long messages take over a network's links and access lines, which they share, on virtual time.
#
# Modelled:
#
# * each direction of a link has a capacity, and so have each node's egress and ingress, if capped; busy
#   connections share them max-min fairly, as TCP connections with equal round-trip times do;
# * under underlay routing the messages of a pair cross the links of its route, and share them with all pairs;
# * a message uses all its resources at once: a path costs its bottleneck once, and the sum of its latencies;
# * loss lowers a link's goodput to rate · (1 - loss), because of retransmissions; with `tcp="reno"` it also
#   limits each connection to what a loss-driven congestion control reaches [1]_;
# * acknowledgements of a one-way link return with its latency, and use no capacity;
# * rate, latency and loss change at their times, also for messages in flight.
#
# Not modelled: slow start, router queues and their drops, header overhead (rates are goodput), processing
# time at the nodes.
#
# References:
#     .. [1] Mathis, Semke, Mahdavi and Ott, The macroscopic behavior of the TCP congestion avoidance
#        algorithm, Computer Communication Review 27 (1997): MSS / RTT · sqrt(3 / 2) / sqrt(loss).

_SEGMENT_BITS: Final = 1448 * 8
"""Payload of a TCP segment in an Ethernet frame."""


@dataclass(slots=True)
class _Direction:
    """One direction of a connection between nodes."""

    flow: Flow
    source: Rank
    target: Rank
    is_open: bool = True

    def arrived(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls `action` if the connection is still open then."""
        return lambda: action() if self.is_open else None


class VirtualNetwork:
    """A `LinkModel` of a `Network`. Hosts without a rank (the scheduler's) have a fixed latency."""

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        ranks: Mapping[str, Rank],
        *,
        outside_latency_s: float = 0.005,
        tcp: Literal["ideal", "reno"] = "ideal",
    ) -> None:
        """Begin with the network as it is at its start.

        Args:
            timeline: virtual time.
            network: links and their changes.
            ranks: the node at which a host is.
            outside_latency_s: one way, between a node and a host without a rank.
            tcp: with "reno", loss also limits each connection.
        """
        self._timeline: Final = timeline
        self._network: Final = network
        self._ranks: Final = dict(ranks)
        self._outside_latency_s = outside_latency_s
        self._reno = tcp == "reno"
        self._links: Final = {(link.source, link.target): link for link in network.links}
        resources = Resources.of(network)
        self._shared: Final = SharedCapacity(timeline, resources.capacities.tolist())
        self._number: Final = {ends: number for number, ends in enumerate(self._links)}
        """Number of each link among the resources, which begin with the links in this order."""
        self._uses: Final = {pair: resources.used_by(pair) for pair in resources.pairs}
        self._flows: dict[int, _Direction] = {}
        for change in network.changes:
            timeline.after(change.at, self._changing(change))

    def carry(self, flow: int, source: str, target: str, size: int, arrived: Callable[[], None]) -> None:
        """See `LinkModel`.

        Raises:
            Unreachable: the two nodes have no link, or no path.
        """
        here, there = self._ranks.get(source), self._ranks.get(target)
        if here is None or there is None or here == there:
            self._timeline.after(self._outside_latency_s if here != there else 0.0, arrived)
            return
        if flow % 2 == 1 and not self._leads(here, there):
            self._timeline.after(self._latency(there, here), arrived)
            return
        found = self._flows.get(flow)
        if found is None:
            found = self._flows[flow] = self._open(here, there)
        direction = found

        def through() -> None:
            self._timeline.after(
                self._latency(direction.source, direction.target), direction.arrived(arrived)
            )

        self._shared.send(found.flow, size * 8.0, through)

    def forget(self, flow: int) -> None:
        """See `LinkModel`."""
        found = self._flows.pop(flow, None)
        if found is not None:
            found.is_open = False
            self._shared.close(found.flow)

    def round_trip(self, source: str, target: str) -> float:
        """See `LinkModel`."""
        here, there = self._ranks.get(source), self._ranks.get(target)
        if here is None or there is None or here == there:
            return 2 * self._outside_latency_s if here != there else 0.0
        back = (there, here) if self._leads(there, here) else (here, there)
        return self._latency(here, there) + self._latency(*back)

    def bits(self, source: Rank, target: Rank) -> float:
        """Return the bits that a link has carried so far."""
        return self._shared.bits[self._number[source, target]]

    def _open(self, source: Rank, target: Rank) -> _Direction:
        self._network.route(source, target)  # raises if there is none
        limit = self._reno_rate(source, target) if self._reno else math.inf
        return _Direction(self._shared.open(self._uses[source, target], limit), source, target)

    def _reno_rate(self, source: Rank, target: Rank) -> float:
        route = self._route(source, target)
        loss = 1.0 - math.prod(1.0 - link.loss for link in route)
        back = (target, source) if self._leads(target, source) else (source, target)
        round_trip = self._latency(source, target) + self._latency(*back)
        if loss <= 0.0 or round_trip <= 0.0:
            return max(link.rate for link in route)
        return _SEGMENT_BITS / round_trip * math.sqrt(1.5 / loss)

    def _leads(self, source: Rank, target: Rank) -> bool:
        """Return whether the network lets data go this way."""
        return (source, target) in self._uses

    def _latency(self, source: Rank, target: Rank) -> float:
        return sum(link.latency for link in self._route(source, target))

    def _route(self, source: Rank, target: Rank) -> list[Link]:
        """Return the links of a route as they are now."""
        return [self._links[link.source, link.target] for link in self._network.route(source, target)]

    def _changing(self, change: Change) -> Callable[[], None]:
        def apply() -> None:
            ends = (change.source, change.target)
            link = self._links[ends] = change.apply(self._links[ends])
            self._shared.set_capacity(self._number[ends], link.rate * (1.0 - link.loss))
            if self._reno:
                for direction in self._flows.values():
                    limit = self._reno_rate(direction.source, direction.target)
                    self._shared.set_limit(direction.flow, limit)

        return apply


# Flows that share capacities on virtual time, max-min fairly, as TCP connections with equal round trips do.
#
# A flow serves one message at a time, at the rate that its resources allow; the other messages wait.
# Latency is added elsewhere.


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


# What is kept of a simulated cluster's messages: a digest of all of them, and the last ones as text.

_LAST_MESSAGES: Final = 40
"""Number of messages that `last` returns."""


class MessageLog:
    """Records every message of one network."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline: Final = timeline
        self._digest = hashlib.blake2b(digest_size=16)
        self._last: deque[tuple[float, str, str, bytes]] = deque(maxlen=_LAST_MESSAGES)

    def record(self, source: str, target: str, header: bytes) -> None:
        """Record a message that is delivered now. Its header holds the payload's checksum."""
        self._digest.update(struct.pack("<d", self._timeline.now))
        self._digest.update(f"{source}>{target}".encode())
        self._digest.update(header)
        self._last.append((self._timeline.now, source, target, header))

    def digest(self) -> str:
        """Return a digest of all messages so far: time, source, target and content of each."""
        return self._digest.hexdigest()

    def last(self) -> list[str]:
        """Return the last messages, one line each."""
        return [
            f"{time:.6f} {source} > {target}: {_readable(header)}"
            for time, source, target, header in self._last
        ]


def _readable(header: bytes) -> str:
    for frames in (1, 2):
        try:
            opened = open_frames(header, frames)
        except FrameError:
            continue
        number = f" #{opened.sequence}" if opened.sequence else ""
        return f"{opened.message!r}{number}"
    return f"{len(header)} bytes that are no frame"
