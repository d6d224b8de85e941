"""Schemes whose trees follow from the network alone, without SciPy. A new one belongs here, and in `form`."""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from netstorm.errors import Unreachable, UsageError
from netstorm.topology.network import Network, Rank, shown_ranks
from netstorm.topology.policy import Forest
from netstorm.topology.tree import (
    CHUNK_BYTES,
    Adjacency,
    Delays,
    Tree,
    adjacency,
    fastest_tree,
    shallowest_tree,
    transfer_delays,
    tree_delay,
)
from netstorm.units import format_duration, format_rate

__all__ = [
    "balanced",
    "cheapest",
    "fapt",
    "fapt_at",
    "fastest_paths",
    "groups_of",
    "hierarchical",
    "k_ary",
    "missing_hops",
    "mst",
    "ring",
    "ring_trees",
    "sharded",
    "star",
]


# The paper's scheme: fastest aggregation path trees from several roots, arXiv 2404.11352 §III and §IV.


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
    _check_roots(network, roots)
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


def _check_roots(network: Network, roots: int) -> None:
    if not 0 <= roots <= network.size:
        raise UsageError(
            f"{roots} roots: expected 1 to {network.size}, as many as there are ranks, or 0 for all of them"
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


# The parameter server's shape: all ranks send to one hub, and receive the result from it.


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


# Each rank is a parameter server for its share of the bytes: one star for each rank.


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


# The tree of the fastest links: TSEngine's shape.


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
    import networkx as nx  # noqa: PLC0415 - 0.2 s of a processor, which few processes need

    rates: dict[tuple[int, int], float] = {pair: network.throughput(*pair) for pair in network.linked_pairs()}
    slower = {
        (source, target): min(rate, rates[target, source])
        for (source, target), rate in rates.items()
        if (target, source) in rates
    }
    edges: nx.Graph[int] = nx.Graph()
    edges.add_nodes_from(network.ranks)
    edges.add_weighted_edges_from((*pair, rate) for pair, rate in slower.items())  # in order: it breaks ties
    widest = nx.maximum_spanning_tree(edges)
    if widest.number_of_edges() == network.size - 1:
        above = [dict(nx.bfs_predecessors(widest, root)) for root in network.ranks]
        trees = [
            Tree.undirected(root, tuple(above[root].get(rank, -1) for rank in network.ranks))
            for root in network.ranks
        ]
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


# The tree over which a sum costs least.


def cheapest(network: Network, *, chunk_bytes: int = CHUNK_BYTES) -> Forest:
    """Return the spanning tree whose links cost least for a byte up and a byte down, rooted at its delay
    centre; of equally cheap links the fastest.

    Every byte of a sum crosses each edge of its tree once in each direction. So no policy is cheaper than
    the cheapest tree, unless some links lead one way only.

    Raises:
        Unreachable: links that lead both ways do not join all ranks.
    """
    import networkx as nx  # noqa: PLC0415 - 0.2 s of a processor, which few processes need

    pairs = list(network.linked_pairs())
    rates: dict[tuple[int, int], float] = {pair: network.throughput(*pair) for pair in pairs}
    prices: dict[tuple[int, int], float] = {
        pair: sum((link.price for link in network.route(*pair)), 0.0) for pair in pairs
    }
    both = [(a, b) for a, b in rates if a < b and (b, a) in rates]
    both.sort(
        key=lambda pair: (prices[pair] + prices[pair[::-1]], -min(rates[pair], rates[pair[::-1]]), pair)
    )
    edges: nx.Graph[int] = nx.Graph()
    edges.add_nodes_from(network.ranks)
    edges.add_weighted_edges_from((*pair, place) for place, pair in enumerate(both))
    found = nx.minimum_spanning_tree(edges)
    if found.number_of_edges() < network.size - 1:
        raise Unreachable("the cheapest tree needs links that lead both ways and join all ranks")
    above = [dict(nx.bfs_predecessors(found, root)) for root in network.ranks]
    trees = [
        Tree.undirected(root, tuple(above[root].get(rank, -1) for rank in network.ranks))
        for root in network.ranks
    ]
    delays = transfer_delays(network, chunk_bytes, linked=True)
    best = min(trees, key=lambda tree: (float(f"{tree_delay(tree, delays):.12g}"), tree.root))
    price = sum(prices[pair] + prices[pair[::-1]] for pair in found.edges)
    return Forest(
        trees=(best,),
        shares=(1.0,),
        reason=f"cheapest: a GB that is summed costs {price:.3g}, rooted at rank {best.root}",
    )


def _widest(size: int, rates: Mapping[tuple[int, int], float], root: int) -> list[int]:
    """Return parents towards `root`, Prim's way: always the fastest pair from a placed rank (-1: none).

    networkx has no spanning tree of links that lead one way whose slowest edge is fastest.
    """
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


# Ring all-reduce, as trees that are paths: each share of the bytes once around to its root, once back.


def ring(network: Network) -> Forest:
    """Return the ring 0 → 1 → … → 0, whatever its links are. O(N²).

    Raises:
        Unreachable: names the hops for which there is no link.
    """
    missing = missing_hops(network, network.ranks)
    if missing:
        shown = ", ".join(f"{source}→{target}" for source, target in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise Unreachable(
            f"a ring in order of rank needs links that this overlay has not: {shown}{more}; "
            "expected another topology, such as ring-best, which looks for an order that has all links"
        )
    return Forest(
        trees=ring_trees(network.ranks), shares=(1.0,) * network.size, reason="ring: in order of rank"
    )


def ring_trees(order: Sequence[Rank]) -> tuple[Tree, ...]:
    """Return a tree for each root, in order of rank, for a ring in which each rank sends to the next.

    The tree of root r is reduced along the ring from the rank after r up to r, and broadcast from r around to
    the rank before it. With equal shares each hop of the ring carries 2(N - 1)/N of the tensor, and nothing
    else is sent.
    """
    after = {rank: order[(place + 1) % len(order)] for place, rank in enumerate(order)}
    before = {rank: order[place - 1] for place, rank in enumerate(order)}
    ranks = sorted(order)
    return tuple(
        Tree(
            root=root,
            reduce_parent=tuple(-1 if rank == root else after[rank] for rank in ranks),
            broadcast_parent=tuple(-1 if rank == root else before[rank] for rank in ranks),
        )
        for root in ranks
    )


def missing_hops(network: Network, order: Sequence[Rank]) -> list[tuple[Rank, Rank]]:
    """Return the hops of a ring whose ranks may not talk."""
    pairs = set(network.pairs())
    hops = [(rank, order[(place + 1) % len(order)]) for place, rank in enumerate(order)]
    return [(source, target) for source, target in hops if source != target and (source, target) not in pairs]


# Balanced trees in order of rank, whatever the links are: MLNET's shape.


def balanced(network: Network, degree: int = 2) -> Forest:
    """Return the tree in which rank i is below rank (i - 1) // degree: balanced and k-ary [1]_, rooted at 0.

    In an overlay that tree may have no links. Then each rank, first placed first, takes up to `degree` ranks
    that it has links with, lowest first, which in a mesh makes the same tree. Ranks that are still left, as
    those behind a hub of more than `degree` leaves are, go below the rank with the fewest children that they
    have a link with, so some ranks get more children than `degree`. O(E + N²).

    Raises:
        UsageError: a degree below 1.
        Unreachable: names the ranks that have no path to rank 0, or from it.

    References:
        .. [1] Mai et al., Optimizing Network Performance in Distributed Machine Learning, HotCloud 2015.
    """
    trees, crowded = _balanced_trees(network, degree, (Rank(0),))
    reason = f"balanced: a tree of degree {degree} in order of rank{crowded}"
    return Forest(trees=trees, shares=(1.0,), reason=reason)


def k_ary(network: Network, degree: int = 2, roots: int = 0) -> Forest:
    """Return the trees of `balanced` from `roots` ranks (0: from all), with equal shares.

    The tree of root r is that of `balanced` for the order r, r + 1, …, N - 1, 0, …: MLNET has one for each
    of its servers, of degree 2 (BINARY) or 7 (RACK) [1]_. So each rank is the root, a forwarder and a leaf as
    often as any other. Fewer roots than ranks are spread evenly. O(N · (E + N²)).

    Raises:
        UsageError: a degree below 1, more roots than ranks, or fewer than none.
        Unreachable: names the ranks that have no path to a root, or from it.

    References:
        .. [1] Mai et al., HotCloud 2015, §3.2 and §4.
    """
    _check_roots(network, roots)
    count = roots or network.size
    chosen = tuple(Rank(number * network.size // count) for number in range(count))
    trees, crowded = _balanced_trees(network, degree, chosen)
    return Forest(
        trees=trees,
        shares=(1.0,) * count,
        reason=f"k-ary: {count} trees of degree {degree}, each in order of rank from its root{crowded}",
    )


def _balanced_trees(network: Network, degree: int, roots: Sequence[Rank]) -> tuple[tuple[Tree, ...], str]:
    """Return a balanced tree for each root, and for a person whether some rank has too many children."""
    if degree < 1:
        raise UsageError(f"degree {degree}: expected at least 1, the most children that a rank has")
    targets: list[list[int]] = [list(network.neighbours(rank)) for rank in network.ranks]
    sources: list[list[int]] = [[] for _ in network.ranks]
    for source, target in network.pairs():
        sources[target].append(source)
    both = [sorted({*targets[rank]} & {*sources[rank]}) for rank in network.ranks]
    trees, most = [], 0
    for root in roots:
        up = down = _grow(both, degree, root)
        if _left(up, root):  # not all ranks can be reached over links that lead both ways
            up, down = _grow(sources, degree, root), _grow(targets, degree, root)
        for parents, direction in ((up, "to"), (down, "from")):
            if _left(parents, root):
                lost = shown_ranks(_left(parents, root))
                raise Unreachable(f"there is no path {direction} rank {root} for {lost}")
        most = max(most, *map(up.count, network.ranks))
        trees.append(Tree(root=root, reduce_parent=tuple(up), broadcast_parent=tuple(down)))
    return tuple(trees), f"; for want of links a rank has {most} children" if most > degree else ""


def _left(parents: Sequence[int], root: int) -> list[int]:
    return [rank for rank, parent in enumerate(parents) if parent < 0 and rank != root]


def _grow(neighbours: Sequence[Sequence[int]], degree: int, root: int) -> list[int]:
    """Return parents of a tree that takes ranks in order from its root, as far as neighbours reach (-1: not
    placed).
    """
    parents = [-1] * len(neighbours)
    children = [0] * len(neighbours)
    placed = [root]
    waiting = deque(placed)
    in_turn = [[*ends[(at := bisect(ends, root)) :], *ends[:at]] for ends in neighbours]

    def free(node: int) -> list[int]:
        return [rank for rank in in_turn[node] if rank != root and parents[rank] < 0]

    def place(rank: int, parent: int) -> None:
        parents[rank] = parent
        children[parent] += 1
        placed.append(rank)
        waiting.append(rank)

    while True:
        while waiting:
            node = waiting.popleft()
            for rank in free(node)[: max(0, degree - children[node])]:
                place(rank, node)
        if len(placed) == len(neighbours):
            return parents
        # min keeps the first of equals, the one placed earliest, which is the nearest to the root.
        candidates = [(node, rank) for node in placed for rank in free(node)]
        if not candidates:
            return parents
        node, rank = min(candidates, key=lambda pair: children[pair[0]])
        place(rank, node)


# Two tiers: the ranks of a site send to their leader, and the leaders share the bytes: HiPS' shape.

_ACROSS = 8.0
"""What a hop outside the two tiers counts, against 1 within them and 2 beside the leader in a group."""


def hierarchical(network: Network) -> Forest:
    """Return one tree for each group's leader, with equal shares: members below their leader, leaders below
    the root [1]_.

    A group's leader is the member whose slowest link with the others is fastest; of equals, the one with the
    most throughput to all ranks, then the lowest. In an overlay hops of the two tiers may have no link: each
    rank then takes the way to the root that leaves the tiers least often, then that with the fewest hops,
    then the fastest. O(N³) for the groups, O(√N · E log N) for the trees.

    Raises:
        Unreachable: names the ranks that have no path to a leader, or from it.

    References:
        .. [1] Geng et al., HiPS: Hierarchical Parameter Synchronization in Large-Scale Distributed Machine
           Learning, NetAI 2018.
    """
    rates = _slower(network)
    groups = groups_of(network)
    leaders = [_leader(group, rates) for group in groups]
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    top = set(leaders)
    slowest = min((network.throughput(*pair) for pair in network.pairs()), default=1.0)
    costs: dict[tuple[int, int], float] = {}
    for pair in network.pairs():
        within = group_of[pair[0]] == group_of[pair[1]]
        led = bool(top.intersection(pair)) if within else top.issuperset(pair)
        level = 1.0 if led else 2.0 if within else _ACROSS * network.size
        # Together less than 1 on any way, so that rates only choose between ways of equal levels.
        costs[pair] = level + slowest / network.throughput(*pair) / (2 * network.size)
    links = adjacency(network.ranks, costs)
    by_site = _by_site(network) is not None
    return Forest(
        trees=tuple(fastest_tree(links, leader) for leader in sorted(leaders)),
        shares=(1.0,) * len(leaders),
        reason=f"hierarchical: {len(groups)} groups by {'site' if by_site else 'throughput'}, led by "
        f"{', '.join(map(str, sorted(leaders)))}",
    )


def groups_of(network: Network) -> tuple[tuple[Rank, ...], ...]:
    """Return the ranks of each site, if sites group them: there are at least two, and one has several ranks.

    A rank without a site is a group of its own. If sites say nothing, ranks are merged into about √N groups:
    again and again the two with the most throughput between them on average, unless together they would have
    more than their share of ranks and one.
    """
    return _by_site(network) or _by_throughput(network.size, _slower(network))


def _by_site(network: Network) -> tuple[tuple[Rank, ...], ...] | None:
    members: dict[tuple[str, int], list[Rank]] = {}
    for node in network.nodes:
        members.setdefault((node.site, -1 if node.site else node.rank), []).append(node.rank)
    if 1 < len(members) < network.size:
        return tuple(sorted(map(tuple, members.values())))
    return None


def _by_throughput(size: int, rates: npt.NDArray[np.float64]) -> tuple[tuple[Rank, ...], ...]:
    wanted = min(size, max(2, round(math.sqrt(size))))
    most = math.ceil(size / wanted) + 1
    groups: list[list[int]] = [[rank] for rank in range(size)]
    counts = np.ones(size)
    sums = rates.copy()  # between each two groups; a merged group keeps the lower one's place
    for _ in range(size - wanted):
        average = sums / np.outer(counts, counts)
        allowed = np.triu(counts[:, None] + counts[None, :] <= most, 1) & (np.outer(counts, counts) > 0)
        if not allowed.any():
            break
        kept, gone = np.unravel_index(int(np.where(allowed, average, -1.0).argmax()), average.shape)
        groups[kept] += groups[gone]
        groups[gone] = []
        counts[kept] += counts[gone]
        sums[kept] += sums[gone]
        sums[:, kept] += sums[:, gone]
        counts[gone] = np.inf  # fits nowhere any more
    return tuple(tuple(map(Rank, sorted(group))) for group in groups if group)


def _slower(network: Network) -> npt.NDArray[np.float64]:
    """Return (N, N) the throughput between two ranks in the slower direction, in bit/s; 0: no link."""
    rates = np.zeros((network.size, network.size))
    for pair in network.pairs():
        rates[pair] = network.throughput(*pair)
    slower: npt.NDArray[np.float64] = np.minimum(rates, rates.T)
    return slower


def _leader(group: Sequence[Rank], rates: npt.NDArray[np.float64]) -> Rank:
    def key(rank: Rank) -> tuple[float, float, int]:
        slowest = min((float(rates[rank, other]) for other in group if other != rank), default=0.0)
        return -slowest, -float(rates[rank].sum()), rank

    return min(group, key=key)
