"""A spanning tree along which chunks are reduced and broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from netstorm.errors import UsageError
from netstorm.topology.networks.elements import Rank, shown_ranks

__all__ = ["Tree", "subtree_masks"]


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
        return _children(self.reduce_parent)

    @cached_property
    def broadcast_children(self) -> tuple[tuple[int, ...], ...]:
        """By rank: the ranks to which it sends the result, in order of rank."""
        return _children(self.broadcast_parent)

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
