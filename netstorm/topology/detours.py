"""Chooses the detours of a policy: around the busiest hops, over capacity that its trees leave unused.

A detour over links of a tree takes capacity from that tree: with the simple rule of the shorter queue, such
detours cost 4-20 % on static networks. So a detour uses only the spare capacity of links, links under routes
and access lines, which also gives the expected time of a chunk. If trees use all links evenly, as a packing
does, few detours are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import sparse

from netstorm.topology.network import Network, Rank
from netstorm.topology.policy import MAX_DETOURS, MAX_EXPLORERS, Detour, Policy
from netstorm.topology.resources import Floats, Resources, pair_loads
from netstorm.topology.tree import CHUNK_BYTES, Tree

__all__ = [
    "Path",
    "auxiliary_paths",
    "delivery",
    "detours",
    "hops_of",
    "link_delays",
    "with_auxiliary_set",
    "with_detours",
]


_BUSY: Final = 0.5
"""Hops with less than this utilisation, relative to the most used resource, get no detour: they delay
nothing.
"""

_HOLDS_UP: Final = 1.25
"""A hop gets detours if its utilisation is this multiple of the median hop's. If all hops are used alike,
chunks that arrive out of order cost more (mst in a mesh: 7 %) than detours gain.
"""

_LEAST_SPARE: Final = 0.2
"""Fraction of a resource that must be unused: with less, its queue is not known well enough."""

_MOST_LOAD: Final = 0.7
"""Largest `Detour.load`: a detour with more would hardly ever be chosen."""

_MOST_HOPS: Final = 256
"""Most hops that get detours, the most used first. It bounds the size of a policy and the time of the search,
and matters from 16 nodes in a mesh.
"""


def with_detours(
    network: Network,
    policy: Policy,
    *,
    chunk_bytes: int,
    known: bool = True,
    unmeasured: Collection[tuple[int, int]] = (),
    measured: Collection[tuple[int, int]] = (),
) -> Policy:
    """Return a policy with detours: up to two around each busy hop, and some that measure links.

    Args:
        network: the network estimate.
        policy: without detours.
        chunk_bytes: of a full chunk.
        known: rates are known or measured; if they are assumed, detours cannot be compared with hops.
        unmeasured: (source, target) of links to measure, the most important first.
        measured: those of them that were measured before.
    """
    resources = Resources.of(network)
    loads = resources.loads(pair_loads(resources, policy.trees, policy.weights))
    used = loads / resources.capacities
    used /= used.max(initial=0.0) or 1.0
    hops = hops_of(policy.trees)
    links = _Links(network, resources, chunk_bytes)
    found: list[Detour] = []
    if known:
        found += _around_busy(links, hops, used)
    found += _explorers(links, hops, unmeasured, set(measured))
    return msgspec.structs.replace(policy, detours=tuple(found)) if found else policy


class _Links:
    """Rates and delays of links, given the capacities of resources."""

    def __init__(self, network: Network, resources: Resources, chunk_bytes: int) -> None:
        self.network: Final = network
        self.resources: Final = resources
        self._chunk_bytes: Final = chunk_bytes
        self._sources: Final = np.array([link.source for link in network.links], np.intp)
        self._targets: Final = np.array([link.target for link in network.links], np.intp)
        self._places: Final = np.array(
            [resources.place((link.source, link.target)) for link in network.links], np.intp
        )
        self._latencies: Final = np.array(
            [network.link(link.source, link.target).latency for link in network.links]
        )

    def rates(self, capacities: Floats) -> Floats:
        """Return (N, N) the bit/s of each link, by (R,) those of resources; 0: none."""
        by_pair = self.resources.by_pair
        least = np.minimum.reduceat(capacities[by_pair.indices], by_pair.indptr[:-1])
        rates = np.zeros((self.network.size,) * 2)
        rates[self._sources, self._targets] = least[self._places]
        return rates

    def delays(self, rates: Floats) -> Floats:
        """Return (N, N) the seconds of a chunk over each link; inf: none."""
        delays = np.full(rates.shape, np.inf)
        mine = rates[self._sources, self._targets]
        with np.errstate(divide="ignore"):
            delays[self._sources, self._targets] = 8 * self._chunk_bytes / mine + self._latencies
        return delays

    def used_by(self, path: Path) -> list[int]:
        """Return the numbers of the resources that a path uses."""
        return sorted({used for ends in pairwise(path) for used in self.resources.used_by(ends)})

    def detour(
        self, path: Path, rates: Floats, *, explore: bool = False, again: bool = False, load: float = 0.0
    ) -> Detour:
        return Detour(
            path=tuple(map(int, path)),
            links=tuple(
                (round(float(rates[ends]), 1), self.network.link(*ends).latency) for ends in pairwise(path)
            ),
            explore=explore,
            again=again,
            load=round(load, 3),
        )


def _around_busy(links: _Links, hops: list[tuple[Rank, Rank]], used: Floats) -> list[Detour]:
    """Return the detours of the busiest hops, which share the spare capacity.

    The busiest hop chooses first. A resource with n detours counts as spare / (n + 1) for the next one, and
    gives spare / n to each at the end, because several hops may use the same link at the same time.
    """

    def load(path: Path) -> float:
        return float(max(used[links.used_by(path)]))

    capacities = links.resources.capacities
    spare = np.where(used <= 1.0 - _LEAST_SPARE, capacities * (1.0 - used), 0.0)
    if not spare.any():
        return []
    busy = sorted((-load(hop), hop) for hop in hops)
    least = max(_BUSY, -_HOLDS_UP * busy[len(busy) // 2][0])
    users = np.zeros(len(spare))
    kept: list[tuple[Path, float]] = []
    for less, hop in busy[:_MOST_HOPS]:
        if -less < least:
            break
        delays = links.delays(links.rates(spare / (users + 1)))
        for path in disjoint_paths(links.network, delays, [hop], most=MAX_DETOURS)[hop]:
            part = load(path[1:]) / -less
            if len(path) > 2 and part < _MOST_LOAD:
                kept.append((path, part))
                users[links.used_by(path)] += 1
    rates = links.rates(spare / np.maximum(users, 1))
    return [links.detour(path, rates, load=part) for path, part in kept]


def _explorers(
    links: _Links,
    hops: list[tuple[Rank, Rank]],
    unmeasured: Collection[tuple[int, int]],
    measured: Container[tuple[int, int]],
) -> Iterator[Detour]:
    """Yield one detour over each link to measure that no hop uses.

    The link is the first or the last of the detour, which has three ranks if possible. Its hop begins at the
    rank with the fewest such detours for each of its hops, so that all nodes measure at the same time; of
    equals, the fastest detour.
    """
    rates = links.rates(links.resources.capacities)
    idle = links.delays(rates)
    count: dict[tuple[int, int], int] = {}
    explorers: dict[int, int] = {}
    known = set(hops)
    leads = Counter(int(source) for source, _ in hops)
    for a, b in unmeasured:
        if (a, b) in known:
            continue
        if not np.isfinite(idle[a, b]):
            continue
        for found in (_over_one(idle, hops, a, b), _over_several(idle, hops, a, b)):
            choices = [
                (explorers.get(path[0], 0) / leads[path[0]], seconds, path)
                for seconds, path in found
                if np.isfinite(seconds) and count.get((path[0], path[-1]), 0) < MAX_EXPLORERS
            ]
            if choices:
                path = min(choices)[2]
                explorers[path[0]] = explorers.get(path[0], 0) + 1
                count[path[0], path[-1]] = count.get((path[0], path[-1]), 0) + 1
                yield links.detour(path, rates, explore=True, again=(a, b) in measured)
                break


def _over_one(idle: Floats, hops: list[tuple[Rank, Rank]], a: int, b: int) -> Iterator[tuple[float, Path]]:
    """Yield detours with one rank between that begin or end with a link, and their seconds."""
    for source, target in hops:
        if source == a and target != b:
            yield float(idle[a, b] + idle[b, target]), (Rank(a), Rank(b), target)
        if target == b and source != a:
            yield float(idle[source, a] + idle[a, b]), (source, Rank(a), Rank(b))


def _over_several(
    idle: Floats, hops: list[tuple[Rank, Rank]], a: int, b: int
) -> Iterator[tuple[float, Path]]:
    """Yield the fastest detour of each hop that begins or ends with a link, and its seconds."""
    on = fastest_from(idle, b, without=a)
    back = fastest_from(idle.T, a, without=b)
    for source, target in hops:
        if source == a and target in on:
            seconds, path = on[target]
            yield float(idle[a, b]) + seconds, (Rank(a), *path)
        if target == b and source in back:
            seconds, path = back[source]
            yield seconds + float(idle[a, b]), (*reversed(path), Rank(b))


# Auxiliary paths: detours around busy links, and a look at links that no tree uses.
#
# Those of single hops are found by SciPy's Dijkstra: a formation makes up to three searches for each of 256
# hops, and one in a mesh of 128 takes SciPy 0.2 ms of a processor, networkx 8.

Path: TypeAlias = tuple[Rank, ...]
"""The ranks on a path, both ends included; each has a link to the next."""

_FEWER_HOPS: Final = 1e-9
"""What a hop more counts, in part of its delay: of equally fast paths the one with fewer hops is taken."""


def auxiliary_paths(
    network: Network, *, chunk_bytes: int = CHUNK_BYTES
) -> dict[tuple[Rank, Rank], tuple[Path, ...]]:
    """Return for each (source, target) paths that share no link, the fastest first.

    The paper's Algorithm 3 [1]_: the fastest paths between all ranks; then those in what is left without
    their links, until no link is left. So no link serves in two rounds, whosever path it was on, and where
    the direct links are the fastest paths there is no detour: `detours` finds those. Paths are ranked by
    delivery, the time of one chunk that each node on the way stores and forwards, latency included (the
    paper's is 1/rate). They lead over links, with routing in the underlay too: routes that share one are not
    disjoint. A round uses up at least the fastest link of each rank: at most N - 1 rounds of O(N · E log N).
    In meshes of 9, 32 and 128 ranks it takes 2 ms, 18 ms and 1.1 s of a processor.

    References:
        .. [1] Li et al., arXiv 2404.11352, Algorithm 3.
    """
    import networkx as nx

    left = network.graph()
    delays = [delivery(network, ends, chunk_bytes=chunk_bytes) for ends in left.edges]
    hop = _FEWER_HOPS * max(delays, default=0.0)
    for (source, target), delay in zip(list(left.edges), delays, strict=True):
        left[source][target]["delay"] = delay + hop
    found: dict[tuple[Rank, Rank], list[Path]] = {
        (source, target): [] for source in network.ranks for target in network.ranks if source != target
    }
    while left.number_of_edges():
        used: set[tuple[Rank, Rank]] = set()
        for source, paths in nx.all_pairs_dijkstra_path(left, weight="delay"):
            for target, path in paths.items():
                if target != source:
                    found[source, target].append(tuple(path))
                    used.update(pairwise(path))
        left.remove_edges_from(used)
    return {pair: tuple(paths) for pair, paths in found.items()}


_BY_RATE: Final = 10**12
"""Bytes of a chunk whose delay is as good as the paper's 1/rate: latencies only decide between equal ones."""


def with_auxiliary_set(network: Network, policy: Policy) -> Policy:
    """Return a policy with the paths of Algorithm 3 around each hop, the fastest first: the paper's H_aux
    without the hop itself. They may lead over links of other trees.
    """
    paths = auxiliary_paths(network, chunk_bytes=_BY_RATE)
    found = [
        Detour(
            path=tuple(map(int, path)),
            links=tuple(
                (round(network.throughput(*ends), 1), network.link(*ends).latency) for ends in pairwise(path)
            ),
        )
        for hop in hops_of(policy.trees)
        for path in [path for path in paths[hop] if len(path) > 2][:MAX_EXPLORERS]
    ]
    return msgspec.structs.replace(policy, detours=tuple(found))


def detours(
    network: Network, trees: Sequence[Tree], *, chunk_bytes: int = CHUNK_BYTES, most: int = MAX_DETOURS
) -> dict[tuple[Rank, Rank], tuple[Path, ...]]:
    """Return for each hop of the trees up to `most` other paths to the same receiver, the fastest first.

    As Algorithm 3, but for each hop on its own: the links of its route are removed, then those of each path
    that is found. Paths of one hop are disjoint; those of two hops may share links, since only busy hops use
    theirs. O(H · E log N) for H hops, N² at most: with hundreds of ranks in a mesh it takes seconds.
    """
    return disjoint_paths(network, link_delays(network, chunk_bytes), hops_of(trees), most=most)


def hops_of(trees: Sequence[Tree]) -> list[tuple[Rank, Rank]]:
    """Return all (source, target) over which trees send, in order."""
    hops = {(rank, parent) for tree in trees for rank, parent in enumerate(tree.reduce_parent)}
    hops |= {(parent, rank) for tree in trees for rank, parent in enumerate(tree.broadcast_parent)}
    return [(Rank(source), Rank(target)) for source, target in sorted(hops) if min(source, target) >= 0]


def disjoint_paths(
    network: Network, delays: Floats, hops: Sequence[tuple[Rank, Rank]], *, most: int
) -> dict[tuple[Rank, Rank], tuple[Path, ...]]:
    """Return for each of some hops up to `most` paths that share no link with it or each other.

    Args:
        network: knows the hops' routes.
        delays: (N, N) seconds over each link; inf: not to be used.
        hops: (source, target) of each.
        most: paths of a hop.
    """
    from scipy.sparse import csgraph

    rows, columns = np.nonzero(np.isfinite(delays))
    place = np.full(delays.shape, -1)
    place[rows, columns] = np.arange(len(rows))
    graph = _graph(delays)
    whole: Floats = graph.data.copy()
    found: dict[tuple[Rank, Rank], tuple[Path, ...]] = {}
    for source, target in hops:
        graph.data[:] = whole
        for link in network.route(source, target):
            if place[link.source, link.target] >= 0:
                graph.data[place[link.source, link.target]] = np.inf
        paths: list[Path] = []
        while len(paths) < most:
            away, before = csgraph.dijkstra(graph, indices=source, return_predecessors=True)
            if not np.isfinite(away[target]):
                break
            paths.append(_path(before, source, target))
            graph.data[place[paths[-1][:-1], paths[-1][1:]]] = np.inf
        found[source, target] = tuple(paths)
    return found


def fastest_from(delays: Floats, source: int, *, without: int) -> dict[int, tuple[float, Path]]:
    """Return by target the seconds of the fastest path to it, and the path, of all that avoid one rank.

    Args:
        delays: (N, N) seconds over each link; inf: none.
        source: where paths begin; it is none of the targets.
        without: the rank that no path leads over.
    """
    from scipy.sparse import csgraph

    left = delays.copy()
    left[without, :] = left[:, without] = np.inf
    away, before = csgraph.dijkstra(_graph(left), indices=source, return_predecessors=True)
    return {
        int(target): (float(away[target]), _path(before, source, int(target)))
        for target in np.flatnonzero(np.isfinite(away))
        if target != source
    }


def delivery(network: Network, path: Path, *, chunk_bytes: int = CHUNK_BYTES) -> float:
    """Return the seconds until a chunk is at the end of an idle path, stored and forwarded at each rank.

    Raises:
        Unreachable: two ranks in turn may not talk.
    """
    return sum(
        8 * chunk_bytes / network.throughput(source, target) + network.link(source, target).latency
        for source, target in pairwise(path)
    )


def link_delays(network: Network, chunk_bytes: int) -> Floats:
    """Return (N, N) the seconds of a chunk over each link; inf: none."""
    delays = np.full((network.size, network.size), np.inf)
    for link in network.links:
        ends = (link.source, link.target)
        delays[ends] = delivery(network, ends, chunk_bytes=chunk_bytes)
    return delays


def _graph(delays: Floats) -> Any:
    """Return finite delays as a scipy.sparse.csr_array, in order of their ends."""
    rows, columns = np.nonzero(np.isfinite(delays))
    finite = delays[rows, columns]
    finite += _FEWER_HOPS * finite.max(initial=0.0)
    return sparse.csr_array((finite, (rows, columns)), shape=delays.shape)


def _path(before: npt.NDArray[np.int32], source: int, target: int) -> Path:
    path = [target]
    while path[-1] != source:
        path.append(int(before[path[-1]]))
    return tuple(map(Rank, reversed(path)))
