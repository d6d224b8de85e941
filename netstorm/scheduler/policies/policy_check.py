"""Which policies a job may have. Pure."""

from __future__ import annotations

from netstorm.errors import UsageError
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree

__all__ = ["check_policy", "placeholder_policy"]


def check_policy(policy: Policy, *, nodes: int, after: int) -> None:
    """Check that a policy can follow version `after` in a job of so many nodes.

    Raises:
        UsageError: it cannot.
    """
    if policy.size != nodes:
        raise UsageError(f"a policy for {policy.size} nodes in a job of {nodes} (DMLC_NUM_WORKER)")
    if policy.version <= after:
        raise UsageError(f"policy version {policy.version} is not newer than version {after}, now in force")


def placeholder_policy(nodes: int) -> Policy:
    """Return a star that stands for a policy until one is formed."""
    parents = tuple(-1 if rank == 0 else 0 for rank in range(nodes))
    tree = Tree.undirected(Rank(0), parents)
    return Policy(version=0, trees=(tree,), weights=(1,), reason="no policy has been formed yet")
