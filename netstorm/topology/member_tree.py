"""A tree of the whole job, contracted to the members of a process group, whose sums go along it. Pure.

A group has trees of its own over its members alone: no rank outside it adds, forwards or waits. Each is a
tree of the job's policy, in which a member's parent is the nearest member above it. Every member computes the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from netstorm.topology.tree import Tree, path_between, subtree_masks

__all__ = ["OUTSIDE", "MemberTree"]

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
        self.reduce_children: Final = _children(self.reduce_parent)
        self.broadcast_children: Final = _children(self.broadcast_parent)
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


def _children(parents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    children: list[list[int]] = [[] for _ in parents]
    for rank, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(rank)
    return tuple(map(tuple, children))
