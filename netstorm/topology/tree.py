"""A spanning tree along which chunks are reduced and broadcast, its delays, and a group's part."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import msgspec

from netstorm.errors import Unreachable, UsageError
from netstorm.topology.network import Network, Rank, shown_ranks

__all__ = [
    "CHUNK_BYTES",
    "OUTSIDE",
    "Adjacency",
    "Delays",
    "MemberTree",
    "Tree",
    "adjacency",
    "broadcast_delay",
    "children_of",
    "fastest_tree",
    "reduce_delay",
    "shallowest_tree",
    "subtree_delay",
    "transfer_delays",
    "tree_delay",
]


# A spanning tree along which chunks are reduced and broadcast.


class Tree(msgspec.Struct, frozen=True, kw_only=True, array_like=True, dict=True):
    """Chunks are reduced up along `reduce_parent` to `root`, then broadcast down along `broadcast_parent`.

    The two may differ if the two directions of links do (in- and out-arborescences with a common root).

    Raises:
        UsageError: a map that is not a spanning tree with this root (`msgspec.ValidationError` in decoding).
    """

    root: Rank
    reduce_parent: tuple[int, ...]
    """By rank; -1 at the root."""
    broadcast_parent: tuple[int, ...]
    """By rank; -1 at the root."""

    def __post_init__(self) -> None:
        if len(self.reduce_parent) != len(self.broadcast_parent):
            raise UsageError(
                f"a tree with reduce parents for {len(self.reduce_parent)} ranks and broadcast parents for "
                f"{len(self.broadcast_parent)}: expected the same number"
            )
        _check_spans(self.root, self.reduce_parent, "reduce")
        if self.broadcast_parent != self.reduce_parent:
            _check_spans(self.root, self.broadcast_parent, "broadcast")

    @classmethod
    def undirected(cls, root: Rank, parent: tuple[int, ...]) -> Tree:
        """Return the tree that is reduced and broadcast along the same edges."""
        return cls(root=root, reduce_parent=parent, broadcast_parent=parent)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.reduce_parent)

    @cached_property
    def reduce_children(self) -> tuple[tuple[int, ...], ...]:
        """By rank: the ranks whose contributions arrive there, in order of rank."""
        return children_of(self.reduce_parent)

    @cached_property
    def broadcast_children(self) -> tuple[tuple[int, ...], ...]:
        """By rank: the ranks to which it sends the result, in order of rank."""
        return children_of(self.broadcast_parent)

    def path(self, source: int, target: int) -> tuple[int, ...]:
        """Return the ranks on the path between two within the tree, both included: up as sums are sent, then
        down as results are.
        """
        return path_between(self.reduce_parent, self.broadcast_parent, source, target)

    @cached_property
    def subtree_mask(self) -> tuple[int, ...]:
        """By rank: bit set of the ranks in its reduce subtree, including itself."""
        return subtree_masks(self.root, self.reduce_parent, self.reduce_children)

    @cached_property
    def broadcast_mask(self) -> tuple[int, ...]:
        """By rank: bit set of the ranks in its broadcast subtree, including itself."""
        return subtree_masks(self.root, self.broadcast_parent, self.broadcast_children)


def path_between(
    reduce_parent: Sequence[int], broadcast_parent: Sequence[int], source: int, target: int
) -> tuple[int, ...]:
    """Return the ranks on the path between two in a tree, as `Tree.path` does."""
    above = [target]
    while (parent := broadcast_parent[above[-1]]) >= 0:
        above.append(parent)
    walk = [source]
    while walk[-1] not in above:
        walk.append(reduce_parent[walk[-1]])
    return (*walk, *reversed(above[: above.index(walk[-1])]))


def subtree_masks(
    root: int, parents: tuple[int, ...], children: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    """Return the bit set of the ranks in each rank's subtree, including itself, by rank."""
    masks = [1 << rank for rank in range(len(parents))]
    for rank in _leaves_first(root, children):
        parent = parents[rank]
        if parent >= 0:
            masks[parent] |= masks[rank]
    return tuple(masks)


def children_of(parents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return each rank's children, by rank; a parent below 0 is none."""
    children: list[list[int]] = [[] for _ in parents]
    for rank, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(rank)
    return tuple(map(tuple, children))


def _leaves_first(root: int, children: tuple[tuple[int, ...], ...]) -> list[int]:
    order = [root]
    for rank in order:
        order.extend(children[rank])
    return order[::-1]


def _check_spans(root: int, parents: tuple[int, ...], phase: str) -> None:
    size = len(parents)
    if not 0 <= root < size:
        raise UsageError(
            f"a tree of {size} ranks with root {root}: expected one of its ranks, 0 to {size - 1}"
        )
    roots = [rank for rank, parent in enumerate(parents) if parent == -1]
    if roots != [root]:
        raise UsageError(
            f"{phase} parents with -1 at {shown_ranks(roots)}: expected it at the root, {root}, alone"
        )
    for rank, parent in enumerate(parents):
        if not -1 <= parent < size:
            raise UsageError(
                f"{phase} parent {parent} of rank {rank}: expected another rank, from 0 to {size - 1}"
            )
    reached = _leaves_first(root, children_of(parents))
    if len(reached) < size:
        missing = sorted(set(range(size)) - set(reached))
        raise UsageError(
            f"{phase} parents of {shown_ranks(missing)} do not lead to the root, {root}: expected a tree"
        )


# A tree of the whole job, contracted to the members of a process group, whose sums go along it.
#
# A group has trees of its own over its members alone: no rank outside it adds, forwards or waits. Each is a
# tree of the job's policy, in which a member's parent is the nearest member above it. Every member computes
# the same.

OUTSIDE: Final = -2
"""In place of a parent: the rank is no member."""


class MemberTree:
    """A tree over the members of a group, with the attributes of `Tree`."""

    __slots__ = (
        "broadcast_children",
        "broadcast_mask",
        "broadcast_parent",
        "reduce_children",
        "reduce_parent",
        "root",
        "subtree_mask",
    )

    def __init__(self, tree: Tree, members: Sequence[int]) -> None:
        """Contract `tree`. The root is the member that is nearest to the tree's own root.

        Args:
            tree: over all ranks.
            members: some of its ranks; at least one.
        """
        inside = frozenset(members)
        self.root: Final = _nearest_member(tree, inside)
        self.reduce_parent: Final = _contracted(tree.reduce_parent, inside, self.root)
        """By rank; -1 at the root, `OUTSIDE` for ranks that are no members."""
        self.broadcast_parent: Final = _contracted(tree.broadcast_parent, inside, self.root)
        self.reduce_children: Final = children_of(self.reduce_parent)
        self.broadcast_children: Final = children_of(self.broadcast_parent)
        self.subtree_mask: Final = subtree_masks(self.root, self.reduce_parent, self.reduce_children)
        """By rank: bit set of the ranks in its reduce subtree, including itself."""
        self.broadcast_mask: Final = subtree_masks(self.root, self.broadcast_parent, self.broadcast_children)
        """By rank: bit set of the ranks in its broadcast subtree, including itself."""

    def path(self, source: int, target: int) -> tuple[int, ...]:
        """Return the members on the path between two, as `Tree.path` does."""
        return path_between(self.reduce_parent, self.broadcast_parent, source, target)


def _nearest_member(tree: Tree, inside: frozenset[int]) -> int:
    ranks = [int(tree.root)]
    for rank in ranks:
        if rank in inside:
            return rank
        ranks.extend(tree.reduce_children[rank])
    raise AssertionError("a group has at least one member")


def _contracted(parents: Sequence[int], inside: frozenset[int], root: int) -> tuple[int, ...]:
    found = []
    for rank in range(len(parents)):
        above = parents[rank]
        while above >= 0 and above not in inside:
            above = parents[above]
        if rank not in inside:
            found.append(OUTSIDE)
        elif rank == root:
            found.append(-1)
        else:
            found.append(above if above >= 0 else root)
    return tuple(found)


# How long a tree takes: the paper's topology metric, arXiv 2404.11352 §III-A (Definition 1, Theorem 1).
#
# A node must wait for its slowest child before it can forward, so what counts is the slowest path from a
# leaf. Aggregation overlaps with transmission and is not counted.

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


# Shortest-path trees: Dijkstra, with a cost of two parts that breaks ties between equal paths.
#
# Not networkx's: it takes as long (2.1 s of a processor for both trees of each of 128 ranks in a mesh, and
# this 2.2; 1 ms for those of 9 either way), its costs are single numbers, which cannot compare delays exactly
# and then hops, and to import it takes 0.2 s more than a job needs that starts with FAPTs.


class Adjacency(NamedTuple):
    """For each rank its links in (`sources`) and out (`targets`): the rank at the other end and the delay."""

    sources: Sequence[Sequence[tuple[int, float]]]
    targets: Sequence[Sequence[tuple[int, float]]]


Cost: TypeAlias = tuple[float, float]


def adjacency(ranks: Sequence[Rank], delays: Delays) -> Adjacency:
    """Arrange delays by node, neighbours by rank: what comes out must not depend on a mapping's order."""
    sources: list[list[tuple[int, float]]] = [[] for _ in ranks]
    targets: list[list[tuple[int, float]]] = [[] for _ in ranks]
    for (source, target), delay in sorted(delays.items()):
        sources[target].append((source, delay))
        targets[source].append((target, delay))
    return Adjacency(sources, sources if sources == targets else targets)


def fastest_tree(links: Adjacency, root: Rank) -> Tree:
    """Return the tree of least total delay from each rank to `root` and back; of equals, the fewest hops.

    Raises:
        Unreachable: names the ranks that have no path to `root`, or from it.
    """
    return _tree(links, root, by_hops=False)


def shallowest_tree(links: Adjacency, root: Rank) -> Tree:
    """Return the tree of fewest hops from each rank to `root` and back; of equals, the least total delay.

    Raises:
        Unreachable: names the ranks that have no path to `root`, or from it.
    """
    return _tree(links, root, by_hops=True)


def _tree(links: Adjacency, root: Rank, *, by_hops: bool) -> Tree:
    up = _parents(links.sources, root, by_hops=by_hops)
    lost = _without(up, root)
    if lost:
        raise Unreachable(f"there is no path from {shown_ranks(lost)} to rank {root}")
    down = up if links.sources is links.targets else _parents(links.targets, root, by_hops=by_hops)
    lost = _without(down, root)
    if lost:
        raise Unreachable(f"there is no path from rank {root} to {shown_ranks(lost)}")
    return Tree(root=root, reduce_parent=tuple(up), broadcast_parent=tuple(down))


def _without(parents: Iterable[int], root: int) -> list[int]:
    return [rank for rank, parent in enumerate(parents) if parent < 0 and rank != root]


def _parents(steps: Sequence[Sequence[tuple[int, float]]], root: int, *, by_hops: bool) -> list[int]:
    """Return the shortest-path parents towards `root` (-1: none); `steps` are the links at each rank that
    lead away from it.
    """
    unknown: Cost = (float("inf"), float("inf"))
    costs = [unknown] * len(steps)
    parents = [-1] * len(steps)
    costs[root] = (0.0, 0.0)
    heap: list[tuple[Cost, int]] = [(costs[root], root)]
    while heap:
        cost, node = heapq.heappop(heap)
        if cost > costs[node]:
            continue
        first, second = cost
        for other, delay in steps[node]:
            total = first + 1 if by_hops else first + delay
            if total > costs[other][0]:  # as of most links of a mesh: without a pair for each, half the time
                continue
            further = (total, second + delay if by_hops else second + 1)
            if further < costs[other]:
                costs[other] = further
                parents[other] = node
                heapq.heappush(heap, (further, other))
    return parents
