"""The network as matrices for `packing`: computes prices of edges from prices of resources."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.topology.networks.network import Network
from netstorm.topology.trees.resources import Floats, Resources
from netstorm.topology.trees.spanning import Parents

__all__ = ["ResourcePrices"]

_EFFORTS: Final = (
    # up to how many nodes: prices of delay, sweeps, rounds of column generation
    (12, (0.01, 0.03, 0.1, 0.3), 0, 5),
    (48, (0.03, 0.3), 1, 6),
    (math.inf, (0.1,), 2, 0),
)
"""With more nodes there are more trees, and each matters less. With 0 rounds all trees of the last sweep get
the same share, and no program is solved.
"""
_EFFORTS_APART: Final = (
    (12, (0.03, 0.3), 1, 4),
    (48, (0.03,), 1, 1),
    (math.inf, (0.1,), 2, 0),
)
"""The same if the two directions have separate trees, which are twice as many."""


class ResourcePrices:
    """A network as matrices: computes prices of edges from prices of resources."""

    def __init__(self, network: Network, tensor_bytes: int, chunk_bytes: int) -> None:
        resources = Resources.of(network)
        size = network.size
        useful = resources.useful
        pairs = np.array(resources.pairs)[useful]
        self.size: Final = size
        self.chunks: Final = -(-tensor_bytes // chunk_bytes)
        self.trees: Final = 2 * size
        """Number of trees that are grown under one price of delay."""
        self.sources: Final = pairs[:, 0]
        self.targets: Final = pairs[:, 1]
        self.place: Final = np.full((size, size), -1)
        self.place[self.sources, self.targets] = np.arange(len(pairs))
        self.used: Final = _padded(resources, useful)
        """(P, most) numbers of the resources that a useful pair uses, filled up with R."""
        self.seconds: Final = 8 * tensor_bytes / resources.capacities
        """(R,) seconds of the whole tensor on a resource."""
        latencies = np.array([network.link(*resources.pairs[one]).latency for one in useful])
        self.delays: Final = np.zeros((size, size))
        """(N, N) of one chunk over an edge; 0 where there is none."""
        self.delays[self.sources, self.targets] = (
            8 * chunk_bytes / resources.pair_capacities[useful] + latencies
        )
        rates = np.zeros((size, size))
        rates[self.sources, self.targets] = resources.pair_capacities[useful]
        self.symmetric: Final = bool(np.allclose(rates, rates.T, rtol=0.02))
        self.both_delays: Final = self.delays + self.delays.T
        """(N, N) of one chunk over an edge and back."""
        self.limits: Final = self._alike() if self.symmetric else np.arange(len(self.seconds))
        """Numbers of the resources that can be the most loaded: no other one is loaded more by each tree."""
        self.delay_prices, self.sweeps, self.rounds = next(
            (prices, sweeps, rounds)
            for most, prices, sweeps, rounds in (_EFFORTS if self.symmetric else _EFFORTS_APART)
            if size <= most
        )

    def edge_prices(self, prices: Floats) -> Floats:
        """Return (N, N) the price of each edge, inf where there is none, from (R,) prices of resources.

        Where trees are the same in both directions, of an edge both ways.
        """
        edges = np.full((self.size, self.size), np.inf)
        edges[self.sources, self.targets] = self.pair_sums(prices)
        return edges + edges.T if self.symmetric else edges

    def pair_sums(self, values: Floats) -> Floats:
        """Return (P,) the sum over what each useful pair uses, from (R,) values of resources."""
        sums: Floats = np.append(values, 0.0)[self.used].sum(axis=1)
        return sums

    def loads(self, sources: Parents, targets: Parents) -> Floats:
        """Return (R,) the seconds that a tensor takes on resources when all of it crosses these pairs."""
        used = self.used[self.place[sources, targets]].ravel()
        loads: Floats = np.bincount(used, minlength=len(self.seconds) + 1)[:-1] * self.seconds
        return loads

    def _alike(self) -> npt.NDArray[np.intp]:
        """Return the slowest of each set of resources that the same pairs use, whichever way they are used.

        Trees are the same in both directions, so these are all loaded alike: mostly the two directions of a
        link, or of a node's access line.
        """
        pairs = np.minimum(self.sources, self.targets) * self.size + np.maximum(self.sources, self.targets)
        places, columns = np.nonzero(self.used < len(self.seconds))
        users: dict[int, list[int]] = {}
        for resource, pair in zip(self.used[places, columns].tolist(), pairs[places].tolist(), strict=True):
            users.setdefault(resource, []).append(pair)
        slowest: dict[tuple[int, ...], int] = {}
        for resource, used_by in users.items():
            alike = tuple(sorted(used_by))
            other = slowest.setdefault(alike, resource)
            if self.seconds[resource] > self.seconds[other]:
                slowest[alike] = resource
        return np.array(sorted(slowest.values()))


def _padded(resources: Resources, useful: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    by_pair = resources.by_pair
    starts, ends = by_pair.indptr[useful], by_pair.indptr[useful + 1]
    padded = np.full((len(useful), int((ends - starts).max())), len(resources.capacities))
    for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
        padded[place, : end - start] = by_pair.indices[start:end]
    return padded
