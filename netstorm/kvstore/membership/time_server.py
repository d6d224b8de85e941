"""Which time server a node asks, if clocks are synchronised along the trees (NETSTORM_CLOCK=trees). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from netstorm.protocol.messages import Member
from netstorm.pslite.clock.source import Address
from netstorm.topology.policy import Policy

__all__ = ["time_server_address", "time_server_rank"]


def time_server_rank(policy: Policy, rank: int) -> int | None:
    """Return which rank to ask for the time; None: the scheduler, which every root asks.

    A rank has a parent in each tree. All ranks ask their parent in the tree with the largest share, so no two
    ranks ask each other in a circle (arXiv 2404.11352 §VI, Fig. 5).
    """
    if any(tree.root == rank for tree in policy.trees):
        return None
    largest = max(range(len(policy.trees)), key=lambda tree: (policy.weights[tree], -tree))
    return policy.trees[largest].broadcast_parent[rank]


def time_server_address(policy: Policy | None, rank: int, members: Sequence[Member]) -> Address | None:
    """Return the address of that rank's time server; None: the scheduler's.

    A node serves the time at the UDP port whose number is that of its TCP port.
    """
    server = None if policy is None else time_server_rank(policy, rank)
    return None if server is None else (members[server].host, members[server].port)
