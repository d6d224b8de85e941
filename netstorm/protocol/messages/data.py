"""The data plane: values, and what comes back for them."""

from __future__ import annotations

import enum

from netstorm.protocol.messages.kinds import DataMessage, Message

__all__ = ["Delivered", "Part", "Phase"]


class Phase(enum.IntEnum):
    """Which way a part travels."""

    REDUCE = 0
    BROADCAST = 1


class Part(DataMessage, frozen=True, tag=40):
    """A node to its tree neighbour: values of one chunk. They travel in frame 1; no frame 1 means zeros."""

    key: int
    round: int
    """Push count of the key, from 0 (its initial value); sums never mix rounds."""
    chunk: int
    """Number of the chunk within its key."""
    phase: Phase
    version: int
    """Policy version that this round of this key runs under."""
    tree: int
    contributors: bytes
    """Bit set of the ranks already added in, little-endian (`bits_from_wire`)."""
    dtype: str
    """NumPy name of the values' type."""
    priority: int = 0
    """Higher goes first on every link."""
    codec: int = 0
    """Form of the values, such as 0: plain ones (`protocol.chunks`)."""
    is_aux: bool = False
    """On an auxiliary path (the paper's IS_AUX): forward only."""
    path: tuple[int, ...] = ()
    """Node sequence of an auxiliary path (the paper's PATH); empty on a primary path."""
    hop: int = 0
    """Index in `path` of the node that this message is sent to."""
    around: bool = False
    """On a way around a link that has failed: forward only, as auxiliary paths are; its end confirms nothing,
    and path[0] may be on it twice.
    """


class Delivered(Message, frozen=True, tag=41):
    """Back along an auxiliary path, node by node: a part is at its end, and path[0] may send another one."""

    path: tuple[int, ...]
    """Of the part."""
    hop: int
    """Index in `path` of the node that this message is sent to."""
    key: int
    round: int
    chunk: int
    phase: Phase
    version: int = 0
