"""Ring all-reduce in the order that suits the links: PCCL's shape."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.errors import Unreachable
from netstorm.topology.networks.elements import Rank, shown_ranks
from netstorm.topology.networks.network import Network
from netstorm.topology.schemes.ring import missing_hops, ring_trees
from netstorm.topology.trees.forest import Forest
from netstorm.topology.trees.metric import CHUNK_BYTES, transfer_delays
from netstorm.topology.trees.resources import Resources
from netstorm.units import format_duration

__all__ = ["ring_best"]

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
