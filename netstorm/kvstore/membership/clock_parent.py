"""From whom a node has the time, if clocks are synchronised along the trees. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from netstorm.protocol.messages import Member
from netstorm.pslite.clock.source import Address
from netstorm.topology.policy import Policy

__all__ = ["clock_address", "clock_parent"]


def clock_parent(policy: Policy, rank: int) -> int | None:
    """Return whom a rank asks for the time; None: the scheduler, as every root does.

    A rank has parents in all trees, and asks the one in the tree with the largest share, the same tree for
    all: so nobody asks in a circle (arXiv 2404.11352 §VI, Fig. 5).
    """
    if any(tree.root == rank for tree in policy.trees):
        return None
    largest = max(range(len(policy.trees)), key=lambda tree: (policy.weights[tree], -tree))
    return policy.trees[largest].broadcast_parent[rank]


def clock_address(policy: Policy | None, rank: int, members: Sequence[Member]) -> Address | None:
    """Return where that is; None: at the scheduler's.

    Nodes tell the time at the UDP port whose number is that of their TCP port.
    """
    parent = None if policy is None else clock_parent(policy, rank)
    return None if parent is None else (members[parent].host, members[parent].port)
