"""Forms trees for fixed roots and shares, as the paper does when the network changes.

In the paper a root's state cannot move (arXiv 2404.11352 §IV-C). So a new policy has the roots of the first
one, in the same order and with the same weights: each chunk keeps its root, and only the trees change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from netstorm.errors import UsageError
from netstorm.topology.networks.elements import Rank
from netstorm.topology.networks.network import Network
from netstorm.topology.options import Options
from netstorm.topology.schemes.auto import expected
from netstorm.topology.schemes.fapt import fapt_at
from netstorm.topology.schemes.star import star
from netstorm.topology.tree import Tree
from netstorm.topology.trees.forest import Forest
from netstorm.topology.trees.look_ahead import with_look_ahead
from netstorm.topology.trees.metric import transfer_delays, tree_delay
from netstorm.topology.trees.resources import Floats, Resources, pair_loads
from netstorm.topology.trees.spanning import grow
from netstorm.units import format_duration

__all__ = ["FREEZABLE", "frozen", "spread_at"]

_DELAY_PRICES: Final = (0.1, 1.0, 5.0, 20.0)
"""Prices of path delay relative to load when a tree is grown; the best result is kept. In meshes of nine
nodes only the last two matter, by a fifth; behind access lines only the others.
"""

_SWEEPS: Final = 3
"""Number of times that each tree is removed and grown again under the load of the others."""

_MANY: Final = 48
"""Trees of more nodes are spread at one price of delay: each matters less, and growing them takes longer."""

_SHARPNESS: Final = 10.0
"""How steeply a resource's price rises with its load, in e-folds from idle to the fullest (as `packing`)."""

_DELAY_COUNTS: Final = 2.0
"""Cost of a second of mean delay, relative to a second of load (as `packing`)."""


def frozen(
    network: Network,
    topology: str,
    roots: Sequence[Rank],
    weights: Sequence[int],
    options: Options,
    *,
    leads: tuple[int, ...] = (),
) -> Forest:
    """Return trees from these roots with these weights and leads, as a topology would have them.

    `fapt`: the fastest tree of each root. `packing`: trees that spread the load (`spread_at`). `auto`:
    whichever of the two is predicted to be faster. `star`: the hub's.

    Raises:
        UsageError: a topology whose roots mean nothing.
        Unreachable: names the ranks without a path to some root, or from it.
    """
    make = FREEZABLE.get(topology)
    if make is None:
        raise UsageError(f"topology {topology!r} with frozen roots: expected one of {', '.join(FREEZABLE)}")
    return replace(make(network, roots, weights, options), leads=leads)


def spread_at(
    network: Network, roots: Sequence[Rank], weights: Sequence[int], *, tensor_bytes: int, chunk_bytes: int
) -> Forest:
    """Return trees from given roots in given shares that leave no resource much busier than others.

    Each is grown by Prim-Dijkstra under prices that rise with the load of the others, some times over (best
    response); of several prices of delay the one counts that costs least in fluid time and delay, as in
    `packing`. Shares being fixed, there is no program to solve. O(trees · N²) a sweep.

    Raises:
        Unreachable: names the ranks without a path.
    """
    start = _with(fapt_at(network, roots, chunk_bytes=max(chunk_bytes, tensor_bytes // len(roots))), weights)
    if network.size == 1:
        return start
    spreading = _Spreading(network, tensor_bytes, chunk_bytes)
    prices = _DELAY_PRICES if network.size <= _MANY else _DELAY_PRICES[2:3]
    found = [start, *(spreading.spread(start, price) for price in prices)]
    best = min(found, key=spreading.cost)
    return replace(
        best,
        reason=f"packing: {len(roots)} trees from the {len(set(roots))} roots of the first policy; "
        f"{format_duration(spreading.cost(best))} expected",
    )


class _Spreading:
    """Grows each tree under the load of the others."""

    def __init__(self, network: Network, tensor_bytes: int, chunk_bytes: int) -> None:
        resources = Resources.of(network)
        useful = resources.useful
        self._resources: Final = resources
        self._seconds: Final = 8 * tensor_bytes / resources.capacities
        """(R,) that the whole tensor takes on a resource."""
        self._delays_of: Final = transfer_delays(network, chunk_bytes)
        size = network.size
        pairs = np.array(resources.pairs)[useful]
        self._sources, self._targets = pairs[:, 0], pairs[:, 1]
        self._used: Final = resources.by_pair[useful]
        self._delays: Final = np.zeros((size, size))
        latencies = np.array([network.link(*resources.pairs[one]).latency for one in useful])
        own = 8 * chunk_bytes / resources.pair_capacities[useful] + latencies
        self._delays[self._sources, self._targets] = own

    def loads(self, trees: Sequence[Tree], shares: Sequence[float], total: float) -> Floats:
        """Return (R,) the seconds that trees keep resources busy; `total` of all shares."""
        volumes = pair_loads(self._resources, trees, shares) * (sum(shares) / total)
        return self._resources.loads(volumes) * self._seconds

    def cost(self, forest: Forest) -> float:
        """Return the seconds of the busiest resource, and what the delay of the trees counts."""
        total = sum(forest.shares)
        delay = sum(
            share * tree_delay(tree, self._delays_of)
            for tree, share in zip(forest.trees, forest.shares, strict=True)
        )
        busiest = float(self.loads(forest.trees, forest.shares, total).max())
        return busiest + _DELAY_COUNTS * delay / total

    def spread(self, start: Forest, delay_price: float) -> Forest:
        """Return the forest after some sweeps; the largest shares choose first."""
        trees, total = list(start.trees), sum(start.shares)
        loads = self.loads(trees, start.shares, total)
        for _ in range(_SWEEPS):
            for place in sorted(range(len(trees)), key=lambda one: -start.shares[one]):
                share = start.shares[place]
                loads -= self.loads([trees[place]], [share], total)
                trees[place] = self._grown(trees[place].root, loads, share / total, delay_price)
                loads += self.loads([trees[place]], [share], total)
        return replace(start, trees=tuple(trees))

    def _grown(self, root: Rank, loads: Floats, part: float, delay_price: float) -> Tree:
        with_it = loads + part * self._seconds
        rise = np.exp(
            _SHARPNESS * (with_it / max(float(loads.max()), float(with_it.min())) - 1.0).clip(-9, 3)
        )
        prices = np.full(self._delays.shape, np.inf)
        prices[self._sources, self._targets] = self._used @ (rise * self._seconds)
        return Tree(
            root=root,
            reduce_parent=tuple(map(int, grow(prices.T, self._delays.T, root, delay_price))),
            broadcast_parent=tuple(map(int, grow(prices, self._delays, root, delay_price))),
        )


def _with(forest: Forest, weights: Sequence[int]) -> Forest:
    return replace(forest, shares=tuple(map(float, weights)), whole=True)


def _fapt(network: Network, roots: Sequence[Rank], weights: Sequence[int], options: Options) -> Forest:
    return _with(fapt_at(network, roots, chunk_bytes=options.tree_bytes(len(roots))), weights)


def _packing(network: Network, roots: Sequence[Rank], weights: Sequence[int], options: Options) -> Forest:
    found = spread_at(
        network, roots, weights, tensor_bytes=options.tensor_bytes, chunk_bytes=options.chunk_bytes
    )
    return with_look_ahead(network, found, options.chunk_bytes) if options.known else found


def _auto(network: Network, roots: Sequence[Rank], weights: Sequence[int], options: Options) -> Forest:
    both = [make(network, roots, weights, options) for make in (_fapt, _packing)]
    seconds = [expected(network, forest, options) for forest in both]
    best = seconds.index(min(seconds))
    return replace(
        both[best],
        reason=f"auto: roots stay, {format_duration(seconds[best])} predicted; {both[best].reason}",
    )


def _star(network: Network, roots: Sequence[Rank], weights: Sequence[int], _: Options) -> Forest:
    return _with(star(network, roots[0]), weights)


FREEZABLE: Final[Mapping[str, Callable[[Network, Sequence[Rank], Sequence[int], Options], Forest]]] = {
    "fapt": _fapt,
    "packing": _packing,
    "auto": _auto,
    "star": _star,
}
"""How each topology keeps roots and shares."""
