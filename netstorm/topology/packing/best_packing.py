"""Chooses the faster of two packings by prediction: with few chunks, either may be faster."""

from __future__ import annotations

from typing import Final, NamedTuple

from netstorm.topology.networks.network import Network
from netstorm.topology.options import Options
from netstorm.topology.packing.packing import packings
from netstorm.topology.prediction.predict import predict
from netstorm.topology.trees.forest import Forest
from netstorm.topology.trees.look_ahead import with_look_ahead
from netstorm.topology.trees.resources import Resources

__all__ = ["Packed", "best_packing"]

_MOST_CHUNKS: Final = 256
"""With more chunks, chunks that wait for each other matter less, and predictions take longer."""

_MOST_NODES: Final = 12
"""With more nodes, predictions take longer than they are worth."""


class Packed(NamedTuple):
    """A packing and its predicted time."""

    forest: Forest
    seconds: float | None
    """None: there was no choice, and no prediction."""


def best_packing(network: Network, options: Options) -> Packed:
    """Return the packing for `options.tensors`, with its look-ahead if rates are known.

    With few chunks in a tensor, the order of the chunks makes a difference of a tenth of the time: similar
    packings are then predicted, 10 ms each, and the fastest is returned. If connections share resources, a
    prediction takes ten times as long, and only one packing is formed.

    Raises:
        Unreachable: some rank has no path to another.
    """
    several = (
        options.known
        and 2 < network.size <= _MOST_NODES
        and options.tensor_bytes <= _MOST_CHUNKS * options.chunk_bytes
        and Resources.of(network).only_links
    )
    forests = packings(
        network, tensor_bytes=options.tensor_bytes, chunk_bytes=options.chunk_bytes, several=several
    )
    if options.known:
        forests = tuple(with_look_ahead(network, forest, options.chunk_bytes) for forest in forests)
    if len(forests) == 1:
        return Packed(forests[0], None)
    seconds = [
        predict(network, forest.policy(0), options.tensors, chunk_bytes=options.chunk_bytes).seconds
        for forest in forests
    ]
    best = min(range(len(forests)), key=seconds.__getitem__)
    return Packed(forests[best], seconds[best])
