"""Asynchronous training: messages between ranks and the owners of blocks.

All of them are source-routed: `path` is the sequence of nodes from the sender to the receiver, both included.
Nodes in between only forward.
"""

from __future__ import annotations

from typing import TypeAlias

from netstorm.protocol.messages.kinds import DataMessage, Message

__all__ = ["Applied", "Pull", "PullRows", "PullStates", "Push", "Routed", "States", "Tick", "Value"]


class _RoutedMessage(Message, frozen=True):
    """Forwarded from node to node along its path."""

    path: tuple[int, ...]
    hop: int
    """Index in `path` of the node that the message is sent to."""


class _KeyMessage(_RoutedMessage, frozen=True):
    key: int


class _KeyRequest(_KeyMessage, frozen=True):
    """A request for the newest values of a key."""

    number: int
    """Counts this rank's pulls of this key, from 0."""
    pushed: int
    """Number of this rank's pushes that the answer must include."""
    least: int = 0
    """Number of clocks of every unfinished rank that the answer must include; 0 or less: any."""
    counted: bool = False
    """Clocks are those that scripts count; otherwise each push of a key is one."""
    priority: int = 0


class Push(_KeyMessage, DataMessage, frozen=True, tag=80):
    """A rank to an owner: a gradient's values for one chunk. They travel in frame 1, in the form of
    `codec`.
    """

    chunk: int
    number: int
    """Counts this rank's pushes of this key, from 0."""
    seen: int
    """Number of updates by other ranks in the value that the gradient was computed on."""
    clock: int
    """The rank's clock at the push."""
    dtype: str
    """NumPy name of the values' type."""
    rule: str
    """Fingerprint of the rank's update rule; the owner's must be the same."""
    live: tuple[float, ...] = ()
    """Parameters of the rule that scripts change between pushes (learning rate, scale of gradients), at this
    push."""
    priority: int = 0
    codec: int = 0
    """Form of the values. Without frame 1 all values are zero, or there are no rows."""
    threshold: float = 0.0
    """Value of a quantised 1."""


class Applied(_KeyMessage, frozen=True, tag=81):
    """An owner to a rank: the rank's push has become part of a block's value."""

    block: int
    number: int
    """Number of the push."""
    behind: int
    """Staleness: updates by other ranks between the value that the gradient was computed on and this one."""


class Pull(_KeyRequest, frozen=True, tag=82):
    """A rank to an owner: send the newest values of the blocks of a key that you own."""


class Value(_KeyMessage, DataMessage, frozen=True, tag=83):
    """An owner to a rank: the newest values of one chunk, or of the requested rows, in frame 1."""

    chunk: int
    number: int
    """Number of the pull."""
    others: int
    """Number of updates by ranks other than the receiver in the value."""
    dtype: str
    priority: int = 0


class Tick(_RoutedMessage, frozen=True, tag=84):
    """A rank to an owner: one of the rank's clocks has ended."""

    namespace: int
    """The n-th store that the process created."""
    clock: int
    """Number of clocks that have ended."""
    pushed: int
    """Number of blocks that the rank pushed to this owner in the clock that has ended; they may arrive
    later."""


class PullRows(_KeyMessage, DataMessage, frozen=True, tag=85):
    """A rank to an owner: send the newest values of some rows of a chunk; the answer is a `Value`.

    Frame 1 has the rows' numbers within the chunk, ascending, as little-endian `uint32`.
    """

    chunk: int
    number: int
    """This and the following: see `Pull`."""
    pushed: int
    least: int = 0
    counted: bool = False
    priority: int = 0


class PullStates(_KeyRequest, frozen=True, tag=86):
    """A rank to an owner: send the state of your update rule for each block of a key that you own."""


class States(_KeyMessage, DataMessage, frozen=True, tag=87):
    """An owner to a rank: a piece of the state of its update rule for a block, in frame 1."""

    block: int
    number: int
    """Number of the pull."""
    piece: int
    pieces: int
    """Number of pieces; `piece` counts from 0."""
    priority: int = 0


Routed: TypeAlias = Push | Applied | Pull | Value | Tick | PullRows | PullStates | States
