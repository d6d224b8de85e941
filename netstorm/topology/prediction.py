"""Predicts how long a policy takes, by a simulation of its chunks. The scheduler and `netstorm plan` use it.

Modelled: store and forward of chunks; the transport's order on each connection (most urgent first, after what
    is within the window); aggregation and broadcast without processing time; the look-ahead; latencies;
    max-min fair shares of links, links under routed pairs and access caps; loss as reduced goodput; changes
    of links. Not
modelled: headers, slow start, auxiliary paths, tensors that become ready one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from netstorm.errors import UsageError
from netstorm.topology.networks.network import Network
from netstorm.topology.policy import Policy
from netstorm.topology.prediction.events import Chunk, Events

__all__ = ["Prediction", "chunks_of", "predict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted time and traffic of a policy."""

    seconds: float
    """Until all ranks have all results."""
    bits: Mapping[tuple[int, int], float]
    """Sent on each (source, target) that the policy uses."""


def predict(
    network: Network,
    policy: Policy,
    tensors: Sequence[int],
    *,
    chunk_bytes: int,
    start: float = 0.0,
    most_chunks: int | None = None,
) -> Prediction:
    """Return how long one all-reduce of `tensors` takes under `policy`, all of them ready at once.

    A discrete-event simulation, the same for the same arguments: O(chunks · N · log) where no two connections
    share anything, and about 5 times that behind access caps.

    Args:
        network: links and their changes; cap and share as in `Resources`.
        tensors: bytes of each, in order of priority.
        chunk_bytes: of a full chunk.
        start: seconds from the network's start to that of the all-reduce.
        most_chunks: if there are more chunks, the tensors are predicted as one tensor of so many chunks: this
            is
            faster to compute, and some per cent too pessimistic for deep trees.

    Raises:
        UsageError: sizes out of range, or trees that don't fit the network.
    """
    if chunk_bytes < 1 or any(size < 0 for size in tensors) or (most_chunks is not None and most_chunks < 1):
        raise UsageError(
            f"tensors of {list(tensors)[:8]} bytes in chunks of {chunk_bytes}, at most {most_chunks}: "
            "expected no negative sizes, and at least 1 byte and 1 chunk"
        )
    if start < 0:
        raise UsageError(f"start is {start}: expected 0 s or more after the network's start")
    chunks = chunks_of(policy, tensors, chunk_bytes)
    look_ahead, look_ahead_s = policy.look_ahead, policy.look_ahead_s
    if most_chunks is not None and len(chunks) > most_chunks:
        total = sum(tensors)
        larger = -(-total // most_chunks)
        chunks = chunks_of(policy, [total], larger)
        look_ahead = look_ahead * larger // chunk_bytes  # else it would be too small for the larger chunks
        look_ahead_s *= larger / chunk_bytes
    if network.changes:
        network = network.at(start)
        changes = tuple(replace(change, at=change.at - start) for change in network.changes)
        network = replace(network, changes=changes)
    events = Events(network, policy.trees, chunks, look_ahead=look_ahead, look_ahead_s=look_ahead_s)
    events.run()
    return Prediction(seconds=events.now, bits=events.bits)


def chunks_of(policy: Policy, tensors: Sequence[int], chunk_bytes: int) -> list[Chunk]:
    """Return the chunks of tensors of so many bytes, in order, each with its tree.

    A tensor's first chunk is in the slot of its first byte, the others in those after it.
    """
    chunks = []
    offset = 0
    for tensor, size in enumerate(tensors):
        slot = offset // chunk_bytes
        for begin in range(0, size, chunk_bytes):
            bits = 8.0 * min(chunk_bytes, size - begin)
            chunks.append(Chunk(bits, policy.tree_of(slot + begin // chunk_bytes), tensor))
        offset += size
    return chunks
