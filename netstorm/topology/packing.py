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

from typing import Final, TypeAlias

import numpy as np

from netstorm.errors import Unreachable
from netstorm.topology.networks.network import Network, Rank
from netstorm.topology.packing.columns import Columns
from netstorm.topology.packing.prices import ResourcePrices
from netstorm.topology.tree import Tree
from netstorm.topology.trees.forest import Forest
from netstorm.topology.trees.metric import CHUNK_BYTES
from netstorm.topology.trees.resources import Floats
from netstorm.topology.trees.spanning import Parents, arborescence, centred, grow

__all__ = ["packing", "packings"]

_SHARPNESS: Final = 10.0
"""How steeply a resource's price rises as it fills; more at each sweep."""
_DELAY_COUNTS: Final = 2.0
"""Cost of a second of mean delay: the pipeline fills and drains through the slower trees."""
_OTHER_DELAY_COUNTS: Final = 3.0
"""The same for a second packing, which is predicted too: as good on average, much better on some networks.
A third one, with 1.5, would gain 0.2 %, and take more than a tenth of a second for 9 nodes.
"""
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
    """Return the packing of `packing` and, if `several`, another one in which delay counts more.

    With few chunks the other takes up to a tenth more or less time; which of them is faster shows only in a
    simulation. There is only one packing if the two directions are packed apart, which takes long, or if
    there are so many nodes that all trees get the same share.
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
    if several and pricing.symmetric:
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
                loads[one] = columns.add(*grown[one]) / count
                total += loads[one]
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
