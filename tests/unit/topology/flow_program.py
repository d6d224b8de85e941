"""Oracles written apart from the product: the optimum as one program of flows, and loads counted by hand."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import numpy as np
from scipy.optimize import linprog

from netstorm.topology import Network, Policy, Rank

__all__ = ["capacity", "flow_rate", "loads", "users"]

Resource = tuple[str, int, int]


def users(network: Network, source: int, target: int) -> list[Resource]:
    """Return what a pair uses: links under it, and the access lines of its ends if they are capped."""
    used = [
        ("link", int(link.source), int(link.target)) for link in network.route(Rank(source), Rank(target))
    ]
    if network.nodes[source].egress is not None:
        used.append(("egress", source, source))
    if network.nodes[target].ingress is not None:
        used.append(("ingress", target, target))
    return used


def capacity(network: Network, resource: Resource) -> float:
    """Return the goodput of a resource in bit/s."""
    kind, source, target = resource
    if kind == "link":
        (link,) = [link for link in network.links if (link.source, link.target) == (source, target)]
        return link.rate * (1 - link.loss)
    cap = network.nodes[source].egress if kind == "egress" else network.nodes[source].ingress
    assert cap is not None
    return cap


def loads(network: Network, policy: Policy) -> dict[Resource, Fraction]:
    """Return what a policy puts on each resource, in tensors."""
    found: dict[Resource, Fraction] = defaultdict(Fraction)
    for tree, weight in zip(policy.trees, policy.weights, strict=True):
        share = Fraction(weight, sum(policy.weights))
        for rank in network.ranks:
            if rank != tree.root:
                for resource in users(network, rank, tree.reduce_parent[rank]):
                    found[resource] += share
                for resource in users(network, tree.broadcast_parent[rank], rank):
                    found[resource] += share
    return found


def flow_rate(network: Network, about: float) -> float:
    """Return the best rate of an all-reduce in bit/s: the largest X such that a broadcast from roots of
    shares x has room for a flow of X to each rank, and a reduction for a flow of X from each.

    2N flows. `about` is only the unit, since a solver's tolerances are absolute; limits are no use beyond
    ten thousand of it.
    """
    pairs, size = network.pairs(), network.size
    resources = sorted({one for pair in pairs for one in users(network, *pair)})
    edges = len(pairs)
    each = edges + size  # a flow: on pairs, and on the arcs between the super-source and roots
    first = 1 + size + 2 * edges
    width = first + 2 * size * each
    unequal, bounds, equal, values = [], [], [], []
    for one in resources:
        row = np.zeros(width)
        for place, pair in enumerate(pairs):
            if one in users(network, *pair):
                row[1 + size + place] = row[1 + size + edges + place] = 1
        unequal.append(row)
        bounds.append(min(capacity(network, one) / about, 1e4))
    for phase in (0, 1):
        for rank in range(size):
            flow = first + (phase * size + rank) * each
            for place in range(each):  # at most what is there for all flows of the phase
                row = np.zeros(width)
                row[flow + place] = 1
                row[1 + size + phase * edges + place if place < edges else 1 + place - edges] = -1
                unequal.append(row)
                bounds.append(0.0)
            for node in range(size):  # what enters leaves, but X stays at `rank` (or begins there)
                row = np.zeros(width)
                row[flow + edges + node] = 1
                for place, (source, target) in enumerate(pairs):
                    into, out = (target, source) if phase == 0 else (source, target)
                    row[flow + place] += (into == node) - (out == node)
                row[0] = -1.0 if node == rank else 0.0
                equal.append(row)
                values.append(0.0)
    row = np.zeros(width)
    row[0], row[1 : 1 + size] = -1, 1
    objective = np.zeros(width)
    objective[0] = -1
    found = linprog(
        objective,
        A_ub=np.array(unequal),
        b_ub=bounds,
        A_eq=np.array([*equal, row]),
        b_eq=[*values, 0.0],
        method="highs",
    )
    assert found.status == 0, found.message
    return float(-found.fun) * about
