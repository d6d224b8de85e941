"""The times that a network gives to messages: links, access lines and what shares them, on virtual time.

Modelled:

* each direction of a link is a capacity, and so are each node's egress and ingress, if capped; connections
  that have something to send share them max-min fairly, as TCP connections of like round-trip time do;
* under underlay routing a pair's messages cross the links of its route, sharing them with all other pairs;
* a message takes all its resources at once: a path costs its bottleneck once, and all its latencies;
* loss lowers a link's goodput to rate · (1 - loss), the repetitions' share of it; with `tcp="reno"` it also
  bounds each connection to what a loss-driven congestion control reaches [1]_;
* acknowledgements over a link that leads one way only come back with its latency, using nobody's capacity;
* changes of rate, latency and loss at their times, also for what is under way.

Not modelled: slow start, router queues and their drops, header overhead (rates are goodput), processing time
at the nodes.

References:
    .. [1] Mathis, Semke, Mahdavi and Ott, The macroscopic behavior of the TCP congestion avoidance algorithm,
       Computer Communication Review 27 (1997): MSS / RTT · sqrt(3 / 2) / sqrt(loss).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from netstorm.pslite.clock.virtual_time import Timeline
from netstorm.simulation.shared_capacity import Flow, SharedCapacity
from netstorm.topology.networks.network import Change, Link, Network, Rank
from netstorm.topology.trees.resources import Resources

__all__ = ["VirtualNetwork"]

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
        """Return `action`, unless the connection is gone by then."""
        return lambda: action() if self.is_open else None


class VirtualNetwork:
    """A `LinkModel` of a `Network`. Hosts without a rank (the scheduler's) are reached in a fixed time."""

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        ranks: Mapping[str, Rank],
        *,
        outside_latency_s: float = 0.005,
        tcp: Literal["ideal", "reno"] = "ideal",
    ) -> None:
        """Build the network as it is at its start, which is now.

        Args:
            timeline: the clock.
            network: links and their changes.
            ranks: which host is which node.
            outside_latency_s: one way, between any node and a host that is none.
            tcp: whether loss slows each connection down by itself.
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
        """Of each link among the resources, which begin with the links in this order."""
        self._uses: Final = {pair: resources.used_by(pair) for pair in resources.pairs}
        self._flows: dict[int, _Direction] = {}
        for change in network.changes:
            timeline.after(change.at, self._changing(change))

    def carry(self, flow: int, source: str, target: str, size: int, arrived: Callable[[], None]) -> None:
        """See `LinkModel`.

        Raises:
            Unreachable: the two nodes have no link, or no path.
        """
        one, other = self._ranks.get(source), self._ranks.get(target)
        if one is None or other is None or one == other:
            self._timeline.after(self._outside_latency_s if one != other else 0.0, arrived)
            return
        if flow % 2 == 1 and not self._leads(one, other):
            self._timeline.after(self._latency(other, one), arrived)
            return
        found = self._flows.get(flow)
        if found is None:
            found = self._flows[flow] = self._open(one, other)
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
        one, other = self._ranks.get(source), self._ranks.get(target)
        if one is None or other is None or one == other:
            return 2 * self._outside_latency_s if one != other else 0.0
        back = (other, one) if self._leads(other, one) else (one, other)
        return self._latency(one, other) + self._latency(*back)

    def bits(self, source: Rank, target: Rank) -> float:
        """Return how much a link has carried so far."""
        return self._shared.bits[self._number[source, target]]

    def _open(self, source: Rank, target: Rank) -> _Direction:
        self._network.route(source, target)  # says what is missing, if it is
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
        """Return whether data may go this way."""
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
                for one in self._flows.values():
                    self._shared.set_limit(one.flow, self._reno_rate(one.source, one.target))

        return apply
