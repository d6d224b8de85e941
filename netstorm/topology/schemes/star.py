"""The parameter server's shape: all ranks send to one hub, and receive the result from it."""

from __future__ import annotations

from netstorm.errors import UsageError
from netstorm.topology.networks.network import Network, Rank
from netstorm.topology.tree import Tree
from netstorm.topology.trees.forest import Forest
from netstorm.topology.trees.metric import Delays, tree_delay
from netstorm.topology.trees.shortest_paths import Adjacency, adjacency, shallowest_tree

__all__ = ["star", "star_tree"]


def star(network: Network, hub: Rank | None = None) -> Forest:
    """Return one tree with all ranks below `hub`, or below the best hub if none is given.

    The best hub has the fastest slowest spoke, by 1/rate up and down; of equals the one with the least
    latency on its longest spoke, then the lowest rank.

    In an overlay a rank may have no link to the hub. It is then below the rank next to it on the way there
    with the fewest hops (of equals the fastest), whose sum its gradient joins: a tree as near to a star as
    the links allow. A hub with links to and from all ranks is preferred, if there is one. O(N²) in a mesh,
    else O(N · E log N).

    Raises:
        UsageError: there is no rank `hub`.
        Unreachable: names the ranks that have no path to the hub, or from it.
    """
    if hub is not None and not 0 <= hub < network.size:
        raise UsageError(f"hub {hub}: expected a rank from 0 to {network.size - 1}")
    times: Delays = {pair: 1 / network.throughput(*pair) for pair in network.pairs()}
    latencies: Delays = {pair: network.link(*pair).latency for pair in network.pairs()}
    links = adjacency(network.ranks, times)
    direct = {rank for rank in network.ranks if _spokes(links, rank) == network.size - 1}
    candidates = [hub] if hub is not None else sorted(direct) or list(network.ranks)
    trees = {rank: star_tree(links, rank) for rank in candidates}
    best = min(
        candidates,
        key=lambda rank: (*(_rounded(tree_delay(trees[rank], costs)) for costs in (times, latencies)), rank),
    )
    relayed = sum(parent not in (-1, best) for parent in trees[best].reduce_parent)
    return Forest(
        trees=(trees[best],),
        shares=(1.0,),
        reason=f"star: rank {best} is the hub" + (f"; {relayed} ranks have no link to it" if relayed else ""),
    )


def star_tree(links: Adjacency, hub: Rank) -> Tree:
    """Return the tree with all ranks below `hub`, or as near to it as the links allow: see `star`.

    Raises:
        Unreachable: names the ranks that have no path to the hub, or from it.
    """
    size = len(links.sources)
    if _spokes(links, hub) < size - 1:
        return shallowest_tree(links, hub)
    return Tree.undirected(hub, tuple(-1 if rank == hub else hub for rank in range(size)))


def _spokes(links: Adjacency, rank: Rank) -> int:
    return min(len(links.sources[rank]), len(links.targets[rank]))


def _rounded(delay: float) -> float:
    """Return 12 digits of a delay, or the order of floating-point sums would choose between equal hubs."""
    return float(f"{delay:.12g}")
