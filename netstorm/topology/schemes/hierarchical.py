"""Two tiers: the ranks of a site send to their leader, and the leaders share the bytes: HiPS' shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from netstorm.topology.networks.elements import Rank
from netstorm.topology.networks.network import Network
from netstorm.topology.trees.forest import Forest
from netstorm.topology.trees.shortest_paths import adjacency, fastest_tree

__all__ = ["groups_of", "hierarchical"]

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
