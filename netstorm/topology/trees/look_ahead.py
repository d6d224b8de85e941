"""Size of the look-ahead: large enough to keep all links busy, and no larger."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from netstorm.topology.networks.network import Network
from netstorm.topology.trees.forest import Forest
from netstorm.topology.trees.metric import transfer_delays, tree_delay
from netstorm.topology.trees.resources import Resources, pair_loads

__all__ = ["with_look_ahead"]

_FACTOR: Final = 2.5
"""Multiple of the bytes in flight on idle links, if each connection has its own link. With 1.5 rounds take
2-4 % longer than without a look-ahead; with 2 to 3 they take 1 % less, in sparse networks 2 %.
"""

_FACTOR_SHARED: Final = 4
"""The same if connections share access lines, where chunks wait longer for each other: with 2 rounds take a
fifth longer than without a look-ahead; with 8 half of the gain is lost on some networks.
"""

_CHUNKS_EACH: Final = 4
"""Fewest chunks of each tree, if connections share access lines."""


def with_look_ahead(network: Network, forest: Forest, chunk_bytes: int) -> Forest:
    """Return a forest with a look-ahead; none for a single tree, in which no chunk overtakes another.

    On idle links a chunk reaches all ranks after its tree's delay, while all trees together deliver
    `rate x delay` bytes. Chunks also wait for each other, so the look-ahead is 2.5 times this product for the
    slowest tree; with shared access lines 4 times, and at least 4 chunks of each tree. If a round has no
    result after the time that these bytes take, some rank has not begun it: then it is better to send
    everything.

    Args:
        network: measured or known, not assumed.
        forest: trees and shares.
        chunk_bytes: of a full chunk.
    """
    if len(forest.trees) == 1 or network.size == 1:
        return forest
    resources = Resources.of(network)
    loads = resources.loads(pair_loads(resources, forest.trees, forest.shares))
    rate = 1 / float((8 * loads / resources.capacities).max())
    delays = transfer_delays(network, chunk_bytes)
    slowest = max(tree_delay(tree, delays) for tree in forest.trees)
    if resources.only_links:
        look_ahead = math.ceil(_FACTOR * rate * slowest)
    else:
        fewest = _CHUNKS_EACH * chunk_bytes * len(forest.trees)
        look_ahead = math.ceil(max(_FACTOR_SHARED * rate * slowest, fewest))
    return replace(forest, look_ahead=look_ahead, look_ahead_s=look_ahead / rate)
