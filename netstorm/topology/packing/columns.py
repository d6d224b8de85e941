"""The linear program of `packing`: candidates are its columns, and their shares what it finds."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from scipy.optimize import linprog

from netstorm.errors import NetStormError
from netstorm.topology.networks.network import Rank
from netstorm.topology.packing.prices import ResourcePrices
from netstorm.topology.packing.whole_chunks import whole_chunks
from netstorm.topology.policy import Tree
from netstorm.topology.trees.forest import Forest
from netstorm.topology.trees.resources import Floats
from netstorm.topology.trees.spanning import Parents, path_delays
from netstorm.units import format_duration

__all__ = ["Columns", "Solution"]

_KEPT: Final = 3
"""Most candidates, in times of those that have a share: the program takes longer with each."""

_SMALLEST_SHARE: Final = 1e-3
"""What has less is dropped, if it also has less than a tenth of the mean share."""

_MOST_CHUNKS: Final = 2000
"""With more, a chunk more or less is no matter, and shares need not be whole."""


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
    """On the ground's limits."""

    @property
    def name(self) -> tuple[_Way, int, tuple[int, ...]]:
        """What no other column has."""
        return self.way, self.root, self.parents


@dataclass(frozen=True, slots=True)
class Solution:
    """What the linear program found."""

    objective: float
    shares: Floats
    """By column."""
    delay_counts: float
    """What it was asked with."""
    prices: Floats
    """(R,) of one second more on a resource."""
    worths: Floats
    """(N + 1,) of one share more to broadcast from a root, and of the tensor."""


class Columns:
    """All candidates, and the linear program over them."""

    def __init__(self, ground: ResourcePrices) -> None:
        self._ground: Final = ground
        self._columns: list[_Column] = []
        self._known: set[tuple[_Way, int, tuple[int, ...]]] = set()

    def add(self, root: int, up: Parents, down: Parents) -> Floats:
        """Take a tree up and one down with a common root as candidates; return (R,) their load together."""
        if up is down:
            return self._add(_Way.BOTH, root, up)
        return self._add(_Way.REDUCE, root, up) + self._add(_Way.BROADCAST, root, down)

    def _add(self, way: _Way, root: int, parents: Parents) -> Floats:
        ground = self._ground
        nodes = np.flatnonzero(parents >= 0)
        above = parents[nodes]
        if way is _Way.BOTH:
            load = ground.loads(np.concatenate((nodes, above)), np.concatenate((above, nodes)))
        else:
            load = ground.loads(*((nodes, above) if way is _Way.REDUCE else (above, nodes)))
        name = (way, root, tuple(parents.tolist()))
        if name not in self._known:
            self._known.add(name)
            delay = 0.0
            if way is not _Way.BROADCAST:
                delay += max(path_delays(parents, ground.delays.T))
            if way is not _Way.REDUCE:
                delay += max(path_delays(parents, ground.delays))
            self._columns.append(_Column(*name, delay, load[ground.limits]))
        return load

    def solve(self, delay_counts: float) -> Solution:
        """Return the best shares of the candidates; `delay_counts` is what a second of mean delay costs."""
        count, rows = len(self._columns), len(self._ground.limits)
        total = np.zeros(self._ground.size + 1)
        total[-1] = 1.0
        found = linprog(
            [*(delay_counts * column.delay for column in self._columns), 1.0],
            # Dense: to put sparse ones together takes SciPy longer than to find the zeros.
            A_ub=np.array([*(column.load for column in self._columns), np.full(rows, -1.0)]).T,
            b_ub=np.zeros(rows),
            A_eq=np.append(self._agreement(), np.zeros((len(total), 1)), axis=1),
            b_eq=total,
            method="highs",
            options={"presolve": False},  # it takes longer than it saves
        )
        if found.status != 0:
            raise NetStormError(f"the linear program of the packing was not solved: {found.message}")
        prices = np.zeros(len(self._ground.seconds))
        prices[self._ground.limits] = -np.asarray(found.ineqlin.marginals)
        return Solution(
            objective=float(found.fun),
            shares=np.maximum(found.x[:count], 0.0),
            prices=prices,
            delay_counts=delay_counts,
            worths=np.asarray(found.eqlin.marginals),
        )

    def _agreement(self) -> Floats:
        """Return (N + 1, columns): what is reduced at a root is broadcast from there; and all of it is."""
        size = self._ground.size
        agree = np.zeros((size + 1, len(self._columns)))
        ways = np.array([column.way for column in self._columns])
        roots = np.array([column.root for column in self._columns])
        for way, sign in ((_Way.REDUCE, 1.0), (_Way.BROADCAST, -1.0)):
            (places,) = np.nonzero(ways == way)
            agree[roots[places], places] = sign
        agree[size] = ways != _Way.BROADCAST
        return agree

    def narrow(self, solution: Solution) -> None:
        """Keep what has a share, and those others that, at the program's prices, are the cheapest."""
        used = np.flatnonzero(solution.shares)
        most = _KEPT * len(used)
        if len(self._columns) <= most:
            return
        prices = solution.prices[self._ground.limits]
        costs = np.array([column.load for column in self._columns]) @ prices
        costs += solution.delay_counts * np.array([column.delay for column in self._columns])
        costs -= solution.worths @ self._agreement()
        costs[used] = -np.inf
        order = np.argsort(costs, kind="stable")
        self._columns = [self._columns[place] for place in order[:most]]
        self._known = {column.name for column in self._columns}

    def forest(self, solution: Solution) -> Forest:
        """Return the trees: at each root those up and those down are laid side by side."""
        least = min(_SMALLEST_SHARE, 0.1 / np.count_nonzero(solution.shares))
        given = [
            (column, float(share))
            for column, share in zip(self._columns, solution.shares, strict=True)
            if share >= least
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
        halves = [_together(up, down) for up, down, _ in taken]
        whole = self._ground.chunks <= _MOST_CHUNKS
        leads: tuple[int, ...] = ()
        if whole:
            loads, delays = (
                np.array([both.load for both in halves]),
                np.array([both.delay for both in halves]),
            )
            chunks = self._ground.chunks
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
