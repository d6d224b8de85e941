"""All trees, by brute force: the oracle of what claims to be the best one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import networkx as nx

from netstorm.topology import Rank, Tree

__all__ = ["all_trees", "slowest"]


def all_trees(size: int, root: Rank) -> Iterator[Tree]:
    """Yield every spanning tree on `size` ranks, by its Prüfer sequence: size ** (size - 2) of them."""
    if size == 1:
        yield Tree.undirected(root, (-1,))
    elif size == 2:
        yield Tree.undirected(root, (-1, 0) if root == 0 else (1, -1))
    else:
        for sequence in itertools.product(range(size), repeat=size - 2):
            directed = nx.bfs_tree(nx.from_prufer_sequence(list(sequence)), root)
            parents = {child: parent for parent, child in directed.edges}
            yield Tree.undirected(root, tuple(parents.get(rank, -1) for rank in range(size)))


def slowest(parents: Sequence[int], delays: Mapping[tuple[int, int], float]) -> float:
    """Return the longest way to the root, each from its rank up, hop by hop; inf if a hop has no link."""
    longest = 0.0
    for start in range(len(parents)):
        here, way = start, 0.0
        while parents[here] >= 0:
            way += delays.get((here, parents[here]), float("inf"))
            here = parents[here]
        longest = max(longest, way)
    return longest
