"""The optimum of an all-reduce on a network: a bound that no scheme can beat, the reference in all tables.

Data is a fluid here. With a super-source s and arcs s→r of capacity x_r, a broadcast at rate X needs
room for a flow of X from s to every node within (g_B, x); Edmonds' theorem on branchings [1]_ turns such room
into trees. The reduction is its mirror image within g_R. Both share the network: A·(g_B + g_R) ≤ C.

The linear program is solved by cutting planes. By max-flow = min-cut, room for the flows means that every set
T of nodes takes in x(T) + g_B(into T) ≥ X. We begin with few sets, solve (HiGHS), look for the sets that the
solution violates (a minimum cut for each node), add them, and repeat. The solution
for the few sets is an upper bound; what its worst cut lets through is achievable; we end when the two meet.

References:
    .. [1] J. Edmonds, Edge-disjoint branchings, Combinatorial Algorithms (1973); the packing of trees for an
       all-reduce: Zhao et al., arXiv 2202.00632 (ForestColl).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import linprog
from scipy.sparse import csgraph

from netstorm.errors import NetStormError, Unreachable
from netstorm.topology.networks.network import Network
from netstorm.topology.trees.resources import Floats, Resources

__all__ = ["Optimum", "latency_bound", "optimum"]

_GAP: Final = 1e-4
"""Relative distance of the two bounds at which we end."""

_MOST_ROUNDS: Final = 200

_ENOUGH: Final = 1e-5
"""A cut that lacks less than this part of the rate counts as satisfied."""

_UNIT: Final = 2**24
"""The rate X in the integers of scipy's max-flow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The fastest all-reduce of a tensor in the fluid model, and what bounds it."""

    rate: float
    """Bit/s of the tensor."""
    seconds: float
    """For the given tensor."""
    gap: float
    """Relative error: `rate` may be too high by this much, and is not too low."""


def optimum(network: Network, nbytes: float, *, gap: float = _GAP) -> Optimum:
    """Return the optimum of a network as it is at its start.

    Args:
        network: links, routes and access caps.
        nbytes: size of the tensor.
        gap: how far above what is achievable the result may be.

    Raises:
        Unreachable: some rank has no path to another.
    """
    parts = network.separated()
    if parts is not None:
        raise Unreachable(f"there is no path from ranks {parts[0]} to ranks {parts[1]}")
    if network.size == 1:
        return Optimum(rate=float("inf"), seconds=0.0, gap=0.0)
    rate, found = _Program(Resources.of(network), network.size).solve(gap)
    return Optimum(rate=rate, seconds=8 * nbytes / rate, gap=found)


class _Program:
    """The linear program. Variables: X, x_r by rank, g_B and g_R by pair, in the narrowest cut's rate."""

    def __init__(self, resources: Resources, size: int) -> None:
        self._size: Final = size
        useful = resources.useful
        pairs = np.array(resources.pairs)[useful]
        self._sources: Final = pairs[:, 0]
        self._targets: Final = pairs[:, 1]
        self._edges: Final = len(pairs)
        # HiGHS's tolerances are absolute: one slow line among fast ones would be lost in them. No X is above
        # N²/4 pairs of the narrowest cut, and no resource carries more than 2(N - 1) X.
        self._scale: Final = _narrowest(size, pairs, resources.pair_capacities[useful])
        self._capacities: Final = np.minimum(resources.capacities / self._scale, size**3 / 2)
        matrix = sparse.csr_array(resources.matrix[:, useful])
        self._by_pair: Final[Any] = sparse.csr_array(matrix.T)
        rows = matrix.shape[0]
        self._limits: Final[Any] = sparse.hstack([sparse.csr_array((rows, 1 + size)), matrix, matrix], "csr")
        self._cuts: list[Floats] = []
        self._known: set[tuple[int, bytes]] = set()
        for rank in range(size):
            inside = np.zeros(size, bool)
            inside[rank] = True
            for phase in (0, 1):
                self._add(phase, inside)
                self._add(phase, ~inside)

    def solve(self, gap: float) -> tuple[float, float]:
        """Return the rate in bit/s, from above, and the relative gap.

        Sets are looked for half-way between the program's solution, a corner that promises too much, and the
        best point so far: those cut off more (in-out separation [1]_).

        References:
            .. [1] Ben-Ameur and Neto, Acceleration of cutting-plane and column generation algorithms,
               Networks 49 (2007).
        """
        best, inner, rate = 0.0, self._central(), float("inf")
        for _ in range(_MOST_ROUNDS):
            rate, corner = self._relaxed()
            if rate <= best * (1 + gap):
                break
            for point in ((corner + inner) / 2, corner):
                before = len(self._cuts)
                achieved = self._separate(point)
                if achieved > best:
                    best, inner = achieved, point
                if len(self._cuts) > before:
                    break
        return rate * self._scale, rate / best - 1 if best else float("inf")

    def _central(self) -> Floats:
        """Return a point to begin with: the same part of every pair's capacity, the same for every root."""
        pairs = np.minimum.reduceat(self._capacities[self._by_pair.indices], self._by_pair.indptr[:-1])
        used = self._limits[:, 1 + self._size : 1 + self._size + self._edges] @ pairs
        pairs = pairs / (2 * (used / self._capacities).max())
        roots = np.full(self._size, 1 / self._size)
        return np.concatenate([[1.0], roots, pairs, pairs])

    def _relaxed(self) -> tuple[float, Floats]:
        count = 1 + self._size + 2 * self._edges
        objective = np.zeros(count)
        objective[0] = -1.0
        total = np.zeros((1, count))
        total[0, 0], total[0, 1 : 1 + self._size] = -1.0, 1.0
        cuts = sparse.csr_array(np.array(self._cuts))
        found = linprog(
            objective,
            A_ub=sparse.vstack([self._limits, cuts], "csr"),
            b_ub=np.concatenate([self._capacities, np.zeros(len(self._cuts))]),
            A_eq=total,
            b_eq=[0.0],
            method="highs",
        )
        if found.status != 0:
            raise NetStormError(f"the linear program of the optimum was not solved: {found.message}")
        return -float(found.fun), np.maximum(found.x, 0.0)

    def _separate(self, point: Floats) -> float:
        """Add the sets that take in less than the point's rate; return the least that any takes in."""
        rate = float(point[0])
        x = point[1 : 1 + self._size] / rate
        broadcast, reduce = np.split(point[1 + self._size :] / rate, 2)
        least = 1.0
        for phase, sources, targets, room in (
            (0, self._sources, self._targets, broadcast),
            (1, self._targets, self._sources, reduce),
        ):
            for value, inside in _minimum_cuts(self._size, sources, targets, room, x):
                least = min(least, value)
                self._add(phase, inside)
        return rate * least

    def _add(self, phase: int, inside: Any) -> None:
        """Require that set `inside` takes in X: X - x(T) - g(into T) ≤ 0. In phase 1 edges turn round."""
        name = (phase, inside.tobytes())
        if name in self._known:
            return
        self._known.add(name)
        sources, targets = (self._sources, self._targets) if phase == 0 else (self._targets, self._sources)
        into = inside[targets] & ~inside[sources]
        nothing = np.zeros(self._edges)
        flows = (-into.astype(float), nothing) if phase == 0 else (nothing, -into.astype(float))
        self._cuts.append(np.concatenate([[1.0], -inside.astype(float), *flows]))


def _minimum_cuts(
    size: int, sources: Any, targets: Any, room: Floats, x: Floats
) -> Iterator[tuple[float, npt.NDArray[np.bool_]]]:
    """Yield, for each node that cannot be sent a rate of 1, what it can be sent and the set that is short."""
    tails = np.concatenate([sources, np.full(size, size)])
    heads = np.concatenate([targets, np.arange(size)])
    units = np.floor(np.minimum(np.concatenate([room, x]), 1.0) * _UNIT).astype(np.int32)
    graph = sparse.csr_array((units, (tails, heads)), shape=(size + 1, size + 1))
    graph.eliminate_zeros()
    for node in range(size):
        found = csgraph.maximum_flow(graph, size, node)
        value = found.flow_value / _UNIT
        if value >= 1 - _ENOUGH:
            continue
        left = sparse.csr_array(graph - found.flow)
        left.eliminate_zeros()
        reached = csgraph.breadth_first_order(left, size, return_predecessors=False)
        inside = np.ones(size + 1, bool)
        inside[reached] = False
        yield value, inside[:size]


def _narrowest(size: int, pairs: npt.NDArray[np.intp], rates: Floats) -> float:
    """Return the highest rate such that all ranks reach each other over pairs that are as fast."""
    steps = np.unique(rates)
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high + 1) // 2
        sources, targets = pairs[rates >= steps[middle]].T
        graph = sparse.csr_array((np.ones(len(sources)), (sources, targets)), shape=(size, size))
        parts, _ = csgraph.connected_components(graph, connection="strong")
        low, high = (middle, high) if parts == 1 else (low, middle - 1)
    return float(steps[low])


def latency_bound(network: Network, nbytes: float) -> float:
    """Return seconds that no all-reduce of a tensor can take less than, latencies included.

    Rank b needs what rank a contributes: all of a tensor leaves a, as much enters b, and its last bit is on
    its way for the least latency of any path between them. So it takes that latency and the longer of the
    two times. For small tensors this is the higher bound; for large ones `optimum` is.
    """
    size = network.size
    if size == 1:
        return 0.0
    resources = Resources.of(network)
    pairs = np.array(resources.pairs)
    latencies = np.array([network.link(*pair).latency for pair in resources.pairs])
    # csgraph takes a stored zero for no edge.
    graph = sparse.csr_array((latencies + 1e-12, (pairs[:, 0], pairs[:, 1])), shape=(size, size))
    away = csgraph.shortest_path(graph)
    out, into = np.zeros(size), np.zeros(size)
    np.add.at(out, pairs[:, 0], resources.pair_capacities)
    np.add.at(into, pairs[:, 1], resources.pair_capacities)
    for node in network.nodes:
        out[node.rank] = min(out[node.rank], node.egress or np.inf)
        into[node.rank] = min(into[node.rank], node.ingress or np.inf)
    slower = np.minimum(out[:, None], into[None, :])
    times = away + 8 * nbytes / slower
    np.fill_diagonal(times, 0.0)
    return float(times.max())
