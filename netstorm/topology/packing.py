"""Packing: many trees that together use the whole network, most of which `fapt` leaves idle.

1. Candidates. Trees are grown one after the other under prices that rise with the load of a resource, then
   each is taken out and grown anew (best response), for several prices of delay: some trees follow capacity
   alone, some stay shallow.
2. Shares. A linear program (HiGHS) gives the shares x of all candidates: it minimises the fluid time of the
   tensor (the load of the most loaded resource) plus the mean delay of trees, 2 · Σ x · delay. So a large
   tensor gets the widest trees and a small one the fastest.
3. Better candidates. The program's prices tell which resources are scarce; trees grown under them join, and
   it is solved again (column generation [1]_), while that helps. Prices jump from one solution to the next,
   so trees are grown under the mean of the last ones and those before (smoothing [2]_).

Where links are equal in both directions, reduce and broadcast use one undirected tree, which loses nothing.
Where they are not, the two are grown apart: shares must only agree at each root.

References:
    .. [1] Barahona, Packing spanning trees, Mathematics of Operations Research 20 (1995).
    .. [2] Wentges, Weighted Dantzig-Wolfe decomposition for linear mixed-integer programming, International
       Transactions in Operational Research 4 (1997).
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from netstorm.errors import NetStormError, Unreachable
from netstorm.topology.network import RATE, Network, Rank
from netstorm.topology.policy import Forest, Options
from netstorm.topology.prediction import predict, prediction_work
from netstorm.topology.resources import Floats, Resources, with_look_ahead
from netstorm.topology.tree import CHUNK_BYTES, Tree
from netstorm.units import format_duration

__all__ = [
    "PredictedPacking",
    "ResourcePrices",
    "Solution",
    "arborescence",
    "best_packing",
    "centred",
    "grow",
    "packing",
    "packings",
    "path_delays",
    "whole_chunks",
]


# The linear program of `packing`: candidate trees are its columns, and their shares its solution.

_KEPT: Final = 3
"""Most candidates, relative to the number that have a share: each makes the program slower."""

_SMALLEST_SHARE: Final = 1e-3
"""A smaller share is dropped if it is also less than a tenth of the mean share."""

_WHOLE_CHUNKS: Final = 2000
"""With more chunks, one chunk more or less does not matter, and shares need not be whole."""


class _Use(enum.IntEnum):
    """The direction for which a column can be used."""

    BOTH = 0
    REDUCE = 1
    BROADCAST = 2


@dataclass(frozen=True, slots=True)
class _TreeColumn:
    """A tree in the linear program: for one direction, or the same tree for both."""

    use: _Use
    root: int
    parents: tuple[int, ...]
    delay: float
    load: Floats = field(repr=False)
    """Load on `ResourcePrices.limits`."""

    @property
    def name(self) -> tuple[_Use, int, tuple[int, ...]]:
        """A key that identifies the column."""
        return self.use, self.root, self.parents


@dataclass(frozen=True, slots=True)
class Solution:
    """What the linear program found."""

    objective: float
    shares: Floats
    """By column."""
    delay_counts: float
    """The price of delay that it was solved with."""
    prices: Floats
    """(R,) of one second more on a resource."""
    worths: Floats
    """(N + 1,) of one share more to broadcast from a root, and of the tensor."""


class Columns:
    """All candidates, and the linear program over them."""

    def __init__(self, pricing: ResourcePrices) -> None:
        self._pricing: Final = pricing
        self._columns: list[_TreeColumn] = []
        self._known: set[tuple[_Use, int, tuple[int, ...]]] = set()

    def add(self, root: int, up: Parents, down: Parents) -> Floats:
        """Add a reduce tree and a broadcast tree with a common root; return (R,) the sum of their loads."""
        if up is down:
            return self._add(_Use.BOTH, root, up)
        return self._add(_Use.REDUCE, root, up) + self._add(_Use.BROADCAST, root, down)

    def _add(self, use: _Use, root: int, parents: Parents) -> Floats:
        pricing = self._pricing
        nodes = np.flatnonzero(parents >= 0)
        above = parents[nodes]
        if use is _Use.BOTH:
            load = pricing.loads(np.concatenate((nodes, above)), np.concatenate((above, nodes)))
        else:
            load = pricing.loads(*((nodes, above) if use is _Use.REDUCE else (above, nodes)))
        if not pricing.rounds:  # no program is solved, and all loads of 512 nodes are 6 GB
            return load
        name = (use, root, tuple(parents.tolist()))
        if name not in self._known:
            self._known.add(name)
            delay = 0.0
            if use is not _Use.BROADCAST:
                delay += max(path_delays(parents, pricing.delays.T))
            if use is not _Use.REDUCE:
                delay += max(path_delays(parents, pricing.delays))
            self._columns.append(_TreeColumn(*name, delay, load[pricing.limits]))
        return load

    def solve(self, delay_counts: float) -> Solution:
        """Return the best shares of the candidates; `delay_counts` is the cost of a second of mean delay."""
        count, rows = len(self._columns), len(self._pricing.limits)
        total = np.zeros(self._pricing.size + 1)
        total[-1] = 1.0
        found = linprog(
            [*(delay_counts * column.delay for column in self._columns), 1.0],
            # Dense: SciPy takes longer to stack sparse matrices than to skip zeros.
            A_ub=np.array([*(column.load for column in self._columns), np.full(rows, -1.0)]).T,
            b_ub=np.zeros(rows),
            A_eq=np.append(self._agreement(), np.zeros((len(total), 1)), axis=1),
            b_eq=total,
            method="highs",
            options={"presolve": False},  # it takes longer than it saves
        )
        if found.status != 0:
            raise NetStormError(f"the linear program of the packing was not solved: {found.message}")
        prices = np.zeros(len(self._pricing.seconds))
        prices[self._pricing.limits] = -np.asarray(found.ineqlin.marginals)
        return Solution(
            objective=float(found.fun),
            shares=np.maximum(found.x[:count], 0.0),
            prices=prices,
            delay_counts=delay_counts,
            worths=np.asarray(found.eqlin.marginals),
        )

    def _agreement(self) -> Floats:
        """Return (N + 1, columns) constraints: each root broadcasts what it reduces; shares sum to 1."""
        size = self._pricing.size
        agree = np.zeros((size + 1, len(self._columns)))
        uses = np.array([column.use for column in self._columns])
        roots = np.array([column.root for column in self._columns])
        for use, sign in ((_Use.REDUCE, 1.0), (_Use.BROADCAST, -1.0)):
            (places,) = np.nonzero(uses == use)
            agree[roots[places], places] = sign
        agree[size] = uses != _Use.BROADCAST
        return agree

    def narrow(self, solution: Solution) -> None:
        """Keep the candidates with a share, and the cheapest others at the program's prices."""
        used = np.flatnonzero(solution.shares)
        most = _KEPT * len(used)
        if len(self._columns) <= most:
            return
        prices = solution.prices[self._pricing.limits]
        costs = np.array([column.load for column in self._columns]) @ prices
        costs += solution.delay_counts * np.array([column.delay for column in self._columns])
        costs -= solution.worths @ self._agreement()
        costs[used] = -np.inf
        order = np.argsort(costs, kind="stable")
        self._columns = [self._columns[place] for place in order[:most]]
        self._known = {column.name for column in self._columns}

    def forest(self, solution: Solution) -> Forest:
        """Return the trees: at each root the reduce trees are paired with the broadcast trees."""
        least = min(_SMALLEST_SHARE, 0.1 / np.count_nonzero(solution.shares))
        given = [
            (column, float(share))
            for column, share in zip(self._columns, solution.shares, strict=True)
            if share >= least
        ]
        taken = [(column, column, share) for column, share in given if column.use is _Use.BOTH]
        for root in range(self._pricing.size):
            here = [(column, share) for column, share in given if column.root == root]
            taken += _paired(
                [one for one in here if one[0].use is _Use.REDUCE],
                [one for one in here if one[0].use is _Use.BROADCAST],
            )
        # Slow trees first: of trees that are due, the first gets the slot, and late chunks must be fast.
        taken.sort(key=lambda one: -_together(one[0], one[1]).delay)
        shares = np.array([share for _, _, share in taken])
        halves = [_together(up, down) for up, down, _ in taken]
        whole = self._pricing.chunks <= _WHOLE_CHUNKS
        leads: tuple[int, ...] = ()
        if whole:
            loads, delays = (
                np.array([both.load for both in halves]),
                np.array([both.delay for both in halves]),
            )
            chunks = self._pricing.chunks
            shares = whole_chunks(loads, delays, shares / shares.sum(), chunks).astype(float)
            chunk_s = float((shares @ loads).max()) / chunks**2
            """Seconds from one chunk to the next while the most loaded resource is busy."""
            leads = tuple(round(delay / chunk_s) for delay in delays[shares > 0])
        trees = tuple(
            Tree(root=Rank(up.root), reduce_parent=up.parents, broadcast_parent=down.parents)
            for (up, down, _), share in zip(taken, shares, strict=True)
            if share > 0
        )
        return Forest(
            trees=trees,
            shares=tuple(float(share) for share in shares if share > 0),
            whole=whole,
            leads=leads,
            reason=f"packing: {len(trees)} trees from {len({tree.root for tree in trees})} roots; "
            f"{format_duration(solution.objective)} expected",
        )


def _together(up: _TreeColumn, down: _TreeColumn) -> _TreeColumn:
    """Return two trees as one column."""
    if up is down:
        return up
    return replace(up, use=_Use.BOTH, delay=up.delay + down.delay, load=up.load + down.load)


def _paired(
    ups: list[tuple[_TreeColumn, float]], downs: list[tuple[_TreeColumn, float]]
) -> Iterator[tuple[_TreeColumn, _TreeColumn, float]]:
    """Yield pairs with shares, so that each keeps its own; the fast ones of one use with the slow ones of the
    other.
    """
    ups.sort(key=lambda one: one[0].delay)
    downs.sort(key=lambda one: -one[0].delay)
    while ups and downs:
        (up, share_up), (down, share_down) = ups.pop(), downs.pop()
        share = min(share_up, share_down)
        if share > _SMALLEST_SHARE / 10:
            yield up, down, share
        if share_up > share:
            ups.append((up, share_up - share))
        if share_down > share:
            downs.append((down, share_down - share))


# The network as matrices for `packing`: computes prices of edges from prices of resources.

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


_MANY: Final = 128
"""With more nodes a packing of a mesh is as good without further sweeps, and one behind access lines nearly
so with half as many trees (docs/measurements/topologies.md, "Hundreds of nodes").
"""


class ResourcePrices:
    """A network as matrices: computes prices of edges from prices of resources."""

    def __init__(self, network: Network, tensor_bytes: int, chunk_bytes: int) -> None:
        resources = Resources.of(network)
        size = network.size
        useful = resources.useful
        pairs = np.array(resources.pairs)[useful]
        self.size: Final = size
        self.chunks: Final = -(-tensor_bytes // chunk_bytes)
        self.trees = 2 * size
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
        if size > _MANY:
            dense = resources.only_links and 2 * len(pairs) > size * size
            self.sweeps, self.trees = (0, 2 * size) if dense else (self.sweeps, size)

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


# Rounds shares to whole chunks: a slow link that gets 4 chunks instead of 3.4 delays all others.

_MAXIMUM_SHARPNESS: Final = 80.0
"""Sharpness of the soft maximum: how much more the most loaded resource counts than the next."""

_PASSES: Final = 6

_WORK: Final = 20_000_000
"""Trees x trees x resources of all passes: some tenths of a second."""


def whole_chunks(loads: Floats, delays: Floats, shares: Floats, chunks: int) -> npt.NDArray[np.intp]:
    """Return (T,) how many chunks each tree gets, near its share, so that no resource gets one too many.

    Begins with what the shares give in whole numbers, adds the rest one by one where they cost least, then
    moves single chunks while that helps. The cost is the load of the most loaded resource, softened so that
    the next ones count as well, plus the mean delay of the trees. O(T² · R).

    Args:
        loads: (T, R) seconds that the whole tensor takes on a resource when a tree carries all of it.
        delays: (T,) s, of a chunk in a tree.
        shares: (T,) adding up to 1.
        chunks: how many the tensor has.
    """
    each = loads / chunks
    softness = max(float((shares @ loads).max()), float(each.max())) / _MAXIMUM_SHARPNESS
    # The soft maximum of total + each, by tree, is a product of what each and what total contribute.
    steps = np.exp((each - each.max()) / softness)

    def cheapest(total: Floats) -> int:
        """Return the tree on which one more chunk costs least."""
        highest = np.log(steps @ np.exp((total - total.max()) / softness))
        return int((softness * highest + delays / chunks).argmin())

    counts = np.floor(shares * chunks + 1e-9).astype(np.intp)
    total = counts @ each
    for _ in range(chunks - int(counts.sum())):
        best = cheapest(total)
        counts[best] += 1
        total = total + each[best]
    for _ in range(min(_PASSES, _WORK // (len(loads) * loads.size))):
        moved = False
        for tree in np.flatnonzero(counts):
            without = total - each[tree]
            best = cheapest(without)
            if best != tree:
                counts[tree] -= 1
                counts[best] += 1
                total = without + each[best]
                moved = True
        if not moved:
            break
    return np.asarray(counts, np.intp)


# Algorithms for spanning trees that are both cheap and shallow: the candidates of `packing`.

Parents = npt.NDArray[np.intp]

_FEW: Final = 48


def grow(prices: Floats, delays: Floats, root: int, weight: float) -> Parents:
    """Return the parents (-1: the root) of a tree that trades the price of its edges for short paths.

    Prim-Dijkstra [1]_: as Prim's algorithm, but joining v below u costs price(u, v) + weight · (delay of u +
    delay(u, v)). With weight 0 it is a minimum spanning tree if prices are symmetric; where they are not it
    is no more than a good guess (`arborescence` is exact, and blind to delays). O(N²).

    Args:
        prices: (N, N) of an edge from u to v, away from the root; inf where there is none.
        delays: (N, N) of an edge.
        root: where it begins.
        weight: price of a unit of delay of a path.

    References:
        .. [1] Alpert, Hu, Huang, Kahng and Karger, Prim-Dijkstra tradeoffs for improved performance-driven
           routing tree design, IEEE Trans. CAD 14 (1995).
    """
    size = len(prices)
    weighted = prices + weight * delays
    if size <= _FEW:
        return _grow_few(weighted.tolist(), delays.tolist(), root, weight)
    weighted[:, root] = np.inf
    parent = np.full(size, root)
    away = [0.0] * size
    key = weighted[root].copy()  # inf once a node is in the tree, as is what joins it to others
    for _ in range(size - 1):
        node = int(key.argmin())
        above = parent[node]
        away[node] = away[above] + delays.item(above, node)
        key[node] = np.inf
        weighted[:, node] = np.inf
        costs = weighted[node] + weight * away[node]
        parent[costs < key] = node
        np.minimum(key, costs, out=key)
    parent[root] = -1
    return parent


def _grow_few(weighted: list[list[float]], delays: list[list[float]], root: int, weight: float) -> Parents:
    """Do the same for few nodes, where NumPy's calls take longer than the arithmetic."""
    size = len(delays)
    parent = [root] * size
    away = [0.0] * size
    key = weighted[root]
    open_ = [node for node in range(size) if node != root]
    while open_:
        node = min(open_, key=key.__getitem__)
        open_.remove(node)
        above = parent[node]
        away[node] = away[above] + delays[above][node]
        row, behind = weighted[node], weight * away[node]
        for other in open_:
            cost = row[other] + behind
            if cost < key[other]:
                key[other] = cost
                parent[other] = node
    parent[root] = -1
    return np.array(parent)


def path_delays(parents: Parents, delays: Floats) -> list[float]:
    """Return the delay of each node's path from the root; `delays` (N, N) are of edges away from the root."""
    above = parents.tolist()
    edge = _edges(parents, delays)
    away = [0.0] * len(above)
    for node in _from_root(above)[1:]:
        away[node] = away[above[node]] + edge[node]
    return away


def centred(parents: Parents, delays: Floats) -> tuple[int, Parents]:
    """Return the root from which the farthest node of an undirected tree is nearest, and the parents then.

    The farthest node from anywhere is one of the two ends of a longest path. O(N).

    Args:
        parents: of the tree, as it happens to be rooted.
        delays: (N, N) of edges, symmetric.
    """
    above = parents.tolist()
    joined: list[list[tuple[int, float]]] = [[] for _ in above]
    for node, delay in enumerate(_edges(parents, delays)):
        if above[node] >= 0:
            joined[node].append((above[node], delay))
            joined[above[node]].append((node, delay))
    one = _farthest(_away(0, joined))
    from_one = _away(one, joined)
    from_other = _away(_farthest(from_one), joined)
    farthest = [max(both) for both in zip(from_one, from_other, strict=True)]
    root = farthest.index(min(farthest))
    turned = parents.copy()
    node, below = root, -1
    while node >= 0:
        turned[node] = below
        node, below = above[node], node
    return root, turned


def _edges(parents: Parents, delays: Floats) -> list[float]:
    """Return the delay of each node's edge from its parent; the root's means nothing."""
    found: list[float] = delays[parents, np.arange(len(parents))].tolist()
    return found


def _away(start: int, joined: list[list[tuple[int, float]]]) -> list[float]:
    away = [-1.0] * len(joined)
    away[start] = 0.0
    order = [start]
    for node in order:
        for other, delay in joined[node]:
            if away[other] < 0:
                away[other] = away[node] + delay
                order.append(other)
    return away


def _farthest(away: list[float]) -> int:
    return away.index(max(away))


def _from_root(above: list[int]) -> list[int]:
    children: list[list[int]] = [[] for _ in above]
    root = 0
    for node, parent in enumerate(above):
        if parent >= 0:
            children[parent].append(node)
        else:
            root = node
    order = [root]
    for node in order:
        order.extend(children[node])
    return order


def arborescence(prices: Floats, root: int) -> Parents:
    """Return the parents of the cheapest tree away from `root`: Edmonds' algorithm, all cycles of a round at
    once. O(N² log N).

    Args:
        prices: (N, N) of an edge from u to v; inf where there is none.
        root: where it begins.
    """
    size = len(prices)
    nodes = np.arange(size)
    prices = prices.copy()
    prices[:, root] = np.inf
    prices[nodes, nodes] = np.inf
    parent: Parents = prices.argmin(axis=0)
    cheapest = prices[parent, nodes]
    parent[root] = -1
    cheapest[root] = 0.0
    numbers, groups = _cycles(parent.tolist(), root)
    if groups == size:
        return parent
    # Contract each cycle: to enter it at v costs what that adds over v's edge within it.
    order = np.argsort(numbers, kind="stable")
    ends = np.bincount(numbers).cumsum()
    starts = np.append(0, ends[:-1])
    extra = (prices - cheapest)[order[:, None], order]
    between = np.minimum.reduceat(np.minimum.reduceat(extra, starts, axis=0), starts, axis=1)
    place, begin, end = order.tolist(), starts.tolist(), ends.tolist()
    for inner, outer in enumerate(arborescence(between, numbers[root]).tolist()):
        if outer >= 0:
            block = extra[begin[outer] : end[outer], begin[inner] : end[inner]]
            row, column = divmod(int(block.argmin()), end[inner] - begin[inner])
            parent[place[begin[inner] + column]] = place[begin[outer] + row]
    return parent


def _cycles(parent: list[int], root: int) -> tuple[list[int], int]:
    """Return a number for each node, equal within a cycle of parents, and how many numbers there are."""
    size = len(parent)
    group = [-1] * size
    seen_from = [-1] * size
    seen_from[root] = root
    groups = 0
    for start in range(size):
        node = start
        while seen_from[node] < 0:
            seen_from[node] = start
            node = parent[node]
        if seen_from[node] == start and node != root:  # this walk has come back to itself
            while group[node] < 0:
                group[node] = groups
                node = parent[node]
            groups += 1
    for node in range(size):
        if group[node] < 0:
            group[node] = groups
            groups += 1
    return group, groups


_SHARPNESS: Final = 10.0
"""How steeply a resource's price rises as it fills; more at each sweep."""
_DELAY_COUNTS: Final = 2.0
"""Cost of a second of mean delay: the pipeline fills and drains through the slower trees."""
_OTHER_DELAY_COUNTS: Final = 1.0
"""The same for a second packing, which is predicted too: as good on average, much better on some networks."""
_WORTH: Final = 4e-3
"""A round that gains less than this fraction is the last."""


def packing(network: Network, *, tensor_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Forest:
    """Return trees and shares that bring a tensor to all ranks nearly as fast as the network can.

    Args:
        network: as it is at its start.
        tensor_bytes: size of the tensor: the larger, the more rate counts, and the less delay.
        chunk_bytes: size of a chunk.

    Raises:
        Unreachable: some rank has no path to another.
    """
    return packings(network, tensor_bytes=tensor_bytes, chunk_bytes=chunk_bytes, several=False)[0]


def packings(
    network: Network, *, tensor_bytes: int, chunk_bytes: int = CHUNK_BYTES, several: bool = True
) -> tuple[Forest, ...]:
    """Return the packing of `packing` and, if `several`, another one in which delay counts less.

    With few chunks the other takes up to a tenth more or less time; which of them is faster shows only in a
    simulation. There is only one packing if there are so many nodes that all trees get the same share.
    """
    parts = network.separated()
    if parts is not None:
        raise Unreachable(f"there is no path from ranks {parts[0]} to ranks {parts[1]}")
    if network.size == 1:
        alone = Tree.undirected(Rank(0), (-1,))
        return (Forest(trees=(alone,), shares=(1.0,), reason="packing: one rank alone"),)
    pricing = ResourcePrices(network, tensor_bytes, chunk_bytes)
    columns = Columns(pricing)
    grown = _candidates(pricing, columns)
    if not pricing.rounds:
        return (_equal(grown),)
    solution = columns.solve(_DELAY_COUNTS)
    prices = solution.prices
    for _ in range(pricing.rounds):
        _priced(pricing, columns, prices)
        columns.narrow(solution)
        better = columns.solve(_DELAY_COUNTS)
        prices = (prices + better.prices) / 2
        gained = 1 - better.objective / solution.objective
        solution = better
        if gained < _WORTH:
            break
    found = [solution]
    if several:
        found.append(columns.solve(_OTHER_DELAY_COUNTS))
    return tuple(map(columns.forest, found))


_Grown: TypeAlias = tuple[int, Parents, Parents]
"""A root, reduce parents, broadcast parents."""


# ------------------------------------------------------------------------------------------------- candidates


def _candidates(pricing: ResourcePrices, columns: Columns) -> list[_Grown]:
    """Grow trees under prices that follow the loads of those grown before, for each price of delay; return
    the last of them, which fit together in equal shares.
    """
    size, count = pricing.size, pricing.trees
    seconds = pricing.seconds / count
    entering = np.bincount(pricing.targets, weights=1 / pricing.pair_sums(seconds), minlength=size)
    least = max(2 * count * (size - 1) / (1 / seconds).sum(), (count / entering).max())
    """Seconds that the most loaded resource needs at the very least."""
    grown: list[_Grown] = [(0, np.zeros(0, np.intp), np.zeros(0, np.intp))] * count
    for delay_price in pricing.delay_prices:
        loads: list[Floats] = [np.zeros(len(seconds))] * count
        total = np.zeros(len(seconds))
        for sweep in range(pricing.sweeps + 1):
            sharpness = _SHARPNESS * (1 + 0.7 * sweep)
            most = least if sweep == 0 else max(least, 0.97 * float(total.max()))
            for one in range(count):
                total -= loads[one]
                fill = np.clip(sharpness * (total / most - 1), -60, 30)
                rise = np.expm1(np.minimum(sharpness * seconds / most, 60)) * np.exp(fill)
                prices = pricing.edge_prices(rise * most / sharpness)
                grown[one] = _grown(pricing, prices, one % size, delay_price)
                load = columns.add(*grown[one]) / count
                total += load
                if sweep < pricing.sweeps:  # it is taken back in the next one; of 512 nodes it has 2 MB
                    loads[one] = load
    return grown


def _priced(pricing: ResourcePrices, columns: Columns, resource_prices: Floats) -> None:
    """Add the trees that prices, by resource, ask for."""
    prices = pricing.edge_prices(resource_prices * pricing.seconds + 1e-9)
    for root in range(pricing.size):
        for delay_price in (0.3, 1.0) if pricing.symmetric and root else (0.0, 0.3, 1.0):
            columns.add(*_grown(pricing, prices, root, delay_price))
        if not pricing.symmetric:
            columns.add(root, arborescence(prices.T, root), arborescence(prices, root))


def _equal(grown: list[_Grown]) -> Forest:
    trees = tuple(
        Tree(root=Rank(root), reduce_parent=tuple(map(int, up)), broadcast_parent=tuple(map(int, down)))
        for root, up, down in grown
    )
    return Forest(
        trees=trees, shares=(1.0,) * len(trees), reason=f"packing: {len(trees)} trees in equal shares"
    )


def _grown(pricing: ResourcePrices, prices: Floats, root: int, delay_price: float) -> _Grown:
    if not pricing.symmetric:
        up = grow(prices.T, pricing.delays.T, root, delay_price)
        return root, up, grow(prices, pricing.delays, root, delay_price)
    parents = grow(prices, pricing.both_delays, root, delay_price)
    root, parents = centred(parents, pricing.both_delays)
    return root, parents, parents


# Chooses the fastest of several packings by prediction: with few chunks, any of them may be the fastest.

_PREDICTED_CHUNKS: Final = 256
"""With more chunks, chunks that wait for each other matter less, and predictions take longer."""

_PREDICTED_NODES: Final = 12
"""With more nodes, predictions take longer than they are worth."""

_PREDICTIONS: Final = 8
"""Most of them (docs/measurements/topologies.md, "The best of several packings")."""

_PREDICTED_WORK: Final = 30_000
"""Most work of all predictions together, in transmissions (`prediction_work`): .2 s."""

_VARIATION: Final = 0.02
"""Of rates, as a fraction: enough for other trees, and too little for worse ones."""


class PredictedPacking(NamedTuple):
    """A packing and its predicted time."""

    forest: Forest
    seconds: float | None
    """None: there was no choice, and no prediction."""


def best_packing(network: Network, options: Options) -> PredictedPacking:
    """Return the packing for `options.tensors`, with its look-ahead if rates are known.

    With few chunks in a tensor, the order of the chunks makes a difference of a tenth of the time. So
    packings are also formed for networks that are nearly the same. All are predicted, a hundredth of a second
    each, and the fastest is returned.

    Raises:
        Unreachable: some rank has no path to another.
    """
    most = _predictions(network, options)
    forests = list(_similar(network, options, most))
    if options.known:
        forests = [with_look_ahead(network, forest, options.chunk_bytes) for forest in forests]
    if len(forests) == 1:
        return PredictedPacking(forests[0], None)
    seconds = [
        predict(network, forest.policy(0), options.tensors, chunk_bytes=options.chunk_bytes).seconds
        for forest in forests
    ]
    best = min(range(len(forests)), key=seconds.__getitem__)
    return PredictedPacking(forests[best], seconds[best])


def _predictions(network: Network, options: Options) -> int:
    """Return how many packings may be predicted; 1: there is no choice."""
    few = (
        options.known
        and 2 < network.size <= _PREDICTED_NODES
        and options.tensor_bytes <= _PREDICTED_CHUNKS * options.chunk_bytes
    )
    if not few:
        return 1
    chunks = sum(-(-size // options.chunk_bytes) for size in options.tensors)
    return max(1, min(_PREDICTIONS, int(_PREDICTED_WORK / prediction_work(network, chunks))))


def _similar(network: Network, options: Options, most: int) -> Iterator[Forest]:
    """Yield different packings for a network, and for some whose rates differ a little."""
    draw = random.Random(f"similar {options.seed}")
    formed: set[tuple[tuple[Tree, ...], tuple[float, ...]]] = set()
    for number in range(-(-most // 2)):
        for forest in packings(
            _varied(network, draw) if number else network,
            tensor_bytes=options.tensor_bytes,
            chunk_bytes=options.chunk_bytes,
            several=most > 1,
        ):
            if (forest.trees, forest.shares) not in formed:
                formed.add((forest.trees, forest.shares))
                yield forest


def _varied(network: Network, draw: random.Random) -> Network:
    def varied(rate: float) -> float:
        return min(max(rate * math.exp(draw.gauss(0.0, _VARIATION)), RATE.least), RATE.most)

    def cap(rate: float | None) -> float | None:
        return None if rate is None else varied(rate)

    return replace(
        network,
        nodes=tuple(
            replace(node, egress=cap(node.egress), ingress=cap(node.ingress)) for node in network.nodes
        ),
        links=tuple(replace(link, rate=varied(link.rate)) for link in network.links),
    )
