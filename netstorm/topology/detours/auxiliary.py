"""Auxiliary paths: detours around busy links, and a look at links that no tree uses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.sparse import csgraph

from netstorm.topology.trees.resources import Floats
from netstorm.topology.networks.elements import Rank
from netstorm.topology.networks.network import Network
from netstorm.topology.policy import MAX_DETOURS
from netstorm.topology.tree import Tree
from netstorm.topology.trees.metric import CHUNK_BYTES

__all__ = [
    "Path",
    "auxiliary_paths",
    "delivery",
    "detours",
    "disjoint_paths",
    "fastest_from",
    "hops_of",
    "link_delays",
]

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

    References:
        .. [1] Li et al., arXiv 2404.11352, Algorithm 3.
    """
    left = link_delays(network, chunk_bytes)
    found: dict[tuple[Rank, Rank], list[Path]] = {
        (source, target): [] for source in network.ranks for target in network.ranks if source != target
    }
    while np.isfinite(left).any():
        away, before = csgraph.dijkstra(_graph(left), return_predecessors=True)
        # The last hops of all paths are all their links: a fastest path is another one, and a hop.
        reached = np.isfinite(away)
        for (source, target), paths in found.items():
            if reached[source, target]:
                paths.append(_path(before[source], source, target))
        used = np.zeros(left.shape, np.bool_)
        sources, targets = np.nonzero(before >= 0)
        used[before[sources, targets], targets] = True
        left[used] = np.inf
    return {pair: tuple(paths) for pair, paths in found.items()}


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
