"""The links that policies are planned for, kept between two estimates of the network.

Of thousands of links few change between two estimates. Only these are built anew: at 128 nodes that takes 49
instead of 480 ms (docs/measurements/awareness.md, "What the scheduler costs").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

from netstorm.scheduler.awareness.readings import Readings, error_after
from netstorm.topology.network import Network, Routing

__all__ = ["LinkUpdate", "PlannedLinks"]

LinkUpdate: TypeAlias = tuple[tuple[int, int], float, float, float, Readings | None]
"""(source, target), rate in bit/s, latency in s, the least error, and the readings whose error is larger."""


class PlannedLinks:
    """The links of one network, in their order."""

    def __init__(self, prior: Network) -> None:
        """Begin with what is assumed, and errors of 0."""
        self._links: Final = list(prior.links)
        self._places: Final[dict[tuple[int, int], int]] = {
            (link.source, link.target): place for place, link in enumerate(prior.links)
        }
        self._errors: Final = [(0.0, 0.0, math.inf)] * len(prior.links)
        """By link: the least error, that of the readings, and the time of the latter."""
        self._network: Network | None = None
        self._caps: tuple[Mapping[int, float], Mapping[int, float]] = ({}, {})
        self._excluded: frozenset[tuple[int, int]] = frozenset()

    def __contains__(self, pair: tuple[int, int]) -> bool:
        return pair in self._places

    def update(self, links: Iterable[LinkUpdate]) -> None:
        """Replace what is planned for some links."""
        for pair, rate, latency, least, readings in links:
            place = self._places[pair]
            known = (0.0, math.inf) if readings is None else readings.error_and_time()
            self._errors[place] = (least, *known)
            before = self._links[place]
            loss = before.loss if readings is None else 0.0  # what was measured is goodput
            if (rate, latency, loss) != (before.rate, before.latency, before.loss):
                self._links[place] = replace(before, rate=rate, latency=latency, loss=loss)
                self._network = None

    def network(
        self,
        prior: Network,
        excluded: frozenset[tuple[int, int]],
        egress: Mapping[int, float],
        ingress: Mapping[int, float],
        *,
        routing: Routing,
    ) -> Network:
        """Return the network with these access caps, by rank, but without some links."""
        if (
            self._network is None
            or (egress, ingress) != self._caps
            or excluded != self._excluded
            or routing is not self._network.routing
        ):
            self._caps, self._excluded = (dict(egress), dict(ingress)), excluded
            nodes = tuple(
                replace(
                    node,
                    egress=egress.get(node.rank, node.egress),
                    ingress=ingress.get(node.rank, node.ingress),
                )
                for node in prior.nodes
            )
            links = tuple(link for link in self._links if (link.source, link.target) not in excluded)
            self._network = replace(prior, nodes=nodes, links=links, changes=(), routing=routing)
        return self._network

    def errors(self, now: float) -> tuple[float, ...]:
        """Return the standard errors of the rates, by link of the last `network`; they grow with age."""
        errors = (max(least, error_after(own, now - at)) for least, own, at in self._errors)
        if not self._excluded:
            return tuple(errors)
        return tuple(
            error for pair, error in zip(self._places, errors, strict=True) if pair not in self._excluded
        )
