"""Shortest-path trees: Dijkstra, with a cost of two parts that breaks ties between equal paths."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from netstorm.errors import Unreachable
from netstorm.topology.networks.elements import Rank, shown_ranks
from netstorm.topology.tree import Tree
from netstorm.topology.trees.metric import Delays

__all__ = ["Adjacency", "adjacency", "fastest_tree", "shallowest_tree"]


class Adjacency(NamedTuple):
    """For each rank its links in (`sources`) and out (`targets`): the rank at the other end and the delay."""

    sources: Sequence[Sequence[tuple[int, float]]]
    targets: Sequence[Sequence[tuple[int, float]]]


Cost: TypeAlias = tuple[float, float]


def adjacency(ranks: Sequence[Rank], delays: Delays) -> Adjacency:
    """Arrange delays by node, neighbours by rank: what comes out must not depend on a mapping's order."""
    sources: list[list[tuple[int, float]]] = [[] for _ in ranks]
    targets: list[list[tuple[int, float]]] = [[] for _ in ranks]
    for (source, target), delay in sorted(delays.items()):
        sources[target].append((source, delay))
        targets[source].append((target, delay))
    return Adjacency(sources, targets)


def fastest_tree(links: Adjacency, root: Rank) -> Tree:
    """Return the tree of least total delay from each rank to `root` and back; of equals, the fewest hops.

    Raises:
        Unreachable: names the ranks that have no path to `root`, or from it.
    """
    return _tree(links, root, by_hops=False)


def shallowest_tree(links: Adjacency, root: Rank) -> Tree:
    """Return the tree of fewest hops from each rank to `root` and back; of equals, the least total delay.

    Raises:
        Unreachable: names the ranks that have no path to `root`, or from it.
    """
    return _tree(links, root, by_hops=True)


def _tree(links: Adjacency, root: Rank, *, by_hops: bool) -> Tree:
    up = _parents(links.sources, root, by_hops=by_hops)
    lost = _without(up, root)
    if lost:
        raise Unreachable(f"there is no path from {shown_ranks(lost)} to rank {root}")
    down = up if links.sources == links.targets else _parents(links.targets, root, by_hops=by_hops)
    lost = _without(down, root)
    if lost:
        raise Unreachable(f"there is no path from rank {root} to {shown_ranks(lost)}")
    return Tree(root=root, reduce_parent=tuple(up), broadcast_parent=tuple(down))


def _without(parents: Iterable[int], root: int) -> list[int]:
    return [rank for rank, parent in enumerate(parents) if parent < 0 and rank != root]


def _parents(steps: Sequence[Sequence[tuple[int, float]]], root: int, *, by_hops: bool) -> list[int]:
    """Return the shortest-path parents towards `root` (-1: none); `steps` are the links at each rank that
    lead away from it.
    """
    unknown: Cost = (float("inf"), float("inf"))
    costs = [unknown] * len(steps)
    parents = [-1] * len(steps)
    costs[root] = (0.0, 0.0)
    heap: list[tuple[Cost, int]] = [(costs[root], root)]
    while heap:
        cost, node = heapq.heappop(heap)
        if cost > costs[node]:
            continue
        first, second = cost
        for other, delay in steps[node]:
            further = (first + 1, second + delay) if by_hops else (first + delay, second + 1)
            if further < costs[other]:
                costs[other] = further
                parents[other] = node
                heapq.heappush(heap, (further, other))
    return parents
