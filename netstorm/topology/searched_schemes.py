"""Schemes that search: the best of several by prediction, the best order of a ring, trees of fixed roots.

They need SciPy, which takes a second to load, so `form` imports them when they are asked for.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.errors import Unreachable, UsageError
from netstorm.topology.network import Network, Rank, shown_ranks
from netstorm.topology.packing import best_packing, grow
from netstorm.topology.policy import Forest, Options, Policy
from netstorm.topology.prediction import predict, prediction_work
from netstorm.topology.resources import Floats, Resources, fluid_time, pair_loads, with_look_ahead
from netstorm.topology.schemes import fapt, fapt_at, missing_hops, mst, ring_trees, star
from netstorm.topology.tree import CHUNK_BYTES, Tree, transfer_delays, tree_delay
from netstorm.units import format_bytes, format_duration

__all__ = [
    "FREEZABLE",
    "auto",
    "candidates",
    "expected",
    "expected_policy",
    "frozen",
    "ring_best",
    "spread_at",
]


# Chooses a scheme by prediction: which one is best depends on the network and on the tensor's size.
#
# Roughly, up to 1 MB one tree of low latency is best, up to 16 MB trees from all roots, above that a packing.
# The limits differ between networks.

_MOST_CHUNKS: Final = 512
"""With more chunks, predictions take longer, and the best scheme stays the same."""

_FEWEST_CHUNKS: Final = 128
"""With fewer chunks, a prediction overestimates the time to fill the pipeline."""

_WORK: Final = 100_000
"""Most transmissions in a prediction, if they share nothing: some tenths of a second."""

_SURELY: Final = 1.1
"""A scheme is not predicted if its fluid time exceeds the best prediction by this factor: the error of the
fluid time is a few per cent at most.
"""

_SMALL_CHUNKS: Final = 8
"""Tensors of at most this many chunks never fill a pipeline: simple trees are then candidates, too."""


def auto(network: Network, options: Options) -> Forest:
    """Return the forest of `candidates` with the shortest predicted time for `options.tensors`.

    One prediction for each candidate that may win takes hundredths of a second with 9 nodes. Where the
    discrete events would take longer than some seconds (64 nodes and more behind access caps), it is an
    estimate. Rings are no candidates: they are not the fastest on any measured network
    (docs/measurements/topologies.md, "Rings are never the fastest").

    Raises:
        Unreachable: names the ranks without a path.
    """
    forests, seconds = _candidates(network, options)
    floors = _floors(network, forests, options)
    for name in sorted(forests, key=lambda name: floors[name]):
        if name not in seconds and floors[name] <= _SURELY * min(seconds.values(), default=math.inf):
            seconds[name] = expected(network, forests[name], options)
    # Of equals the first, which is the simplest.
    best = min((name for name in forests if name in seconds), key=lambda name: seconds[name])
    times = {name: f"over {format_duration(floor)}" for name, floor in floors.items()}
    times |= {name: format_duration(found) for name, found in seconds.items()}
    others = ", ".join(f"{name} {times[name]}" for name in forests if name != best)
    chosen = forests[best]
    return replace(
        chosen,
        reason=f"auto: {best}, with {format_duration(seconds[best])} predicted for "
        f"{format_bytes(options.tensor_bytes)} ({others}); {chosen.reason}",
    )


def _floors(network: Network, forests: Mapping[str, Forest], options: Options) -> Mapping[str, float]:
    """Return approximate lower bounds by name: fluid times, if there are enough chunks."""
    if len(forests) == 1 or options.tensor_bytes < _FEWEST_CHUNKS * options.chunk_bytes:
        return dict.fromkeys(forests, 0.0)
    resources = Resources.of(network)
    return {
        name: fluid_time(resources, forest.policy(0), options.tensor_bytes)
        for name, forest in forests.items()
    }


def candidates(network: Network, options: Options) -> Mapping[str, Forest]:
    """Return the forests that are worth predicting, by name, the simplest first.

    Raises:
        Unreachable: names the ranks without a path.
    """
    return _candidates(network, options)[0]


def _candidates(network: Network, options: Options) -> tuple[dict[str, Forest], dict[str, float]]:
    """Return the candidates, and the predicted times of some of them."""
    chunk_bytes = min(options.chunk_bytes, options.tensor_bytes)
    found = {"one fapt": fapt(network, 1, chunk_bytes=options.tree_bytes(1))}
    if network.size == 1:
        return found, {}
    if options.tensor_bytes <= _SMALL_CHUNKS * options.chunk_bytes:
        found["mst"] = mst(network, chunk_bytes=chunk_bytes)
        found["star"] = star(network)
    found["fapt"] = fapt(network, chunk_bytes=options.tree_bytes(network.size))
    packed = best_packing(network, options)
    found["packing"] = packed.forest
    return found, {} if packed.seconds is None else {"packing": packed.seconds}


def expected(network: Network, forest: Forest, options: Options) -> float:
    """Return the seconds that `options.tensors` should take with these trees: see `expected_policy`."""
    return expected_policy(network, forest.policy(0), options)


def expected_policy(network: Network, policy: Policy, options: Options) -> float:
    """Return the seconds that `options.tensors` should take: predicted or, where that is long, estimated.

    The estimate is the fluid time and that of one chunk on its way through the slowest tree: it knows
    nothing of chunks that wait for each other, and so is too low.
    """
    most = _affordable(network)
    chunks = sum(-(-size // options.chunk_bytes) for size in options.tensors)
    if chunks <= most or most >= max(_FEWEST_CHUNKS, 2 * network.size):
        return predict(
            network, policy, options.tensors, chunk_bytes=options.chunk_bytes, most_chunks=most
        ).seconds
    delays = transfer_delays(network, min(options.chunk_bytes, options.tensor_bytes))
    return fluid_time(Resources.of(network), policy, options.tensor_bytes) + max(
        tree_delay(tree, delays) for tree in policy.trees
    )


def _affordable(network: Network) -> int:
    """Return how many chunks a prediction can follow in some tenths of a second, at most `_MOST_CHUNKS`."""
    each = prediction_work(network, 1)
    alone = 2 * max(1, network.size - 1)
    most = max(_FEWEST_CHUNKS, int(_MOST_CHUNKS * alone / each))
    return min(most, int(_WORK / each))


# Ring all-reduce in the order that suits the links: PCCL's shape.

EXACT_NODES: Final = 8
"""Up to this size all (N - 1)! orders are compared: 5040."""
_STEPS_A_RANK: Final = 150
"""Of simulated annealing, for each of the starts: a longer search found hardly better orders."""
_BACKTRACKS: Final = 50_000
"""Of the search for a ring that has all its links: a fraction of a second."""

Ints = npt.NDArray[np.intp]


def ring_best(
    network: Network, *, tensor_bytes: float = 100e6, chunk_bytes: int = CHUNK_BYTES, seed: int = 0
) -> Forest:
    """Return the ring in the order that is fastest, as far as it is found.

    An order takes the time of the most loaded resource plus that of a chunk once around, both twice but for
    one of N hops. Up to 8 ranks all orders are compared. Above, simulated annealing with reversed segments
    and moved ranks [1]_ from two starts, the one rank by rank by the fastest link, the other at random (or
    any ring that has links, if some pairs have none): 150 · N steps each of O(N), seeded.

    Raises:
        Unreachable: the overlay has no ring through all ranks, or none was found; says which.

    References:
        .. [1] As a travelling salesman's tour is improved: Croes, A method for solving traveling-salesman
           problems, Operations Research 6(6), 1958. PCCL orders its rings so, by measured bandwidth.
    """
    search = _Search(network, tensor_bytes, chunk_bytes)
    order = search.exact() if network.size <= EXACT_NODES else search.annealed(random.Random(seed))
    missing = missing_hops(network, order)
    if missing:
        raise Unreachable(_no_ring(network, missing))
    return Forest(
        trees=ring_trees(order),
        shares=(1.0,) * network.size,
        reason=f"ring-best: {' → '.join(map(str, order))}; {format_duration(search.seconds(order))} "
        f"for {tensor_bytes:.3g} bytes",
    )


class _Search:
    """Orders of the ranks, as tuples that begin with 0, and what they cost."""

    def __init__(self, network: Network, tensor_bytes: float, chunk_bytes: int) -> None:
        self._network: Final = network
        self._size: Final = network.size
        self._mesh: Final = len(network.pairs()) == network.size * (network.size - 1)
        resources = Resources.of(network)
        around = 2 * (network.size - 1) / network.size
        delays = transfer_delays(network, chunk_bytes)
        # A missing hop costs more than all other hops together: the fewer, the better.
        slowest = max(delays.values(), default=0.0) + 8 * tensor_bytes / min(
            resources.capacities, default=1.0
        )
        self._missing: Final = 2.0 * network.size * network.size * slowest
        self._delay: Final = np.full((self._size, self._size), around * self._missing)
        used = [resources.used_by(pair) for pair in resources.pairs]
        most = max(map(len, used), default=1)
        nothing = len(resources.capacities)
        self._uses: Final[Ints] = np.full((self._size, self._size, most), nothing, np.intp)
        for pair, ones in zip(resources.pairs, used, strict=True):
            self._delay[pair] = around * delays[pair]
            self._uses[pair][: len(ones)] = ones
        self._per_load: Final = np.append(8 * tensor_bytes * around / resources.capacities, 0.0)
        """(R + 1,) seconds for each hop that uses a resource; the last is none."""
        self._loads: Final = np.zeros(nothing + 1)

    def seconds(self, order: Sequence[int]) -> float:
        """Return what an order takes. O(N)."""
        here = np.array(order, np.intp)
        there = np.roll(here, -1)
        used = self._uses[here, there].ravel()
        np.add.at(self._loads, used, 1.0)
        flow = float((self._loads[used] * self._per_load[used]).max())
        self._loads[used] = 0.0
        return flow + float(self._delay[here, there].sum())

    def exact(self) -> tuple[Rank, ...]:
        """Return the best of all orders, the first of equals."""
        if self._size == 1:
            return (Rank(0),)
        best = min(
            ((0, *rest) for rest in itertools.permutations(range(1, self._size))),
            key=lambda order: (float(f"{self.seconds(order):.12g}"), order),
        )
        return tuple(map(Rank, best))

    def annealed(self, rng: random.Random) -> tuple[Rank, ...]:
        """Return the best order that was met."""
        found: list[tuple[float, list[int]]] = []
        for start in self._starts(rng):
            order, cost = start, self.seconds(start)
            found.append((cost, order))
            steps = _STEPS_A_RANK * self._size
            for step in range(steps):
                # Cooled to nothing. In random networks of 9 to 128 ranks 0.3 at first found slower orders.
                heat = 0.02 * min(cost, self._missing) * (1 - step / steps) ** 2
                other = _changed(order, rng)
                then = self.seconds(other)
                if then <= cost or rng.random() < math.exp((cost - then) / max(heat, 1e-300)):
                    order, cost = other, then
                    if cost < found[-1][0]:
                        found[-1] = (cost, order)
        _, best = min(found)
        zero = best.index(0)
        return tuple(map(Rank, best[zero:] + best[:zero]))

    def _starts(self, rng: random.Random) -> Iterator[list[int]]:
        order = [0]
        while len(order) < self._size:
            left = [rank for rank in range(self._size) if rank not in order]
            order.append(min(left, key=lambda rank: (self._delay[order[-1], rank], rank)))
        yield order
        if self._mesh:
            shuffled = list(range(self._size))
            rng.shuffle(shuffled)
            yield shuffled
        else:
            whole = _any_ring(self._network)
            if whole:
                yield whole


def _changed(order: list[int], rng: random.Random) -> list[int]:
    """Return an order in which a segment is reversed, or a rank is elsewhere."""
    first, last = sorted(rng.sample(range(len(order)), 2))
    if rng.random() < 0.5:
        return order[:first] + order[first : last + 1][::-1] + order[last + 1 :]
    other = order.copy()
    if rng.random() < 0.5:
        other.insert(last, other.pop(first))
    else:
        other.insert(first, other.pop(last))
    return other


def _any_ring(network: Network) -> list[int]:
    """Return a ring that has all its links, or nothing if none is found in so many steps.

    Depth first; the next rank is the one with the fewest ranks to go on to.
    """
    targets = [network.neighbours(rank) for rank in network.ranks]
    order = [0]
    inside = {0}

    def next_ranks(rank: int) -> list[int]:
        left = [other for other in targets[rank] if other not in inside]
        return sorted(left, key=lambda other: (sum(rank not in inside for rank in targets[other]), other))

    pending = [next_ranks(0)]
    for _ in range(_BACKTRACKS):
        if len(order) == network.size and 0 in targets[order[-1]]:
            return order
        if pending[-1]:
            order.append(pending[-1].pop(0))
            inside.add(order[-1])
            pending.append(next_ranks(order[-1]))
        elif len(order) > 1:
            pending.pop()
            inside.remove(order.pop())
        else:
            break
    return []


def _no_ring(network: Network, missing: Sequence[tuple[Rank, Rank]]) -> str:
    shown = ", ".join(f"{source}→{target}" for source, target in missing[:8])
    linked = [set(network.neighbours(rank)) for rank in network.ranks]
    for source, target in network.pairs():
        linked[target].add(source)
    ends = [rank for rank in network.ranks if network.size > 2 and len(linked[rank]) < 2]
    if ends:
        return f"there is no ring through all ranks: {shown_ranks(ends)} with links to one other rank only"
    certain = "there is no ring" if network.size <= EXACT_NODES else "no ring was found"
    return f"{certain} through all ranks in this overlay: the best one lacks the links {shown}"


# Forms trees for fixed roots and shares, as the paper does when the network changes.
#
# In the paper a root's state cannot move (arXiv 2404.11352 §IV-C). So a new policy has the roots of the first
# one, in the same order and with the same weights: each chunk keeps its root, and only the trees change.

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
