"""Many trees that together use all of the network: what `fapt` leaves idle is most of it.

1. Candidates. Trees are grown one after the other under prices that rise with the load of a resource, then
   each is taken out and grown anew (best response), for several prices of delay: some trees follow capacity
   alone, some stay shallow.
2. Shares. A linear program (HiGHS) gives the shares x of all candidates: it minimises the fluid time of the
   tensor (the load of the most loaded resource) plus the mean delay of trees, 2 · Σ x · delay. So a large
   tensor gets the widest trees and a small one the fastest.
3. Better candidates. The program's prices tell which resources are scarce; trees grown under them join, and
   it is solved again (column generation [1]_), while that helps.

Where links are equal in both directions, reduce and broadcast use one undirected tree, which loses nothing.
Where they are not, the two are grown apart: shares must only agree at each root.

References:
    .. [1] Barahona, Packing spanning trees, Mathematics of Operations Research 20 (1995).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from netstorm.errors import NetStormError, Unreachable
from netstorm.topology.forest import Forest
from netstorm.topology.metric import CHUNK_BYTES
from netstorm.topology.network import Network, Rank
from netstorm.topology.policy import Tree
from netstorm.topology.resources import Floats, Resources
from netstorm.topology.spanning import Parents, arborescence, centred, grow, path_delays
from netstorm.topology.whole_chunks import whole_chunks
from netstorm.units import format_duration

__all__ = ["packing"]

_EFFORTS: Final = (
    # up to how many nodes: prices of delay, sweeps, rounds of column generation
    (12, (0.01, 0.03, 0.1, 0.3), 2, 20),
    (48, (0.03, 0.3), 1, 3),
    (math.inf, (0.1,), 2, 0),
)
"""The more nodes, the more trees of each kind, and the less each of them matters: without rounds all trees of
the last sweep get the same share, and no program is solved.
"""
_EFFORTS_APART: Final = (
    (12, (0.01, 0.03, 0.1, 0.3), 2, 20),
    (48, (0.03,), 1, 1),
    (math.inf, (0.1,), 2, 0),
)
"""The same where the trees of the two directions are grown apart, which are twice as many."""
_DELAY_COUNTS: Final = 2.0
"""What a second of mean delay costs: the pipeline fills and drains through the slower trees. From 1 to 8
predictions differ by some per cent; 2 did best over meshes of both kinds.
"""
_SHARPNESS: Final = 10.0
"""How steeply a resource's price rises as it fills; more at each sweep."""
_WORTH: Final = 1e-3
"""A round that gains less than this part is the last."""
_SMALLEST_SHARE: Final = 1e-3

_MOST_CHUNKS: Final = 2000
"""With more, a chunk more or less is no matter, and shares need not be whole."""


def packing(network: Network, *, tensor_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Forest:
    """Return trees and shares that bring a tensor to all ranks nearly as fast as the network can.

    Args:
        network: as it is at its start.
        tensor_bytes: what is reduced at once: the larger, the more width counts and the less delay.
        chunk_bytes: what is stored and forwarded at once.

    Raises:
        Unreachable: some rank has no path to another.
    """
    parts = network.separated()
    if parts is not None:
        raise Unreachable(f"there is no path from ranks {parts[0]} to ranks {parts[1]}")
    if network.size == 1:
        alone = Tree.undirected(Rank(0), (-1,))
        return Forest(trees=(alone,), shares=(1.0,), reason="packing: one rank alone")
    ground = _Ground(network, tensor_bytes, chunk_bytes)
    columns = _Columns(ground)
    grown = _candidates(ground, columns)
    if not ground.rounds:
        return _equal(grown)
    solution = columns.solve()
    for _ in range(ground.rounds):
        _priced(ground, columns, solution)
        better = columns.solve()
        gained = 1 - better.objective / solution.objective
        solution = better
        if gained < _WORTH:
            break
    columns.keep(solution, _SMALLEST_SHARE)
    return columns.forest(columns.solve())


_Grown: TypeAlias = tuple[int, Parents, Parents]
"""A root, reduce parents, broadcast parents."""


class _Ground:
    """A network as matrices: prices of resources in, prices of edges out."""

    def __init__(self, network: Network, tensor_bytes: int, chunk_bytes: int) -> None:
        resources = Resources.of(network)
        size = network.size
        useful = resources.useful
        pairs = np.array(resources.pairs)[useful]
        self.size: Final = size
        self.chunks: Final = -(-tensor_bytes // chunk_bytes)
        self.trees: Final = 2 * size
        """How many trees are grown under one price of delay."""
        self.sources: Final = pairs[:, 0]
        self.targets: Final = pairs[:, 1]
        self.place: Final = np.full((size, size), -1)
        self.place[self.sources, self.targets] = np.arange(len(pairs))
        self.use: Final[Any] = sparse.csr_array(resources.matrix[:, useful])
        """(R, P) which useful pair uses which resource."""
        self.used: Final[Any] = sparse.csr_array(self.use.T)
        self.seconds: Final = 8 * tensor_bytes / resources.capacities
        """(R,) that the whole tensor takes on a resource."""
        latencies = np.array([network.link(*resources.pairs[one]).latency for one in useful])
        self.delays: Final = np.zeros((size, size))
        """(N, N) of one chunk over an edge; 0 where there is none."""
        self.delays[self.sources, self.targets] = (
            8 * chunk_bytes / resources.pair_capacities[useful] + latencies
        )
        rates = np.zeros((size, size))
        rates[self.sources, self.targets] = resources.pair_capacities[useful]
        self.symmetric: Final = bool(np.allclose(rates, rates.T, rtol=0.02))
        self.delay_prices, self.sweeps, self.rounds = next(
            (prices, sweeps, rounds)
            for most, prices, sweeps, rounds in (_EFFORTS if self.symmetric else _EFFORTS_APART)
            if size <= most
        )

    def edge_prices(self, prices: Floats) -> Floats:
        """Return (N, N) the price of each edge, inf where there is none, from (R,) prices of resources."""
        edges = np.full((self.size, self.size), np.inf)
        edges[self.sources, self.targets] = self.used @ prices
        return edges

    def loads(self, sources: Parents, targets: Parents) -> Floats:
        """Return (R,) the seconds that a tensor takes on resources when all of it crosses these pairs."""
        volumes = np.zeros(len(self.sources))
        volumes[self.place[sources, targets]] = 1.0
        loads: Floats = (self.use @ volumes) * self.seconds
        return loads


class _Way(enum.IntEnum):
    """What a column is good for."""

    BOTH = 0
    REDUCE = 1
    BROADCAST = 2


@dataclass(frozen=True, slots=True)
class _Column:
    """A tree, as the linear program sees it: in one direction, or the same one in both."""

    way: _Way
    root: int
    parents: tuple[int, ...]
    delay: float
    load: Floats = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Solution:
    objective: float
    shares: Floats
    """By column."""
    prices: Floats
    """(R,) of one second more on a resource."""


class _Columns:
    """All candidates, and the linear program over them."""

    def __init__(self, ground: _Ground) -> None:
        self._ground: Final = ground
        self._columns: list[_Column] = []
        self._known: set[tuple[_Way, int, tuple[int, ...]]] = set()

    def add(self, root: int, up: Parents, down: Parents) -> Floats:
        """Take a tree up and one down with a common root as candidates; return (R,) their load together."""
        if up is down:
            return self._add(_Way.BOTH, root, up)
        return self._add(_Way.REDUCE, root, up) + self._add(_Way.BROADCAST, root, down)

    def _add(self, way: _Way, root: int, parents: Parents) -> Floats:
        ground, nodes = self._ground, np.flatnonzero(parents >= 0)
        above = parents[nodes]
        load: Floats = np.zeros(len(ground.seconds))
        delay = 0.0
        if way is not _Way.BROADCAST:
            load = load + ground.loads(nodes, above)
            delay += float(path_delays(parents, ground.delays.T).max())
        if way is not _Way.REDUCE:
            load = load + ground.loads(above, nodes)
            delay += float(path_delays(parents, ground.delays).max())
        column = _Column(way, root, tuple(map(int, parents)), delay, load)
        name = (way, root, column.parents)
        if name not in self._known:
            self._known.add(name)
            self._columns.append(column)
        return load

    def solve(self) -> _Solution:
        """Return the best shares of the candidates."""
        size, columns = self._ground.size, self._columns
        count = len(columns)
        loads = sparse.csc_array(np.array([column.load for column in columns]).T)
        rows = loads.shape[0]
        agree = np.zeros((size + 1, count + 1))
        for place, column in enumerate(columns):
            if column.way is not _Way.BOTH:  # what is reduced at a root is broadcast from there
                agree[column.root, place] = 1.0 if column.way is _Way.REDUCE else -1.0
            if column.way is not _Way.BROADCAST:
                agree[size, place] = 1.0
        found = linprog(
            [*(_DELAY_COUNTS * column.delay for column in columns), 1.0],
            A_ub=sparse.hstack([loads, sparse.csc_array(-np.ones((rows, 1)))], "csc"),
            b_ub=np.zeros(rows),
            A_eq=sparse.csc_array(agree),
            b_eq=[0.0] * size + [1.0],
            method="highs",
        )
        if found.status != 0:
            raise NetStormError(f"the linear program of the packing was not solved: {found.message}")
        return _Solution(
            objective=float(found.fun),
            shares=np.maximum(found.x[:count], 0.0),
            prices=-np.asarray(found.ineqlin.marginals),
        )

    def keep(self, solution: _Solution, smallest: float) -> None:
        """Drop the candidates with a smaller share, unless that would leave none."""
        kept = [
            column for column, share in zip(self._columns, solution.shares, strict=True) if share >= smallest
        ]
        roots = {
            way: {column.root for column in kept if column.way is way}
            for way in (_Way.REDUCE, _Way.BROADCAST)
        }
        both = roots[_Way.REDUCE] & roots[_Way.BROADCAST]
        kept = [column for column in kept if column.way is _Way.BOTH or column.root in both]
        if kept:
            self._columns = kept

    def forest(self, solution: _Solution) -> Forest:
        """Return the trees: at each root those up and those down are laid side by side."""
        given = [
            (column, float(share))
            for column, share in zip(self._columns, solution.shares, strict=True)
            if share > 0
        ]
        taken = [(one, one, share) for one, share in given if one.way is _Way.BOTH]
        for root in range(self._ground.size):
            here = [(column, share) for column, share in given if column.root == root]
            taken += _paired(
                [one for one in here if one[0].way is _Way.REDUCE],
                [one for one in here if one[0].way is _Way.BROADCAST],
            )
        # Slow trees first: of trees whose turn it is the first gets it, and what begins late should be fast.
        taken.sort(key=lambda one: -_together(one[0], one[1]).delay)
        shares = np.array([share for _, _, share in taken])
        whole = self._ground.chunks <= _MOST_CHUNKS
        if whole:
            halves = [_together(up, down) for up, down, _ in taken]
            shares = whole_chunks(
                np.array([both.load for both in halves]),
                np.array([both.delay for both in halves]),
                shares / shares.sum(),
                self._ground.chunks,
            ).astype(float)
        trees = tuple(
            Tree(root=Rank(up.root), reduce_parent=up.parents, broadcast_parent=down.parents)
            for (up, down, _), share in zip(taken, shares, strict=True)
            if share > 0
        )
        return Forest(
            trees=trees,
            shares=tuple(float(share) for share in shares if share > 0),
            whole=whole,
            reason=f"packing: {len(trees)} trees from {len({tree.root for tree in trees})} roots; "
            f"{format_duration(solution.objective)} expected",
        )


def _together(up: _Column, down: _Column) -> _Column:
    """Return two trees as one column."""
    if up is down:
        return up
    return replace(up, way=_Way.BOTH, delay=up.delay + down.delay, load=up.load + down.load)


def _paired(
    ups: list[tuple[_Column, float]], downs: list[tuple[_Column, float]]
) -> Iterator[tuple[_Column, _Column, float]]:
    """Yield pairs with shares, so that each keeps its own; the fast ones of one way with the slow ones of the
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


# ------------------------------------------------------------------------------------------------- candidates


def _candidates(ground: _Ground, columns: _Columns) -> list[_Grown]:
    """Grow trees under prices that follow the loads of those grown before, for each price of delay; return
    the last of them, which fit together in equal shares.
    """
    size, count = ground.size, ground.trees
    seconds = ground.seconds / count
    entering = np.bincount(ground.targets, weights=1 / (ground.used @ seconds), minlength=size)
    least = max(2 * count * (size - 1) / (1 / seconds).sum(), (count / entering).max())
    """Seconds that the most loaded resource needs at the very least."""
    grown: list[_Grown] = [(0, np.zeros(0, np.intp), np.zeros(0, np.intp))] * count
    for delay_price in ground.delay_prices:
        loads: list[Floats] = [np.zeros(len(seconds))] * count
        total = np.zeros(len(seconds))
        for sweep in range(ground.sweeps + 1):
            sharpness = _SHARPNESS * (1 + 0.7 * sweep)
            most = least if sweep == 0 else max(least, 0.97 * float(total.max()))
            for one in range(count):
                total -= loads[one]
                fill = np.clip(sharpness * (total / most - 1), -60, 30)
                rise = np.expm1(np.minimum(sharpness * seconds / most, 60)) * np.exp(fill)
                prices = ground.edge_prices(rise * most / sharpness)
                grown[one] = _grown(ground, prices, one % size, delay_price)
                loads[one] = columns.add(*grown[one]) / count
                total += loads[one]
    return grown


def _priced(ground: _Ground, columns: _Columns, solution: _Solution) -> None:
    """Add the trees that the program's prices ask for."""
    prices = ground.edge_prices(solution.prices * ground.seconds + 1e-9)
    for root in range(ground.size):
        for delay_price in (0.3, 1.0) if ground.symmetric and root else (0.0, 0.3, 1.0):
            columns.add(*_grown(ground, prices, root, delay_price))
        if not ground.symmetric:
            columns.add(root, arborescence(prices.T, root), arborescence(prices, root))


def _equal(grown: list[_Grown]) -> Forest:
    trees = tuple(
        Tree(root=Rank(root), reduce_parent=tuple(map(int, up)), broadcast_parent=tuple(map(int, down)))
        for root, up, down in grown
    )
    return Forest(
        trees=trees, shares=(1.0,) * len(trees), reason=f"packing: {len(trees)} trees in equal shares"
    )


def _grown(ground: _Ground, prices: Floats, root: int, delay_price: float) -> _Grown:
    if not ground.symmetric:
        up = grow(prices.T, ground.delays.T, root, delay_price)
        return root, up, grow(prices, ground.delays, root, delay_price)
    delays = ground.delays + ground.delays.T
    parents = grow(prices + prices.T, delays, root, delay_price)
    root, parents = centred(parents, delays)
    return root, parents, parents
