"""The resources of a network (links and access caps), and which pair of nodes uses which.

Pairs may share resources, so a plan that treats them as independent is too optimistic. All algorithms here
use the matrix A of resources by pairs: a load g on pairs is feasible if A·g ≤ C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from netstorm.errors import UsageError
from netstorm.topology.networks.network import Network, Rank, Routing
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree

__all__ = ["Floats", "Resources", "fluid_time", "pair_loads"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Resources:
    """The resource matrix of a network. R resources, P pairs."""

    capacities: Floats
    """(R,) goodput in bit/s: rate less loss. Links in order of their ends, then egress caps, then ingress."""
    names: tuple[str, ...]
    """By resource, for messages."""
    pairs: tuple[tuple[Rank, Rank], ...]
    """All (source, target) that may talk, in order."""
    only_links: bool
    """Whether no node has an access cap."""
    matrix: Any
    """(R, P) scipy.sparse.csr_array: 1 where a pair uses a resource."""

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, network: Network) -> Resources:
        """Return the resources of a network as it is at its start. O(P · hops).

        The last results are cached, since planning asks again and again; callers must not change them.
        """
        pairs = network.pairs()
        number = {(link.source, link.target): index for index, link in enumerate(network.links)}
        capacities = [link.rate * (1.0 - link.loss) for link in network.links]
        names = [str(link) for link in network.links]
        rows: list[int] = []
        columns: list[int] = []
        if network.routing is Routing.OVERLAY:
            rows, columns = list(range(len(pairs))), list(range(len(pairs)))
        else:
            for column, pair in enumerate(pairs):
                for link in network.route(*pair):
                    rows.append(number[link.source, link.target])
                    columns.append(column)
        for end, word in enumerate(("egress", "ingress")):
            by_rank: list[list[int]] = [[] for _ in network.nodes]
            for column, pair in enumerate(pairs):
                by_rank[pair[end]].append(column)
            for node in network.nodes:
                cap = node.egress if end == 0 else node.ingress
                if cap is None:
                    continue
                using = by_rank[node.rank]
                rows += [len(capacities)] * len(using)
                columns += using
                capacities.append(cap)
                names.append(f"{word} of rank {node.rank}")
        matrix = sparse.csr_array(
            (np.ones(len(rows)), (rows, columns)), shape=(len(capacities), len(pairs)), dtype=np.float64
        )
        return cls(
            capacities=np.array(capacities, np.float64),
            names=tuple(names),
            pairs=pairs,
            only_links=len(capacities) == len(network.links),
            matrix=matrix,
        )

    @cached_property
    def index(self) -> Mapping[tuple[int, int], int]:
        """The place of each pair in `pairs`."""
        return {pair: place for place, pair in enumerate(self.pairs)}

    @cached_property
    def by_pair(self) -> Any:
        """(P, R) scipy.sparse.csr_array: the matrix, transposed."""
        return sparse.csr_array(self.matrix.T)

    @cached_property
    def pair_capacities(self) -> Floats:
        """(P,) bit/s of each pair while nothing else is sent."""
        by_pair = self.by_pair
        if not self.pairs:
            return np.zeros(0)
        least: Floats = np.minimum.reduceat(self.capacities[by_pair.indices], by_pair.indptr[:-1])
        return least

    def used_by(self, pair: tuple[int, int]) -> tuple[int, ...]:
        """Return the numbers of the resources that a pair uses."""
        place = self.place(pair)
        by_pair = self.by_pair
        return tuple(int(one) for one in by_pair.indices[by_pair.indptr[place] : by_pair.indptr[place + 1]])

    @cached_property
    def useful(self) -> npt.NDArray[np.intp]:
        """Places of the pairs that a plan needs. Without access caps these are the pairs with a link.

        A routed pair passes the nodes on its route: to stop at them uses the same links, and aggregates.
        """
        hops = np.diff(self.by_pair.indptr)
        return np.flatnonzero(hops <= 1) if self.only_links else np.arange(len(self.pairs))

    def loads(self, volumes: Floats) -> Floats:
        """Return (R,) the loads on resources of (P,) volumes on pairs."""
        loads: Floats = self.matrix @ volumes
        return loads

    def place(self, pair: tuple[int, int]) -> int:
        """Return the place of a pair in `pairs`.

        Raises:
            UsageError: the two may not communicate directly.
        """
        place = self.index.get(pair)
        if place is None:
            raise UsageError(f"ranks {pair[0]} and {pair[1]} may not talk directly in this network")
        return place


def pair_loads(resources: Resources, trees: Sequence[Tree], shares: Sequence[float]) -> Floats:
    """Return (P,) the volume on each pair, in units of the tensor, when trees carry it in these shares.

    Raises:
        UsageError: a tree has an edge between ranks that may not talk.
    """
    volumes = np.zeros(len(resources.pairs))
    total = sum(shares)
    for tree, share in zip(trees, shares, strict=True):
        for rank in range(tree.size):
            if rank != tree.root:
                volumes[resources.place((rank, tree.reduce_parent[rank]))] += share / total
                volumes[resources.place((tree.broadcast_parent[rank], rank))] += share / total
    return volumes


def fluid_time(resources: Resources, policy: Policy, nbytes: float) -> float:
    """Return the seconds of a tensor under a policy in the fluid model: no chunks, no latency.

    This is the load of the most loaded resource over its capacity; no schedule of these trees is faster.
    """
    loads = resources.loads(pair_loads(resources, policy.trees, policy.weights))
    return float((loads / resources.capacities).max(initial=0.0)) * 8 * nbytes
