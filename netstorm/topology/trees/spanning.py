"""Algorithms for spanning trees that are both cheap and shallow: the candidates of `packing`."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.topology.trees.resources import Floats

__all__ = ["Parents", "arborescence", "centred", "grow", "path_delays"]

Parents = npt.NDArray[np.intp]

_FEW: Final = 48


def grow(prices: Floats, delays: Floats, root: int, weight: float) -> Parents:
    """Return the parents (-1: the root) of a tree that trades the price of its edges for short paths.

    Prim-Dijkstra [1]_: as Prim's algorithm, but joining v below u costs price(u, v) + weight · (delay of u +
    delay(u, v)). With weight 0 it is a minimum spanning tree if prices are symmetric; where they are not it
    is no more than a good guess (`arborescence` is exact, and blind to delays). O(N²).

    Args:
        prices: (N, N) of an edge from u to v, away from the root; inf where there is none.
        delays: (N, N) of an edge.
        root: where it begins.
        weight: price of a unit of delay of a path.

    References:
        .. [1] Alpert, Hu, Huang, Kahng and Karger, Prim-Dijkstra tradeoffs for improved performance-driven
           routing tree design, IEEE Trans. CAD 14 (1995).
    """
    size = len(prices)
    weighted = prices + weight * delays
    if size <= _FEW:
        return _grow_few(weighted.tolist(), delays.tolist(), root, weight)
    weighted[:, root] = np.inf
    parent = np.full(size, root)
    away = [0.0] * size
    key = weighted[root].copy()  # inf once a node is in the tree, as is what joins it to others
    for _ in range(size - 1):
        node = int(key.argmin())
        above = parent[node]
        away[node] = away[above] + delays.item(above, node)
        key[node] = np.inf
        weighted[:, node] = np.inf
        costs = weighted[node] + weight * away[node]
        parent[costs < key] = node
        np.minimum(key, costs, out=key)
    parent[root] = -1
    return parent


def _grow_few(weighted: list[list[float]], delays: list[list[float]], root: int, weight: float) -> Parents:
    """Do the same for few nodes, where NumPy's calls take longer than the arithmetic."""
    size = len(delays)
    parent = [root] * size
    away = [0.0] * size
    key = weighted[root]
    open_ = [node for node in range(size) if node != root]
    while open_:
        node = min(open_, key=key.__getitem__)
        open_.remove(node)
        above = parent[node]
        away[node] = away[above] + delays[above][node]
        row, behind = weighted[node], weight * away[node]
        for other in open_:
            cost = row[other] + behind
            if cost < key[other]:
                key[other] = cost
                parent[other] = node
    parent[root] = -1
    return np.array(parent)


def path_delays(parents: Parents, delays: Floats) -> list[float]:
    """Return the delay of each node's path from the root; `delays` (N, N) are of edges away from the root."""
    above = parents.tolist()
    edge = _edges(parents, delays)
    away = [0.0] * len(above)
    for node in _from_root(above)[1:]:
        away[node] = away[above[node]] + edge[node]
    return away


def centred(parents: Parents, delays: Floats) -> tuple[int, Parents]:
    """Return the root from which the farthest node of an undirected tree is nearest, and the parents then.

    The farthest node from anywhere is one of the two ends of a longest path. O(N).

    Args:
        parents: of the tree, as it happens to be rooted.
        delays: (N, N) of edges, symmetric.
    """
    above = parents.tolist()
    joined: list[list[tuple[int, float]]] = [[] for _ in above]
    for node, delay in enumerate(_edges(parents, delays)):
        if above[node] >= 0:
            joined[node].append((above[node], delay))
            joined[above[node]].append((node, delay))
    one = _farthest(_away(0, joined))
    from_one = _away(one, joined)
    from_other = _away(_farthest(from_one), joined)
    farthest = [max(both) for both in zip(from_one, from_other, strict=True)]
    root = farthest.index(min(farthest))
    turned = parents.copy()
    node, below = root, -1
    while node >= 0:
        turned[node] = below
        node, below = above[node], node
    return root, turned


def _edges(parents: Parents, delays: Floats) -> list[float]:
    """Return the delay of each node's edge from its parent; the root's means nothing."""
    found: list[float] = delays[parents, np.arange(len(parents))].tolist()
    return found


def _away(start: int, joined: list[list[tuple[int, float]]]) -> list[float]:
    away = [-1.0] * len(joined)
    away[start] = 0.0
    order = [start]
    for node in order:
        for other, delay in joined[node]:
            if away[other] < 0:
                away[other] = away[node] + delay
                order.append(other)
    return away


def _farthest(away: list[float]) -> int:
    return away.index(max(away))


def _from_root(above: list[int]) -> list[int]:
    children: list[list[int]] = [[] for _ in above]
    root = 0
    for node, parent in enumerate(above):
        if parent >= 0:
            children[parent].append(node)
        else:
            root = node
    order = [root]
    for node in order:
        order.extend(children[node])
    return order


def arborescence(prices: Floats, root: int) -> Parents:
    """Return the parents of the cheapest tree away from `root`: Edmonds' algorithm, all cycles of a round at
    once. O(N² log N).

    Args:
        prices: (N, N) of an edge from u to v; inf where there is none.
        root: where it begins.
    """
    size = len(prices)
    nodes = np.arange(size)
    prices = prices.copy()
    prices[:, root] = np.inf
    prices[nodes, nodes] = np.inf
    parent: Parents = prices.argmin(axis=0)
    cheapest = prices[parent, nodes]
    parent[root] = -1
    cheapest[root] = 0.0
    numbers, groups = _cycles(parent.tolist(), root)
    if groups == size:
        return parent
    # Contract each cycle: to enter it at v costs what that adds over v's edge within it.
    order = np.argsort(numbers, kind="stable")
    ends = np.bincount(numbers).cumsum()
    starts = np.append(0, ends[:-1])
    extra = (prices - cheapest)[order[:, None], order]
    between = np.minimum.reduceat(np.minimum.reduceat(extra, starts, axis=0), starts, axis=1)
    place, begin, end = order.tolist(), starts.tolist(), ends.tolist()
    for inner, outer in enumerate(arborescence(between, numbers[root]).tolist()):
        if outer >= 0:
            block = extra[begin[outer] : end[outer], begin[inner] : end[inner]]
            row, column = divmod(int(block.argmin()), end[inner] - begin[inner])
            parent[place[begin[inner] + column]] = place[begin[outer] + row]
    return parent


def _cycles(parent: list[int], root: int) -> tuple[list[int], int]:
    """Return a number for each node, equal within a cycle of parents, and how many numbers there are."""
    size = len(parent)
    group = [-1] * size
    seen_from = [-1] * size
    seen_from[root] = root
    groups = 0
    for start in range(size):
        node = start
        while seen_from[node] < 0:
            seen_from[node] = start
            node = parent[node]
        if seen_from[node] == start and node != root:  # this walk has come back to itself
            while group[node] < 0:
                group[node] = groups
                node = parent[node]
            groups += 1
    for node in range(size):
        if group[node] < 0:
            group[node] = groups
            groups += 1
    return group, groups
