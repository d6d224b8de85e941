"""The links that are planned with, kept from one look at the network to the next.

Of thousands of links few change between two looks. What has not is not made again: links, and the network if
none of them is another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

from netstorm.scheduler.awareness.readings import Readings, aged
from netstorm.topology.networks.network import Network, Routing

__all__ = ["PlannedLinks", "Renewed"]

Renewed: TypeAlias = tuple[tuple[int, int], float, float, float, Readings | None]
"""(source, target), rate in bit/s, latency in s, the least error, and the readings whose error is larger."""


class PlannedLinks:
    """Of one network, in the order of its links."""

    def __init__(self, prior: Network) -> None:
        """Begin with what is assumed, and errors of 0."""
        self._links: Final = list(prior.links)
        self._places: Final[dict[tuple[int, int], int]] = {
            (link.source, link.target): place for place, link in enumerate(prior.links)
        }
        self._errors: Final = [(0.0, 0.0, math.inf)] * len(prior.links)
        """By link: the least, that of the readings when they were made, and when that was."""
        self._network: Network | None = None
        self._lines: tuple[Mapping[int, float], Mapping[int, float]] = ({}, {})
        self._avoided: frozenset[tuple[int, int]] = frozenset()

    def __contains__(self, pair: tuple[int, int]) -> bool:
        return pair in self._places

    def renew(self, links: Iterable[Renewed]) -> None:
        """Take what has been worked out anew."""
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
        avoided: frozenset[tuple[int, int]],
        egress: Mapping[int, float],
        ingress: Mapping[int, float],
        *,
        routing: Routing,
    ) -> Network:
        """Return the network with these access caps, by rank, but without some links."""
        if (
            self._network is None
            or (egress, ingress) != self._lines
            or avoided != self._avoided
            or routing is not self._network.routing
        ):
            self._lines, self._avoided = (dict(egress), dict(ingress)), avoided
            nodes = tuple(
                replace(
                    node,
                    egress=egress.get(node.rank, node.egress),
                    ingress=ingress.get(node.rank, node.ingress),
                )
                for node in prior.nodes
            )
            links = tuple(one for one in self._links if (one.source, one.target) not in avoided)
            self._network = replace(prior, nodes=nodes, links=links, changes=(), routing=routing)
        return self._network

    def errors(self, now: float) -> tuple[float, ...]:
        """Return the standard errors of the rates, by link of the last `network`; they grow with age."""
        errors = (max(least, aged(own, now - at)) for least, own, at in self._errors)
        if not self._avoided:
            return tuple(errors)
        return tuple(
            error for pair, error in zip(self._places, errors, strict=True) if pair not in self._avoided
        )
