"""How long a tree takes: the paper's topology metric, arXiv 2404.11352 §III-A (Definition 1, Theorem 1).

A node must wait for its slowest child before it can forward, so what counts is the slowest path from a leaf.
Aggregation overlaps with transmission and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from netstorm.errors import UsageError
from netstorm.topology.networks.network import Network, Rank
from netstorm.topology.tree import Tree

__all__ = [
    "CHUNK_BYTES",
    "Delays",
    "broadcast_delay",
    "reduce_delay",
    "subtree_delay",
    "transfer_delays",
    "tree_delay",
]

Delays: TypeAlias = Mapping[tuple[int, int], float]
"""Transfer delay of one unit from a rank to another, for each pair that may talk."""

CHUNK_BYTES: Final = 128 * 1024
"""32 768 elements of float32: the default chunk."""


def transfer_delays(
    network: Network, chunk_bytes: int = CHUNK_BYTES, *, linked: bool = False
) -> dict[tuple[int, int], float]:
    """Return the seconds that one chunk takes from each rank to each that it may send to, on idle links.

    The paper's Algorithm 2 takes 1/rate; with the size of a chunk and the latency, the same sum over a path
    says when a chunk arrives that is stored and forwarded at each hop.

    Args:
        network: as it is at its start.
        chunk_bytes: bytes that are stored and forwarded at once.
        linked: only between ranks with a link. Over a route a chunk seems to arrive sooner than over the
            ranks on it; but there it would be added to theirs, and the route's links carry both.
    """
    if chunk_bytes < 1:
        raise UsageError(f"chunk_bytes is {chunk_bytes}: expected at least 1")
    return {
        (source, target): 8 * chunk_bytes / network.throughput(source, target)
        + network.link(source, target).latency
        for source, target in (network.linked_pairs() if linked else network.pairs())
    }


def subtree_delay(tree: Tree, delays: Delays, node: Rank) -> float:
    """Return when `node` has the contributions of its whole reduce subtree: its slowest path from a leaf.

    Raises:
        UsageError: a tree edge has no delay.
    """
    return _slowest(node, tree.reduce_children, lambda parent, child: delays.get((child, parent)))


def reduce_delay(tree: Tree, delays: Delays) -> float:
    """Return the delay of the slowest path from a leaf to the root: the paper's w(T)."""
    return subtree_delay(tree, delays, tree.root)


def broadcast_delay(tree: Tree, delays: Delays) -> float:
    """Return the delay of the slowest path from the root to a leaf."""
    return _slowest(tree.root, tree.broadcast_children, lambda parent, child: delays.get((parent, child)))


def tree_delay(tree: Tree, delays: Delays) -> float:
    """Return how long one chunk takes up to the root and down to the last node."""
    return reduce_delay(tree, delays) + broadcast_delay(tree, delays)


def _slowest(
    top: int, children: Sequence[Sequence[int]], delay_of: Callable[[int, int], float | None]
) -> float:
    away = {top: 0.0}
    order = [top]
    for node in order:
        for child in children[node]:
            delay = delay_of(node, child)
            if delay is None:
                raise UsageError(f"the tree has an edge between ranks {child} and {node}, which has no delay")
            away[child] = away[node] + delay
            order.append(child)
    return max(away.values())
