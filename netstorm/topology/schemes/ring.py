"""Ring all-reduce, as trees that are paths: each share of the bytes once around to its root, once back."""

from __future__ import annotations

from collections.abc import Sequence

from netstorm.errors import Unreachable
from netstorm.topology.networks.elements import Rank
from netstorm.topology.networks.network import Network
from netstorm.topology.tree import Tree
from netstorm.topology.trees.forest import Forest

__all__ = ["missing_hops", "ring", "ring_trees"]


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
