"""Which detours a policy gets: over what its trees leave unused, around the hops that they use most.

A detour over links that carry a tree takes from that tree what it gives to the other one, and with the
plain rule of the shorter queue such detours cost 4-20 % on static networks. So a detour may only use what is
left of each link, each link under a route and each access line when the trees have theirs, which also says
how long a chunk is expected to take there. Where trees use everything evenly, as a packing does, that leaves
few.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from netstorm.topology.auxiliary import Path, disjoint_paths, hops_of
from netstorm.topology.elements import Rank
from netstorm.topology.network import Network
from netstorm.topology.policy import DETOURS, EXPLORERS, Detour, Policy
from netstorm.topology.resources import Floats, Resources, pair_loads

__all__ = ["with_detours"]

_BUSY: Final = 0.5
"""Hops that are used less than this, in part of the most used resource's use, get no detour: they hold nobody
up.
"""

_LEAST_SPARE: Final = 0.2
"""Part of a resource that must be unused: with less, what waits there is not known well enough."""

_MOST_LOAD: Final = 0.7
"""Of a detour's links but the first, in parts of the hop's: with more it would hardly ever be chosen."""

_MOST_HOPS: Final = 256
"""Hops that get detours, the most used first: a bound on the size of a policy and on the time of the search,
beyond 16 nodes in a mesh.
"""


def with_detours(
    network: Network,
    policy: Policy,
    *,
    chunk_bytes: int,
    known: bool = True,
    unmeasured: Collection[tuple[int, int]] = (),
) -> Policy:
    """Return a policy with detours: up to two around each hop that is much used, and some to look at links.

    Args:
        network: as it is believed to be.
        policy: without detours.
        chunk_bytes: of a full chunk.
        known: rates are known or measured; if they are made up, there is nothing to tell what is faster.
        unmeasured: (source, target) of links that some chunks should take so that they are measured.
    """
    resources = Resources.of(network)
    loads = resources.loads(pair_loads(resources, policy.trees, policy.weights))
    used = loads / resources.capacities
    used /= used.max(initial=0.0) or 1.0
    spare = np.where(used <= 1.0 - _LEAST_SPARE, resources.capacities * (1.0 - used), 0.0)
    hops = hops_of(policy.trees)

    def load(source: int, target: int) -> float:
        return float(max(used[list(resources.used_by((source, target)))]))

    loads_of = {hop: load(*hop) for hop in hops}
    busy = [hop for hop in hops if loads_of[hop] >= _BUSY and known]
    busy = sorted(sorted(busy, key=lambda hop: -loads_of[hop])[:_MOST_HOPS])
    rates = _rates(network, resources, spare)
    delays = _delays(network, rates, chunk_bytes)
    found: list[Detour] = []
    if busy and np.isfinite(delays).any():
        for hop, paths in disjoint_paths(network, delays, busy, most=DETOURS).items():
            for path in paths:
                later = max(load(*ends) for ends in pairwise(path[1:])) if len(path) > 2 else 1.0
                if later < _MOST_LOAD * loads_of[hop]:
                    found.append(_detour(network, path, rates, load=later / loads_of[hop]))
    found += _explorers(network, hops, resources, unmeasured, chunk_bytes)
    return msgspec.structs.replace(policy, detours=tuple(found)) if found else policy


def _rates(network: Network, resources: Resources, capacities: Floats) -> Floats:
    """Return (N, N) the bit/s of each link if resources have these capacities; 0: none."""
    rates = np.zeros((network.size, network.size))
    for link in network.links:
        ends = (link.source, link.target)
        rates[ends] = min(capacities[list(resources.used_by(ends))])
    return rates


def _delays(network: Network, rates: Floats, chunk_bytes: int) -> Floats:
    """Return (N, N) the seconds of a chunk over each link; inf: none."""
    delays = np.full(rates.shape, np.inf)
    for source, target in zip(*np.nonzero(rates), strict=True):
        latency = network.link(Rank(source), Rank(target)).latency
        delays[source, target] = 8 * chunk_bytes / rates[source, target] + latency
    return delays


def _detour(
    network: Network, path: Path, rates: Floats, *, explore: bool = False, load: float = 0.0
) -> Detour:
    return Detour(
        path=tuple(map(int, path)),
        links=tuple((round(float(rates[ends]), 1), network.link(*ends).latency) for ends in pairwise(path)),
        explore=explore,
        load=round(load, 3),
    )


def _explorers(
    network: Network,
    hops: list[tuple[Rank, Rank]],
    resources: Resources,
    unmeasured: Collection[tuple[int, int]],
    chunk_bytes: int,
) -> Iterator[Detour]:
    """Yield for each link that should be measured, and that no hop uses, one detour of three ranks over it.

    The link is its first or its second half; the other half is the fastest that there is, of those hops that
    have not got their detours yet.
    """
    rates = _rates(network, resources, resources.capacities)
    idle = _delays(network, rates, chunk_bytes)
    count: dict[tuple[int, int], int] = {}
    known = set(hops)
    for a, b in sorted(set(unmeasured) - known):
        if not np.isfinite(idle[a, b]):
            continue
        choices = [
            (float(idle[path[0], path[1]] + idle[path[1], path[2]]), path)
            for path in (
                *((a, b, target) for source, target in hops if source == a and target != b),
                *((source, a, b) for source, target in hops if target == b and source != a),
            )
            if count.get((path[0], path[2]), 0) < EXPLORERS
        ]
        best = min(choices, default=(np.inf, ()))
        if np.isfinite(best[0]):
            path = tuple(map(Rank, best[1]))
            count[path[0], path[2]] = count.get((path[0], path[2]), 0) + 1
            yield _detour(network, path, rates, explore=True)
