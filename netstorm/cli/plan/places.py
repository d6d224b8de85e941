"""Where to draw nodes: on the map if their sites are cities that we know, else by their links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import networkx as nx
import numpy as np

from netstorm.topology.network import Network, Rank
from netstorm.topology.resources import Floats

__all__ = ["places"]

_CITIES: Final[Mapping[str, tuple[float, float]]] = {
    "amsterdam": (52.4, 4.9), "atlanta": (33.7, -84.4), "berlin": (52.5, 13.4), "boston": (42.4, -71.1),
    "california": (37.4, -121.9), "cape-town": (-33.9, 18.4), "chicago": (41.9, -87.6),
    "dallas": (32.8, -96.8), "denver": (39.7, -105.0), "dublin": (53.3, -6.3), "frankfurt": (50.1, 8.7),
    "hong-kong": (22.3, 114.2), "houston": (29.8, -95.4), "ireland": (53.3, -6.3),
    "kansas-city": (39.1, -94.6), "london": (51.5, -0.1), "los-angeles": (34.1, -118.2),
    "madrid": (40.4, -3.7), "milan": (45.5, 9.2), "montreal": (45.5, -73.6), "mumbai": (19.1, 72.9),
    "new-york": (40.7, -74.0), "ohio": (40.0, -83.0), "oregon": (45.8, -119.7), "osaka": (34.7, 135.5),
    "paris": (48.9, 2.4), "prague": (50.1, 14.4), "sao-paulo": (-23.6, -46.6), "seattle": (47.6, -122.3),
    "seoul": (37.6, 127.0), "singapore": (1.4, 103.8), "stockholm": (59.3, 18.1),
    "sunnyvale": (37.4, -122.0), "sydney": (-33.9, 151.2), "tokyo": (35.7, 139.7), "toronto": (43.7, -79.4),
    "vienna": (48.2, 16.4), "virginia": (38.9, -77.4), "washington": (38.9, -77.0), "zurich": (47.4, 8.5),
}  # fmt: skip
"""Latitude and longitude in degrees."""

_DENSE: Final = 0.6
"""Part of all possible links from which on their lengths say nothing: a circle shows them best."""
_APART: Final = 0.5
"""Least distance between two nodes, as a part of the side of the square that each would have to itself."""


def places(network: Network) -> Mapping[Rank, tuple[float, float]]:
    """Return x and y of each node, each from 0 to 1, none on top of another."""
    if network.size == 1:
        return {Rank(0): (0.5, 0.5)}
    if all(node.site in _CITIES for node in network.nodes):
        spread = _on_the_map(network)
    else:
        spread = _by_links(network)
    spread = _moved_apart(_fitted(spread))
    return {rank: (float(spread[rank, 0]), float(spread[rank, 1])) for rank in network.ranks}


def _on_the_map(network: Network) -> Floats:
    return np.array(
        [
            # Nodes of one site are on a spot; a tiny circle gives each a direction to move away in.
            (longitude + 0.01 * math.cos(node.rank), latitude + 0.01 * math.sin(node.rank))
            for node in network.nodes
            for latitude, longitude in [_CITIES[node.site]]
        ]
    )


def _by_links(network: Network) -> Floats:
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(network.ranks)
    graph.add_edges_from((link.source, link.target) for link in network.links)
    dense = graph.number_of_edges() >= _DENSE * network.size * (network.size - 1) / 2
    found = nx.circular_layout(graph) if dense else nx.kamada_kawai_layout(graph)
    return np.array([found[rank] for rank in network.ranks])


def _fitted(spread: Floats) -> Floats:
    low = spread.min(axis=0)
    extent = spread.max(axis=0) - low
    result: Floats = (spread - low) / np.where(extent > 1e-9, extent, 1.0)
    return result


def _moved_apart(spread: Floats) -> Floats:
    """Push nodes that are too near to each other apart, a little in each step."""
    least = _APART / math.sqrt(len(spread))
    for _ in range(200):
        away = spread[:, None] - spread[None, :]
        distance = np.maximum(np.hypot(away[..., 0], away[..., 1]), 1e-9)
        np.fill_diagonal(distance, np.inf)
        if distance.min() >= least:
            break
        push = np.maximum(0.0, least - distance) / distance
        spread = spread + 0.3 * (push[..., None] * away).sum(axis=1)
    return _fitted(spread)
