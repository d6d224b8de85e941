"""What the scheduler decides: trees and their shares; and one node's view of it."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Final

import msgspec

from netstorm.errors import UsageError
from netstorm.topology.networks.elements import Rank, shown_ranks
from netstorm.topology.schedule import interleave, staggered

__all__ = ["DETOURS", "EXPLORERS", "MAX_TOTAL_WEIGHT", "Detour", "Plan", "Policy", "Tree"]

MAX_TOTAL_WEIGHT: Final = 1_000_000
"""Bounds the table behind `Policy.tree_of`, which a peer's policy must not make larger than memory."""


DETOURS: Final = 2
"""Most detours of a tree hop: a third path is rarely disjoint, and rarely faster than to wait."""

EXPLORERS: Final = 16
"""Most detours of a tree hop that are there to measure links. They take turns."""


class Tree(msgspec.Struct, frozen=True, kw_only=True, array_like=True, dict=True):
    """Chunks are reduced along `reduce_parent` up to `root`, then broadcast along `broadcast_parent` down.

    The two differ where the two directions of links do (in- and out-arborescences with a common root).

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
        """By rank: whose contributions arrive there, in order of rank."""
        return _children(self.reduce_parent)

    @cached_property
    def broadcast_children(self) -> tuple[tuple[int, ...], ...]:
        """By rank: to whom the result goes from there, in order of rank."""
        return _children(self.broadcast_parent)

    def way(self, source: int, target: int) -> tuple[int, ...]:
        """Return the ranks on the way between two within the tree, both included: up as sums go, and down as
        results do.
        """
        above = [target]
        while (parent := self.broadcast_parent[above[-1]]) >= 0:
            above.append(parent)
        walk = [source]
        while walk[-1] not in above:
            walk.append(self.reduce_parent[walk[-1]])
        return (*walk, *reversed(above[: above.index(walk[-1])]))

    @cached_property
    def subtree_mask(self) -> tuple[int, ...]:
        """By rank: bit set of the ranks in its reduce subtree, itself included."""
        masks = [1 << rank for rank in range(self.size)]
        for rank in _leaves_first(self.root, self.reduce_children):
            parent = self.reduce_parent[rank]
            if parent >= 0:
                masks[parent] |= masks[rank]
        return tuple(masks)


class Detour(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An auxiliary path: another way from a rank to its neighbour in a tree.

    Raises:
        UsageError: no path around a hop (`msgspec.ValidationError` in decoding).
    """

    path: tuple[int, ...]
    """The ranks on it, both ends included (the paper's PATH); those between forward only."""
    links: tuple[tuple[float, float], ...]
    """Of each of its links: bit/s that it has beside what trees send over it, and latency in s."""
    explore: bool = False
    """It leads over a link that should be measured: a few chunks go there, faster or not."""
    load: float = 0.0
    """What trees send over the most used of its links but the first, in parts of that link's capacity, over
    the same of the hop: so much of the time that a chunk waits for the hop it will wait on the way.
    """
    again: bool = False
    """The link that it is there to measure was measured before: no chunk need be late for it."""

    def __post_init__(self) -> None:
        if not 0 <= self.load < math.inf:
            raise UsageError(f"detour with a load of {self.load}: expected a finite number, 0 or more")
        if len(self.path) < 3 or len(set(self.path)) < len(self.path) or min(self.path) < 0:
            raise UsageError(
                f"detour over ranks {list(self.path[:16])}: expected three or more, each of them once"
            )
        if len(self.links) != len(self.path) - 1 or not all(
            0 < rate < math.inf and 0 <= latency < math.inf for rate, latency in self.links
        ):
            raise UsageError(
                f"detour over ranks {list(self.path[:16])} with links of {list(self.links[:16])}: expected "
                "for each of its links a rate above 0 and a latency of 0 or more"
            )

    def seconds(self, link: int, size: int) -> float:
        """Return what `size` bytes are expected to take over one of its links."""
        rate, latency = self.links[link]
        return 8 * size / rate + latency


class Policy(msgspec.Struct, frozen=True, kw_only=True, array_like=True, dict=True):
    """Trees with their shares, numbered. Every node computes the same from it.

    Raises:
        UsageError: trees and weights that do not fit together (`msgspec.ValidationError` in decoding).
    """

    version: int
    trees: tuple[Tree, ...]
    weights: tuple[int, ...]
    """Of all slots, tree t gets weights[t] / sum(weights)."""
    reason: str = ""
    """How it came about, for a person."""
    look_ahead: int = 0
    """Bytes beyond its first chunk without a result up to which a rank sends sums to its parents; 0: no limit
    (`topology.trees.withholding`).
    """
    look_ahead_s: float = 0.0
    """Seconds for which a rank heeds it in a round of which no result has come."""
    detours: tuple[Detour, ...] = ()
    """Auxiliary paths around hops of the trees; of one hop the fastest first."""
    leads: tuple[int, ...] = ()
    """By tree: how many slots earlier than an even sequence would have them its slots come; empty: none. A
    chunk that takes long from the leaves to the root and down again should start early.
    """
    takes_over: bool = False
    """Rounds that are under way go over to it, too: those of their chunks that no root has summed yet."""
    slow: tuple[tuple[int, int], ...] = ()
    """(source, target) that have become much slower. Chunks of which something has come to their root stay in
    trees that use none of these, even if the policy takes over; empty: all go over.
    """
    keeps_begun: bool = False
    """If it takes over: chunks of which something has come to their root stay in their trees, whatever these
    use.
    """

    def __post_init__(self) -> None:
        if self.look_ahead < 0 or not 0 <= self.look_ahead_s < math.inf:
            raise UsageError(
                f"policy {self.version} has a look-ahead of {self.look_ahead} bytes and {self.look_ahead_s} "
                "s: expected 0 (none) or more, and a finite time"
            )
        if self.version < 0:
            raise UsageError(f"policy version {self.version}: expected 0 or more")
        if not self.trees or len(self.trees) != len(self.weights):
            raise UsageError(
                f"policy {self.version} has {len(self.trees)} trees and {len(self.weights)} weights: "
                "expected as many weights as trees, and at least one"
            )
        sizes = sorted({tree.size for tree in self.trees})
        if len(sizes) > 1:
            raise UsageError(f"policy {self.version} has trees of {sizes} ranks: expected the same in all")
        if min(self.weights) < 1 or sum(self.weights) > MAX_TOTAL_WEIGHT:
            raise UsageError(
                f"policy {self.version} has weights from {min(self.weights)} up, {sum(self.weights)} in all: "
                f"expected 1 or more each, {MAX_TOTAL_WEIGHT} at most in all"
            )
        if self.leads and (len(self.leads) != len(self.trees) or min(self.leads) < 0):
            raise UsageError(
                f"policy {self.version} has {len(self.trees)} trees and leads of {list(self.leads[:16])} "
                "slots: expected one of 0 or more for each, or none"
            )
        if max(self.leads, default=0) > MAX_TOTAL_WEIGHT:
            raise UsageError(
                f"policy {self.version} has leads of up to {max(self.leads)} slots: expected "
                f"{MAX_TOTAL_WEIGHT} at most"
            )
        for pair in self.slow:
            if not all(0 <= rank < self.size for rank in pair):
                raise UsageError(
                    f"policy {self.version} says that {pair[0]}→{pair[1]} is slow: expected ranks of 0 to "
                    f"{self.size - 1}"
                )
        if self.detours:
            _check_detours(self)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.trees[0].size

    @cached_property
    def schedule(self) -> tuple[int, ...]:
        """The trees of successive slots, for one period: `sum(weights)` slots, or without leads as many of
        them as have all trees in proportion.
        """
        if self.leads:
            return staggered(self.weights, self.leads)
        divisor = math.gcd(*self.weights)
        return interleave([weight // divisor for weight in self.weights])

    def tree_of(self, slot: int) -> int:
        """Return the index of the tree for a slot, a number that the scheduler fixed for each chunk."""
        schedule = self.schedule
        return schedule[slot % len(schedule)]


class Plan:
    """One rank's part in a policy, as tables by tree index: it is read for every chunk."""

    __slots__ = (
        "_masks",
        "_period",
        "_schedule",
        "broadcast_children",
        "broadcast_parent",
        "detours",
        "everybody",
        "expected",
        "policy",
        "rank",
        "reduce_children",
        "reduce_parent",
        "root",
        "version",
    )

    def __init__(self, policy: Policy, rank: int) -> None:
        """Look up what `rank` does under `policy`.

        Raises:
            UsageError: the policy knows no such rank.
        """
        if not 0 <= rank < policy.size:
            raise UsageError(
                f"policy {policy.version} has no rank {rank}: it is for ranks 0 to {policy.size - 1}"
            )
        trees = policy.trees
        self.policy: Final = policy
        self.version: Final = policy.version
        self.rank: Final = rank
        self.root: Final = tuple(tree.root for tree in trees)
        self.reduce_parent: Final = tuple(tree.reduce_parent[rank] for tree in trees)
        """To whom the sum over this rank's subtree goes; -1: this rank is the root."""
        self.broadcast_parent: Final = tuple(tree.broadcast_parent[rank] for tree in trees)
        """From whom the result comes; -1: this rank is the root."""
        self.reduce_children: Final = tuple(tree.reduce_children[rank] for tree in trees)
        self.broadcast_children: Final = tuple(tree.broadcast_children[rank] for tree in trees)
        self.expected: Final = tuple(tree.subtree_mask[rank] for tree in trees)
        """Bit set of the contributions that make this rank's sum complete."""
        self.everybody: Final = (1 << policy.size) - 1
        """Bit set of all ranks: the contributors of a result."""
        self.detours: Final[dict[int, tuple[Detour, ...]]] = {}
        """By neighbour in a tree: other ways to it, for those that have some."""
        for detour in policy.detours:
            if detour.path[0] == rank:
                target = detour.path[-1]
                self.detours[target] = (*self.detours.get(target, ()), detour)
        self._masks: Final = tuple(tree.subtree_mask for tree in trees)
        self._schedule: Final = policy.schedule
        self._period: Final = len(policy.schedule)

    def tree_of(self, slot: int) -> int:
        """Return the index of the tree for a slot, as `Policy.tree_of` does."""
        return self._schedule[slot % self._period]

    def mask_of(self, tree: int, rank: int) -> int:
        """Return the bit set of the contributions that `rank` forwards in a tree: its reduce subtree."""
        return self._masks[tree][rank]


def _check_detours(policy: Policy) -> None:
    hops = {(rank, parent) for tree in policy.trees for rank, parent in enumerate(tree.reduce_parent)}
    hops |= {(parent, rank) for tree in policy.trees for rank, parent in enumerate(tree.broadcast_parent)}
    count: dict[tuple[int, int, bool], int] = {}
    for detour in policy.detours:
        ends = (detour.path[0], detour.path[-1])
        if max(detour.path) >= policy.size or ends not in hops:
            raise UsageError(
                f"policy {policy.version} has a detour over ranks {list(detour.path[:16])}: expected ranks "
                f"from 0 to {policy.size - 1}, and neighbours in a tree at its ends"
            )
        kind = (*ends, detour.explore)
        count[kind] = count.get(kind, 0) + 1
        most = EXPLORERS if detour.explore else DETOURS
        if count[kind] > most:
            raise UsageError(
                f"policy {policy.version} has more than {most} detours of a kind from rank {ends[0]} to "
                f"{ends[1]}: too many"
            )


def _children(parents: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
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
    reached = _leaves_first(root, _children(parents))
    if len(reached) < size:
        missing = sorted(set(range(size)) - set(reached))
        raise UsageError(
            f"{phase} parents of {shown_ranks(missing)} do not lead to the root, {root}: expected a tree"
        )
