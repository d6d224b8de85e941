"""A balanced tree in order of rank, whatever the links are: MLNET's shape."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from netstorm.errors import Unreachable, UsageError
from netstorm.topology.networks.elements import Rank, shown_ranks
from netstorm.topology.networks.network import Network
from netstorm.topology.tree import Tree
from netstorm.topology.trees.forest import Forest

__all__ = ["balanced"]


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
    if degree < 1:
        raise UsageError(f"degree {degree}: expected at least 1, the most children that a rank has")
    targets: list[list[int]] = [list(network.neighbours(rank)) for rank in network.ranks]
    sources: list[list[int]] = [[] for _ in network.ranks]
    for source, target in network.pairs():
        sources[target].append(source)
    both = [sorted({*targets[rank]} & {*sources[rank]}) for rank in network.ranks]
    up = down = _grow(both, degree)
    if _left(up):  # not all ranks can be reached over links that lead both ways
        up, down = _grow(sources, degree), _grow(targets, degree)
    for parents, direction in ((up, "to"), (down, "from")):
        if _left(parents):
            raise Unreachable(f"there is no path {direction} rank 0 for {shown_ranks(_left(parents))}")
    most = max(up.count(rank) for rank in network.ranks)
    return Forest(
        trees=(Tree(root=Rank(0), reduce_parent=tuple(up), broadcast_parent=tuple(down)),),
        shares=(1.0,),
        reason=f"balanced: a tree of degree {degree} in order of rank"
        + (f"; for want of links a rank has {most} children" if most > degree else ""),
    )


def _left(parents: Sequence[int]) -> list[int]:
    return [rank for rank, parent in enumerate(parents) if parent < 0 and rank != 0]


def _grow(neighbours: Sequence[Sequence[int]], degree: int) -> list[int]:
    """Return parents of a tree rooted at 0, as far as neighbours reach (-1: not placed)."""
    parents = [-1] * len(neighbours)
    children = [0] * len(neighbours)
    placed = [0]
    waiting = deque(placed)

    def place(rank: int, parent: int) -> None:
        parents[rank] = parent
        children[parent] += 1
        placed.append(rank)
        waiting.append(rank)

    while True:
        while waiting:
            node = waiting.popleft()
            free = [rank for rank in neighbours[node] if rank != 0 and parents[rank] < 0]
            for rank in free[: max(0, degree - children[node])]:
                place(rank, node)
        # min keeps the first of equals, the one placed earliest, which is the nearest to the root.
        candidates = [
            (node, rank) for node in placed for rank in neighbours[node] if rank != 0 and parents[rank] < 0
        ]
        if not candidates:
            return parents
        node, rank = min(candidates, key=lambda pair: children[pair[0]])
        place(rank, node)
