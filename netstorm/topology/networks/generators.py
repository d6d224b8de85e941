"""Random networks of several families, for studies: the same seed gives the same network everywhere.

Rates are uniform in 20 to 155 Mbit/s, as in the NetStorm paper's test-bed [1]_; latencies in 15 to 75 ms one
way, the round trips of 30 to 150 ms between regions.

References:
    .. [1] Li et al., arXiv 2404.11352, §IX-A.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from typing import Final

from netstorm.errors import UsageError
from netstorm.topology.networks.network import Link, Network, Node, Rank, Routing

__all__ = ["FAMILIES", "generate"]

_RATES: Final = (20e6, 155e6)
_LATENCIES: Final = (0.015, 0.075)
_ACCESS: Final = (60e6, 250e6)
"""Below what a node's links add up to from three nodes on, as access lines are."""

_INTERNET2: Final = (
    *((0, 1), (1, 2), (0, 3), (1, 3), (2, 5), (3, 4), (4, 5), (4, 6), (5, 7), (6, 7), (6, 8), (7, 8)),
    *((0, 6), (2, 3)),
)
"""The paper's nine nodes and 14 links, as `examples/networks/internet2.yaml` has them."""

_LINKS_A_NODE: Final = len(_INTERNET2) / 9


def generate(family: str, nodes: int, seed: int) -> Network:
    """Return a random network.

    Args:
        family: a name in `FAMILIES`.
        nodes: how many.
        seed: equal seeds give equal networks.

    Raises:
        UsageError: an unknown family, or fewer than two nodes.
    """
    make = FAMILIES.get(family)
    if make is None:
        raise UsageError(f"family {family!r}: expected one of {', '.join(FAMILIES)}")
    if nodes < 2:
        raise UsageError(f"{nodes} nodes: expected at least 2")
    return make(nodes, seed)


def mesh(nodes: int, seed: int) -> Network:
    """Return a full mesh of links of their own, equal in both directions."""
    return _network(nodes, itertools.combinations(range(nodes), 2), random.Random(seed))


def asymmetric(nodes: int, seed: int) -> Network:
    """Return a full mesh whose links have rates of their own in each direction."""
    return _network(nodes, itertools.combinations(range(nodes), 2), random.Random(seed), symmetric=False)


def internet2(nodes: int, seed: int) -> Network:
    """Return a sparse network of routers that are also nodes; all pairs may talk, over the fewest hops.

    With nine nodes the paper's; else nodes in a square, joined to their nearest ones, as many links a node.
    """
    draw = random.Random(seed)
    edges = _INTERNET2 if nodes == 9 else _near(nodes, draw)
    return _network(nodes, edges, draw, routing=Routing.UNDERLAY)


def cloud(nodes: int, seed: int) -> Network:
    """Return a full mesh between nodes whose access lines are slower than their links together."""
    draw = random.Random(seed)
    caps = [draw.uniform(*_ACCESS) for _ in range(nodes)]
    return _network(nodes, itertools.combinations(range(nodes), 2), draw, caps=caps)


FAMILIES: Final[Mapping[str, Callable[[int, int], Network]]] = {
    "mesh": mesh,
    "internet2": internet2,
    "cloud": cloud,
    "asymmetric": asymmetric,
}


def _network(
    nodes: int,
    edges: itertools.combinations[tuple[int, int]] | tuple[tuple[int, int], ...],
    draw: random.Random,
    *,
    symmetric: bool = True,
    routing: Routing = Routing.OVERLAY,
    caps: list[float] | None = None,
) -> Network:
    links = []
    for one, other in edges:
        rate, latency = draw.uniform(*_RATES), draw.uniform(*_LATENCIES)
        back = rate if symmetric else draw.uniform(*_RATES)
        links.append(Link(source=Rank(one), target=Rank(other), rate=rate, latency=latency))
        links.append(Link(source=Rank(other), target=Rank(one), rate=back, latency=latency))
    return Network(
        nodes=tuple(
            Node(rank=Rank(rank), egress=cap, ingress=cap) for rank, cap in enumerate(caps or [None] * nodes)
        ),
        links=tuple(links),
        routing=routing,
    )


def _near(nodes: int, draw: random.Random) -> tuple[tuple[int, int], ...]:
    """Return a connected graph of short edges: a minimum spanning tree, and the shortest others."""
    places = [(draw.random(), draw.random()) for _ in range(nodes)]
    lengths = sorted(
        (math.dist(places[one], places[other]), one, other)
        for one, other in itertools.combinations(range(nodes), 2)
    )
    part = list(range(nodes))
    edges: set[tuple[int, int]] = set()
    for _, one, other in lengths:
        if part[one] != part[other]:
            edges.add((one, other))
            part = [part[one] if at == part[other] else at for at in part]
    for _, one, other in lengths:
        if len(edges) >= round(_LINKS_A_NODE * nodes):
            break
        edges.add((one, other))
    return tuple(sorted(edges))
