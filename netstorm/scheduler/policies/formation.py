"""Requests to form a policy and results: messages between the scheduler and its formation process."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from netstorm.scheduler.awareness.network_estimate import NetworkEstimate
from netstorm.topology.network import RATE, Link, Network, Node, Routing
from netstorm.topology.policy import Options, Policy
from netstorm.topology.tree import MemberTree, Tree

__all__ = ["FormationRequest", "FormationResult", "tree_pairs"]

_MOST_ERROR: Final = 0.5
"""Larger errors are drawn as this one, since half of a log-normal's draws would be off by even more."""


class FormationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Form a policy, and compare it with the one in force."""

    number: int
    """The result has the same number."""
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    errors: tuple[float, ...]
    """Standard errors of the rates, as fractions, by link."""
    cap_error: float
    """Standard error of access caps, as a fraction."""
    routing: Routing
    topology: str
    options: Options
    in_force: Policy
    frozen: Policy | None = None
    """Keep the roots of this policy and their shares."""

    @classmethod
    def of(
        cls,
        estimate: NetworkEstimate,
        *,
        number: int,
        topology: str,
        options: Options,
        in_force: Policy,
        frozen: Policy | None = None,
    ) -> FormationRequest:
        """Ask for a policy for a network estimate; `frozen`: keep the roots of this policy."""
        network = estimate.network
        return cls(
            number=number,
            nodes=network.nodes,
            links=network.links,
            errors=estimate.errors,
            cap_error=estimate.cap_error,
            routing=network.routing,
            topology=topology,
            options=options,
            in_force=in_force,
            frozen=frozen,
        )

    def network(self) -> Network:
        """Return the estimated network."""
        return Network(nodes=self.nodes, links=self.links, routing=self.routing)

    def drawn_network(self, draw: random.Random) -> Network:
        """Return a random network within the errors of the estimate."""

        def drawn(value: float, error: float) -> float:
            return min(max(value * math.exp(draw.gauss(0.0, min(error, _MOST_ERROR))), RATE.least), RATE.most)

        def cap(value: float | None) -> float | None:
            return None if value is None else drawn(value, self.cap_error)

        return Network(
            nodes=tuple(
                replace(node, egress=cap(node.egress), ingress=cap(node.ingress)) for node in self.nodes
            ),
            links=tuple(
                replace(link, rate=drawn(link.rate, error))
                for link, error in zip(self.links, self.errors, strict=True)
            ),
            routing=self.routing,
        )


class FormationResult(msgspec.Struct, frozen=True, kw_only=True):
    """A formed policy, and how it compares with the one in force."""

    number: int
    policy: Policy | None = None
    """None: there is none; `problem` says why."""
    problem: str = ""
    only_detours: bool = False
    """The trees are those of the policy in force, the auxiliary paths are not. Nothing is predicted."""
    seconds: float = 0.0
    """Predicted round time with the new policy."""
    seconds_before: float = 0.0
    """The same with the one in force; infinite: it uses a link that is gone."""
    doubt: float = 0.0
    """Standard deviation of log(before / new) over networks drawn within the errors of the estimate."""
    gain: float = 0.0
    """Mean of log(before / new) over them."""
    took_s: float = 0.0
    """Seconds that the formation took, measured by the caller."""


def tree_pairs(policy: Policy) -> frozenset[tuple[int, int]]:
    """Return the (source, target) pairs that a policy's trees use, between the members of the job."""
    ranks = policy.members or range(policy.size)
    trees: Sequence[Tree | MemberTree] = policy.trees
    if policy.members:
        trees = [MemberTree(tree, policy.members) for tree in policy.trees]
    return frozenset(
        pair
        for tree in trees
        for rank in ranks
        if rank != tree.root
        for pair in ((rank, tree.reduce_parent[rank]), (tree.broadcast_parent[rank], rank))
    )
