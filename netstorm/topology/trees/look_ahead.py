"""How far ahead a rank sends: far enough to keep everything busy, and no farther."""

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
"""How many times what is under way when nothing waits, where each connection has a link of its own. With 1.5
rounds take 2-4 % longer than without a look-ahead; with 2 to 3 they take 1 % less, in sparse networks 2 %.
"""

_FACTOR_SHARED: Final = 4
"""The same where connections share access lines, and chunks wait for each other longer: with 2 a fifth longer
than without a look-ahead; with 8 half of the gain is lost on some.
"""

_CHUNKS_EACH: Final = 4
"""Fewest chunks of each tree, where connections share access lines."""


def with_look_ahead(network: Network, forest: Forest, chunk_bytes: int) -> Forest:
    """Return a forest with the look-ahead that suits it; none for one tree, in which nothing overtakes.

    A chunk that starts when everything is idle is everywhere after its tree's delay, in which time all trees
    together bring `rate x delay` bytes to everybody. Chunks also wait for each other, so it is 2.5 times that
    of the slowest tree; where they share access lines 4 times, and never less than 4 chunks of each tree. A
    round that has no result after the time that this takes to be sent has
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
    if resources.only_links:
        look_ahead = math.ceil(_FACTOR * rate * slowest)
    else:
        fewest = _CHUNKS_EACH * chunk_bytes * len(forest.trees)
        look_ahead = math.ceil(max(_FACTOR_SHARED * rate * slowest, fewest))
    return replace(forest, look_ahead=look_ahead, look_ahead_s=look_ahead / rate)
