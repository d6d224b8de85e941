"""How far ahead a rank sends: far enough to keep everything busy, and no farther."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from netstorm.topology.forest import Forest
from netstorm.topology.metric import transfer_delays, tree_delay
from netstorm.topology.network import Network
from netstorm.topology.resources import Resources, pair_loads

__all__ = ["with_look_ahead"]

_FACTOR: Final = 4
"""How many times what is under way when nothing waits. With 2 as good on most networks, but rounds behind
access caps take up to a fifth longer than without a look-ahead; with 8 half of the gain is lost on some.
"""

_CHUNKS_EACH: Final = 4
"""Fewest chunks of each tree."""


def with_look_ahead(network: Network, forest: Forest, chunk_bytes: int) -> Forest:
    """Return a forest with the look-ahead that suits it; none for one tree, in which nothing overtakes.

    A chunk that starts when everything is idle is everywhere after its tree's delay, in which time all trees
    together bring `rate x delay` bytes to everybody. Chunks also wait for each other, so it is 4 times that
    of the slowest tree, which is also 4 bandwidth-delay products of any connection at that rate; and never
    less than 4 chunks of each tree. A round that has no result after the time that this takes to be sent has
    not begun everywhere: then it is better to send everything.

    Args:
        network: measured, or known: on one that was made up the look-ahead would be, too.
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
    look_ahead = math.ceil(max(_FACTOR * rate * slowest, _CHUNKS_EACH * chunk_bytes * len(forest.trees)))
    return replace(forest, look_ahead=look_ahead, look_ahead_s=look_ahead / rate)
