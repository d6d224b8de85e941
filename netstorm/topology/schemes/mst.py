"""The tree of the fastest links: TSEngine's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from netstorm.errors import Unreachable
from netstorm.topology.networks.elements import Rank, shown_ranks
from netstorm.topology.networks.network import Network
from netstorm.topology.tree import Tree
from netstorm.topology.trees.forest import Forest
from netstorm.topology.trees.metric import CHUNK_BYTES, transfer_delays, tree_delay
from netstorm.units import format_rate

__all__ = ["mst"]


def mst(network: Network, *, chunk_bytes: int = CHUNK_BYTES) -> Forest:
    """Return the maximum spanning tree by throughput, rooted at its delay centre [1]_.

    The throughput of an edge is that of its slower direction. Of all trees this has the fastest slowest edge;
    of equal edges those of lower ranks are taken. Its delay centre is the rank from which `chunk_bytes`
    need least time up and down.

    Where not all ranks are joined by links that lead both ways, the reduce and the broadcast tree are each
    grown from rank 0 by the fastest link that leads on, so that no other tree has a faster slowest edge.
    O(N²) in a mesh, N³ where links lead one way.

    Raises:
        Unreachable: names the ranks that have no path to a root, or from it.

    References:
        .. [1] Zhou et al., TSEngine, IEEE TNSM 18(4), 2021; as in arXiv 2404.11352 §IX-B.
    """
    rates: dict[tuple[int, int], float] = {pair: network.throughput(*pair) for pair in network.linked_pairs()}
    slower = {
        (source, target): min(rate, rates[target, source])
        for (source, target), rate in rates.items()
        if (target, source) in rates
    }
    parents = _widest(network.size, slower, 0)
    if -1 not in parents[1:]:
        trees = [Tree.undirected(root, _rooted(parents, root)) for root in network.ranks]
    else:
        backwards = {(target, source): rate for (source, target), rate in rates.items()}
        trees = [_one_way(network.size, rates, backwards, root) for root in network.ranks]
    delays = transfer_delays(network, chunk_bytes, linked=True)
    # To 12 digits, or the order in which floats were added would choose between equal roots.
    best = min(trees, key=lambda tree: (float(f"{tree_delay(tree, delays):.12g}"), tree.root))
    used = [rates[rank, parent] for rank, parent in enumerate(best.reduce_parent) if parent >= 0]
    used += [rates[parent, rank] for rank, parent in enumerate(best.broadcast_parent) if parent >= 0]
    slowest = f"; the slowest edge has {format_rate(min(used))}" if used else ""
    return Forest(
        trees=(best,), shares=(1.0,), reason=f"mst: the fastest links, rooted at rank {best.root}{slowest}"
    )


def _widest(size: int, rates: Mapping[tuple[int, int], float], root: int) -> list[int]:
    """Return parents towards `root`, Prim's way: always the fastest pair from a placed rank (-1: none)."""
    out: list[list[tuple[int, float]]] = [[] for _ in range(size)]
    for (source, target), rate in sorted(rates.items()):
        out[source].append((target, rate))
    parents = [-1] * size
    best = [0.0] * size
    waiting = set(range(size)) - {root}
    node = root
    while waiting:
        for target, rate in out[node]:
            if target in waiting and rate > best[target]:
                best[target], parents[target] = rate, node
        node = max(waiting, key=lambda rank: (best[rank], -rank))
        if not best[node]:
            break
        waiting.remove(node)
    return parents


def _rooted(parents: Sequence[int], root: int) -> tuple[int, ...]:
    """Return the parents of the same tree, hung up at another rank."""
    turned = list(parents)
    above, here = -1, root
    while here >= 0:
        turned[here], above, here = above, here, turned[here]
    return tuple(turned)


def _one_way(
    size: int,
    rates: Mapping[tuple[int, int], float],
    backwards: Mapping[tuple[int, int], float],
    root: Rank,
) -> Tree:
    up, down = _widest(size, backwards, root), _widest(size, rates, root)
    for parents, direction in ((up, "to"), (down, "from")):
        lost = [rank for rank, parent in enumerate(parents) if parent < 0 and rank != root]
        if lost:
            raise Unreachable(f"there is no path {direction} rank {root} for {shown_ranks(lost)}")
    return Tree(root=root, reduce_parent=tuple(up), broadcast_parent=tuple(down))
