"""Synchronous rounds: messages that carry values, and their confirmation on auxiliary paths."""

from __future__ import annotations

import enum

import msgspec

from netstorm.protocol.messages.kinds import DataMessage, Message

__all__ = ["Delivered", "LossTerms", "Part", "Phase"]


class Phase(enum.IntEnum):
    """Direction of a part in its tree."""

    REDUCE = 0
    BROADCAST = 1
    RECOVERY = 2
    """Not in a tree: a result from a rank that has it to one that lacks it, after a change of the view."""


class LossTerms(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A round may end without some contributions, which come too late (MLT's bounded loss)."""

    bound: float
    """Largest share of a step that may be missing, by absolute values."""
    deadline_s: float
    """How long all contributions are waited for."""
    important: float = 0.0
    """Share of the chunks that must be complete, those with the largest values (DGT); 0: none."""
    mass: float = 0.0
    """Sum of the absolute values of the contributions in this part; of a result 0."""


class Part(DataMessage, frozen=True, tag=40):
    """A node to its tree neighbour: values of one chunk, in frame 1; without frame 1 they are zeros."""

    key: int
    round: int
    """Number of the push of this key, from 0 (its initial value); sums never mix rounds."""
    chunk: int
    """Number of the chunk within its key."""
    phase: Phase
    version: int
    """Version of the policy that this round of this key is bound to."""
    tree: int
    contributors: bytes
    """Bit set of the ranks already added in, little-endian (`bits_from_wire`)."""
    dtype: str
    """NumPy name of the values' type."""
    priority: int = 0
    """Higher goes first on every link."""
    codec: int = 0
    """Form of the values; 0: plain (see `protocol.chunks`)."""
    is_aux: bool = False
    """On an auxiliary path (the paper's IS_AUX): forward only."""
    path: tuple[int, ...] = ()
    """Node sequence of an auxiliary path (the paper's PATH); empty on a primary path."""
    hop: int = 0
    """Index in `path` of the node that this message is sent to."""
    around: bool = False
    """On a detour around a failed link: forward only, as on auxiliary paths, but the receiver confirms
    nothing, and path[0] may be on it twice."""
    call: int = 0
    """Digest of the collective call that the sender makes (`Operation.digest`): the same at all ranks, or
    they disagree; 0: not a collective round."""
    settled: int = -1
    """Up to this round of the key, all contributors have completed all; -1: not known, as in all jobs that
    nodes may not leave."""
    loss: LossTerms | None = None
    """The round may end without some contributions; None: it waits for all."""


class Delivered(Message, frozen=True, tag=41):
    """Back along an auxiliary path, node by node: a part has arrived, and path[0] may send another one."""

    path: tuple[int, ...]
    """Path of the part."""
    hop: int
    """Index in `path` of the node that this message is sent to."""
    key: int
    round: int
    chunk: int
    phase: Phase
    version: int = 0
