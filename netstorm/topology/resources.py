"""The resources of a network (links and access caps), which pair of nodes uses which, and what bounds follow.

Pairs may share resources, so a plan that treats them as independent is too optimistic. All algorithms here
use the matrix A of resources by pairs: a load g on pairs is feasible if A·g ≤ C.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy import sparse

from netstorm.errors import NetStormError, Unreachable, UsageError
from netstorm.topology.network import Network, Rank, Routing, shown_ranks
from netstorm.topology.policy import Forest, Policy
from netstorm.topology.tree import Tree, transfer_delays, tree_delay
from netstorm.units import format_rate

__all__ = [
    "Floats",
    "Optimum",
    "Price",
    "Resources",
    "fluid_time",
    "optimum",
    "pair_loads",
    "with_look_ahead",
]


# The resources of a network (links and access caps), and which pair of nodes uses which.
#
# Pairs may share resources, so a plan that treats them as independent is too optimistic. All algorithms here
# use the matrix A of resources by pairs: a load g on pairs is feasible if A·g ≤ C.

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


# Size of the look-ahead: large enough to keep all links busy, and no larger.

_FACTOR: Final = 2.5
"""Multiple of the bytes in flight on idle links, if each connection has its own link. With 1.5 rounds take
2-4 % longer than without a look-ahead; with 2 to 3 they take 1 % less, in sparse networks 2 %.
"""

_FACTOR_SHARED: Final = 4
"""The same if connections share access lines, where chunks wait longer for each other: with 2 rounds take a
fifth longer than without a look-ahead; with 8 half of the gain is lost on some networks.
"""

_CHUNKS_EACH: Final = 4
"""Fewest chunks of each tree, if connections share access lines."""


def with_look_ahead(network: Network, forest: Forest, chunk_bytes: int) -> Forest:
    """Return a forest with a look-ahead; none for a single tree, in which no chunk overtakes another.

    On idle links a chunk reaches all ranks after its tree's delay, while all trees together deliver
    `rate x delay` bytes. Chunks also wait for each other, so the look-ahead is 2.5 times this product for the
    slowest tree; with shared access lines 4 times, and at least 4 chunks of each tree. If a round has no
    result after the time that these bytes take, some rank has not begun it: then it is better to send
    everything.

    Args:
        network: measured or known, not assumed.
        forest: trees and shares.
        chunk_bytes: of a full chunk.
    """
    if len(forest.trees) == 1 or network.size == 1:
        return forest
    resources = Resources.of(network)
    loads = resources.loads(pair_loads(resources, forest.trees, forest.shares))
    rate = 1 / float((8 * loads / resources.capacities).max())
    delays = transfer_delays(network, chunk_bytes)
    slowest = max(tree_delay(tree, delays) for tree in forest.trees)
    if resources.only_links:
        look_ahead = math.ceil(_FACTOR * rate * slowest)
    else:
        fewest = _CHUNKS_EACH * chunk_bytes * len(forest.trees)
        look_ahead = math.ceil(max(_FACTOR_SHARED * rate * slowest, fewest))
    return replace(forest, look_ahead=look_ahead, look_ahead_s=look_ahead / rate)


# The optimum of an all-reduce on a network: a bound that no scheme can beat, the reference in all tables.
#
# Data is a fluid here. With a super-source s and arcs s→r of capacity x_r, a broadcast at rate X needs room
# for a flow of X from s to every node within (g_B, x); Edmonds' theorem on branchings [1]_ turns such room
# into trees. The reduction is its mirror image within g_R. Both share the network: A·(g_B + g_R) ≤ C.
#
# The linear program is solved by cutting planes. By max-flow = min-cut, room for the flows means that every
# set T of nodes takes in x(T) + g_B(into T) ≥ X. We begin with few sets, solve (HiGHS), look for the sets
# that the solution violates (a minimum cut for each node), add them, and repeat. The solution for the few
# sets is an upper bound; what its worst cut lets through is achievable; we end when the two meet.
#
# References:
#     .. [1] J. Edmonds, Edge-disjoint branchings, Combinatorial Algorithms (1973); the packing of trees for
#        an all-reduce: Zhao et al., arXiv 2202.00632 (ForestColl).

_GAP: Final = 1e-4
"""Relative distance of the two bounds at which we end."""

_MOST_ROUNDS: Final = 200

_ENOUGH: Final = 1e-5
"""A cut that lacks less than this part of the rate counts as satisfied."""

_NOTHING: Final = 1e-6
"""Shares of a proof that are rounding errors of its solution."""

_MOST_NAMED: Final = 4
"""Sets and resources that a proof in words names."""

_UNIT: Final = 2**24
"""The rate X in the integers of scipy's max-flow."""


@dataclass(frozen=True, slots=True)
class Price:
    """What one resource counts in the proof of an optimum."""

    name: str
    capacity: float
    """bit/s."""
    share: float
    """Of the optimum's rate: with 1 % more of this resource the optimum is at most so many % faster."""
    latency: float
    """Least seconds of a bit on its way over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The fastest all-reduce of a tensor in the fluid model, and the proof that none is faster."""

    rate: float
    """Bit/s of the tensor."""
    seconds: float
    """For the given tensor."""
    gap: float
    """Relative error: `rate` may be too high by this much, and is not too low."""
    prices: tuple[Price, ...] = ()
    """The solution of the dual program, largest share first. If each resource costs `share * rate / capacity`
    for each bit, then every bit of a tensor that is summed costs at least 1, whatever the trees, and all
    capacities together cost `rate` a second: so no more than `rate` is summed.
    """
    sets: tuple[tuple[Rank, ...], ...] = ()
    """Sets of nodes into and out of which everything must pass, in the proof; of a set and the others, the
    smaller one."""

    @property
    def bound_s(self) -> float:
        """Seconds that no all-reduce of the given tensor takes less than."""
        return self.with_latencies(self.seconds)

    def with_latencies(self, seconds: float) -> float:
        """Return the time that takes the place of `seconds` at the optimum's rate if nothing that is sent
        over a resource is of use before its latency is over.
        """
        shares = np.array([price.share for price in self.prices])
        latencies = np.array([price.latency for price in self.prices])
        order = np.argsort(latencies)
        shares = shares[order] / shares.sum()
        # Until t a resource is of use for max(0, t - latency) seconds: of all sets the nearest ones are best.
        times = (seconds + np.cumsum(shares * latencies[order])) / np.cumsum(shares)
        return float(times.min(initial=np.inf)) if self.prices else seconds

    def reason(self) -> str:
        """Return in words, on two lines, why none is faster; empty: there is only one node."""
        if not self.prices:
            return ""
        named = ", ".join(shown_ranks(ranks) for ranks in self.sets[:_MOST_NAMED])
        if len(self.sets) > _MOST_NAMED:
            named += ", …"
        between = named if len(self.sets) == 1 else f"each of {len(self.sets)} sets ({named})"
        over = [
            f"{price.name} ({format_rate(price.capacity)}, {price.share:.0%})"
            for price in self.prices[:_MOST_NAMED]
        ]
        rest = len(self.prices) - len(over)
        more = f" and {rest} more" if rest else ""
        return f"everything must pass between {between} and the other nodes,\nover {', '.join(over)}{more}"


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
    resources = Resources.of(network)
    program = _Program(resources, network.size)
    rate, found = program.solve(gap)
    shares = program.duals * resources.capacities / rate
    latencies = _least_latencies(network, resources)
    return Optimum(
        rate=rate,
        seconds=8 * nbytes / rate,
        gap=found,
        prices=tuple(
            Price(resources.names[one], float(resources.capacities[one]), float(shares[one]), latencies[one])
            for one in np.argsort(-shares, kind="stable")
            if shares[one] > _NOTHING
        ),
        sets=program.tight_sets(),
    )


def _least_latencies(network: Network, resources: Resources) -> list[float]:
    """Return, by resource, the least latency of a pair that uses it."""
    latencies = np.array([network.link(*pair).latency for pair in resources.pairs])
    matrix = resources.matrix
    return [
        float(latencies[matrix.indices[begin:end]].min(initial=np.inf))
        for begin, end in itertools.pairwise(matrix.indptr)
    ]


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
        self.duals: Floats = np.zeros(len(self._capacities))
        """By resource, of the last solution: bit/s of the tensor for each bit/s."""
        self._weights: Floats = np.zeros(0)
        """The same of the sets."""
        self._sets: Final[list[npt.NDArray[np.bool_]]] = []
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
        from scipy.optimize import linprog

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
        duals = np.maximum(-found.ineqlin.marginals, 0.0)
        self.duals, self._weights = np.split(duals, [len(self._capacities)])
        return -float(found.fun), np.maximum(found.x, 0.0)

    def tight_sets(self) -> tuple[tuple[Rank, ...], ...]:
        """Return the sets of the last solution's proof, those that count most first."""
        weights: dict[tuple[Rank, ...], float] = {}
        for inside, weight in zip(self._sets, self._weights, strict=False):  # some came after it
            if weight > _NOTHING:
                sides = [
                    tuple(Rank(int(rank)) for rank in np.flatnonzero(side)) for side in (inside, ~inside)
                ]
                ranks = min(sides, key=lambda side: (len(side), side))
                weights[ranks] = weights.get(ranks, 0.0) + float(weight)
        return tuple(sorted(weights, key=lambda ranks: (-weights[ranks], ranks)))

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
        self._sets.append(np.array(inside, bool))
        sources, targets = (self._sources, self._targets) if phase == 0 else (self._targets, self._sources)
        into = inside[targets] & ~inside[sources]
        nothing = np.zeros(self._edges)
        flows = (-into.astype(float), nothing) if phase == 0 else (nothing, -into.astype(float))
        self._cuts.append(np.concatenate([[1.0], -inside.astype(float), *flows]))


def _minimum_cuts(
    size: int, sources: Any, targets: Any, room: Floats, x: Floats
) -> Iterator[tuple[float, npt.NDArray[np.bool_]]]:
    """Yield, for each node that cannot be sent a rate of 1, what it can be sent and the set that is short.

    A cut takes SciPy 0.6 ms of a processor in a mesh of 32, and networkx 8; an optimum needs hundreds.
    """
    from scipy.sparse import csgraph

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
    from scipy.sparse import csgraph

    steps = np.unique(rates)
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high + 1) // 2
        sources, targets = pairs[rates >= steps[middle]].T
        graph = sparse.csr_array((np.ones(len(sources)), (sources, targets)), shape=(size, size))
        parts, _ = csgraph.connected_components(graph, connection="strong")
        low, high = (middle, high) if parts == 1 else (low, middle - 1)
    return float(steps[low])
