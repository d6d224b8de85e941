"""The paper's scheme: fastest aggregation path trees from several roots, arXiv 2404.11352 §III and §IV."""

from __future__ import annotations

from collections.abc import Sequence

from netstorm.errors import UsageError
from netstorm.topology.networks.network import Network, Rank
from netstorm.topology.tree import Tree
from netstorm.topology.trees.forest import Forest
from netstorm.topology.trees.metric import CHUNK_BYTES, transfer_delays, tree_delay
from netstorm.topology.trees.shortest_paths import adjacency, fastest_tree
from netstorm.units import format_duration

__all__ = ["fapt", "fapt_at", "fastest_paths"]


def fastest_paths(network: Network, root: Rank, *, chunk_bytes: int = CHUNK_BYTES) -> Tree:
    """Return the fastest aggregation path tree (FAPT) of `root`.

    Dijkstra on transfer delay: the tree whose slowest leaf-to-root path is fastest [1]_. The delay is that
    of a chunk, latency included (the paper's is 1/rate). Reduce parents minimise the delay towards the root,
    broadcast parents that away from it; where links are symmetric the two coincide. O(E log N).

    Args:
        network: directed capacities in bit/s, latencies in s.
        chunk_bytes: what is sent at once; the larger, the less latency counts.

    Raises:
        Unreachable: names the ranks that have no path to `root`, or from it.
        UsageError: there is no rank `root`.

    References:
        .. [1] Li et al., arXiv 2404.11352, Definition 2 and Algorithm 1.
    """
    if not 0 <= root < network.size:
        raise UsageError(f"root {root}: expected a rank from 0 to {network.size - 1}")
    return fastest_tree(adjacency(network.ranks, transfer_delays(network, chunk_bytes, linked=True)), root)


def fapt(network: Network, roots: int = 0, *, chunk_bytes: int = CHUNK_BYTES) -> Forest:
    """Return the FAPTs of the best `roots` roots (0: of all ranks), in order of rank, with their shares.

    A root's quality is 1/w(T), where w is its tree's delay up and down; the best are taken, of equals the
    lower ranks, and the shares are in proportion to quality [1]_. Unlike the paper we choose the roots anew
    each time: the store is replicated, so no state lives at a root. O(N · E log N).

    Raises:
        Unreachable: names the ranks that have no path to some rank, or from it.
        UsageError: more roots than ranks, or fewer than none.

    References:
        .. [1] Li et al., arXiv 2404.11352, Algorithms 1 and 2; §IV-C (a), multi-root load balancing.
    """
    if not 0 <= roots <= network.size:
        raise UsageError(
            f"{roots} roots: expected 1 to {network.size}, as many as there are ranks, or 0 for all of them"
        )
    delays = transfer_delays(network, chunk_bytes, linked=True)
    links = adjacency(network.ranks, delays)
    trees = [fastest_tree(links, root) for root in network.ranks]
    # To 12 digits, or the order in which floats were added would choose between equal roots.
    took = [float(f"{tree_delay(tree, delays):.12g}") for tree in trees]
    best = sorted(network.ranks, key=lambda rank: (took[rank], rank))[: roots or network.size]
    chosen = sorted(best)
    return Forest(
        trees=tuple(trees[root] for root in chosen),
        shares=tuple(1 / took[root] if took[root] else 1.0 for root in chosen),
        reason=f"fapt: {len(chosen)} of {network.size} ranks are roots; the best is rank {best[0]}, "
        f"with {format_duration(took[best[0]])} a chunk up and down",
    )


def fapt_at(network: Network, roots: Sequence[Rank], *, chunk_bytes: int = CHUNK_BYTES) -> Forest:
    """Return the FAPTs of given roots, in equal shares: what the paper re-forms while the network changes,
    since there a root's state cannot move (arXiv 2404.11352 §IV-C).

    Raises:
        Unreachable: names the ranks that have no path to some root, or from it.
    """
    links = adjacency(network.ranks, transfer_delays(network, chunk_bytes, linked=True))
    return Forest(
        trees=tuple(fastest_tree(links, root) for root in roots),
        shares=(1.0,) * len(roots),
        reason=f"fapt: the {len(roots)} roots of the first policy",
    )
