"""Each rank is a parameter server for its share of the bytes: one star for each rank."""

from __future__ import annotations

from netstorm.topology.networks.network import Network
from netstorm.topology.schemes.star import star_tree
from netstorm.topology.trees.forest import Forest
from netstorm.topology.trees.shortest_paths import adjacency

__all__ = ["sharded"]


def sharded(network: Network) -> Forest:
    """Return a star around each rank, with equal shares: what MXNet's distributed store does with N servers.

    Each pair of ranks carries 2/N of the tensor in each direction. In an overlay the stars are those of
    `star`: shallowest trees. O(N²) in a mesh, else O(N · E log N).

    Raises:
        Unreachable: names the ranks that have no path to some rank, or from it.
    """
    links = adjacency(network.ranks, {pair: 1 / network.throughput(*pair) for pair in network.pairs()})
    trees = tuple(star_tree(links, root) for root in network.ranks)
    relayed = sum(
        any(parent not in (-1, tree.root) for parent in (*tree.reduce_parent, *tree.broadcast_parent))
        for tree in trees
    )
    return Forest(
        trees=trees,
        shares=(1.0,) * network.size,
        reason="sharded: each rank is the hub of an equal share"
        + (f"; {relayed} of {network.size} hubs have no link to some rank" if relayed else ""),
    )
