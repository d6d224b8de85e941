"""Owners in asynchronous training: their weights, and the paths to them. Pure functions of a policy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from netstorm.topology.member_tree import MemberTree
from netstorm.topology.networks.hops import next_hops
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree

__all__ = ["owner_weights", "paths_from"]


def owner_weights(policy: Policy) -> tuple[int, ...]:
    """Return each rank's weight as an owner: the share of the trees of which it is the root, in lowest terms.

    The shares of the roots suit the links. Ranks that are no root own nothing.
    """
    weights = [0] * policy.size
    for tree, weight in zip(policy.trees, policy.weights, strict=True):
        weights[tree.root] += weight
    divisor = math.gcd(*weights)
    return tuple(weight // divisor for weight in weights)


def paths_from(policy: Policy, rank: int) -> tuple[tuple[int, ...], ...]:
    """Return, by target, the path of fewest hops from `rank`, over pairs that the policy's trees use.

    Only those pairs are sure to be linked. Both ends are on a path; `rank`'s own is that alone. Ranks
    that are not in the job are on no path, and the path to one is empty.
    """
    targets: list[set[int]] = [set() for _ in range(policy.size)]
    trees: Sequence[Tree | MemberTree] = policy.trees
    if policy.members:
        trees = [MemberTree(tree, policy.members) for tree in policy.trees]
    for tree in trees:
        for node, parent in enumerate(tree.reduce_parent):
            if parent >= 0:
                targets[node].add(parent)
        for node, parent in enumerate(tree.broadcast_parent):
            if parent >= 0:
                targets[parent].add(node)
    hops = next_hops([sorted(ends) for ends in targets])
    paths = []
    for target in range(policy.size):
        path = [rank]
        while path[-1] not in (target, -1):
            path.append(hops[target][path[-1]])
        paths.append(() if path[-1] < 0 else tuple(path))
    return tuple(paths)
