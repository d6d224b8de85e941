"""The linear program of `packing`: candidate trees are its columns, and their shares its solution."""

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
from netstorm.topology.tree import Tree
from netstorm.topology.trees.forest import Forest
from netstorm.topology.trees.resources import Floats
from netstorm.topology.trees.spanning import Parents, path_delays
from netstorm.units import format_duration

__all__ = ["Columns", "Solution"]

_KEPT: Final = 3
"""Most candidates, relative to the number that have a share: each makes the program slower."""

_SMALLEST_SHARE: Final = 1e-3
"""A smaller share is dropped if it is also less than a tenth of the mean share."""

_MOST_CHUNKS: Final = 2000
"""With more chunks, one chunk more or less does not matter, and shares need not be whole."""


class _Use(enum.IntEnum):
    """The direction for which a column can be used."""

    BOTH = 0
    REDUCE = 1
    BROADCAST = 2


@dataclass(frozen=True, slots=True)
class _Column:
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
        self._columns: list[_Column] = []
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
        name = (use, root, tuple(parents.tolist()))
        if name not in self._known:
            self._known.add(name)
            delay = 0.0
            if use is not _Use.BROADCAST:
                delay += max(path_delays(parents, pricing.delays.T))
            if use is not _Use.REDUCE:
                delay += max(path_delays(parents, pricing.delays))
            self._columns.append(_Column(*name, delay, load[pricing.limits]))
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
        whole = self._pricing.chunks <= _MOST_CHUNKS
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


def _together(up: _Column, down: _Column) -> _Column:
    """Return two trees as one column."""
    if up is down:
        return up
    return replace(up, use=_Use.BOTH, delay=up.delay + down.delay, load=up.load + down.load)


def _paired(
    ups: list[tuple[_Column, float]], downs: list[tuple[_Column, float]]
) -> Iterator[tuple[_Column, _Column, float]]:
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
