"""Chooses a scheme by prediction: which one is best depends on the network and on the tensor's size.

Roughly, up to 1 MB one tree of low latency is best, up to 16 MB trees from all roots, above that a packing.
The limits differ between networks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from netstorm.topology.networks.network import Network
from netstorm.topology.options import Options
from netstorm.topology.packing.best_packing import best_packing
from netstorm.topology.policy import Policy
from netstorm.topology.prediction.predict import predict
from netstorm.topology.schemes.fapt import fapt
from netstorm.topology.schemes.mst import mst
from netstorm.topology.schemes.star import star
from netstorm.topology.trees.forest import Forest
from netstorm.topology.trees.metric import transfer_delays, tree_delay
from netstorm.topology.trees.resources import Resources, fluid_time
from netstorm.units import format_bytes, format_duration

__all__ = ["auto", "candidates", "expected", "expected_policy"]

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
    resources = Resources.of(network)
    shared = resources.matrix.nnz > len(resources.pairs)
    # One that shares moves the rates of up to all connections at its two ends, or under its route.
    each = 1 + network.size / 4 if shared else 1
    most = max(_FEWEST_CHUNKS, int(_MOST_CHUNKS / each))
    return min(most, int(_WORK / each / max(1, 2 * (network.size - 1))))
