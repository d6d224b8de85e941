"""Asynchronous training: messages between ranks and the owners of blocks.

All of them are source-routed: `path` is the sequence of nodes from the sender to the receiver, both included.
Nodes in between only forward.

In an elastic job a message says by which view its sender has chosen the receiver. A receiver with a later
view drops it, since the sender sends it again once it has that view; one with an earlier view keeps it.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from netstorm.protocol.messages.kinds import DataMessage, Message

__all__ = [
    "Applied",
    "AsynchronousMessage",
    "BlockCopy",
    "CopiesHeld",
    "CopyKept",
    "CopyMessage",
    "CopyReleased",
    "CopyWanted",
    "HeldClocks",
    "HeldCopy",
    "Pull",
    "PullRows",
    "PullStates",
    "Push",
    "States",
    "Tick",
    "Value",
]


class _RoutedMessage(Message, frozen=True):
    """Forwarded from node to node along its path."""

    path: tuple[int, ...]
    hop: int
    """Index in `path` of the node that the message is sent to."""


class _BlockMessage(_RoutedMessage, frozen=True):
    """About one state of a block, between two ranks that keep it."""

    key: int
    block: int
    version: int
    """Number of pushes in the state."""
    view: int


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
    confirmed: int = 0
    """See `Push`."""
    view: int = 0
    """Version of the policy that has the sender's view; 0: the job is not elastic."""


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
    confirmed: int = 0
    """Number of the sender's pushes of the key that owners have confirmed, without gaps."""
    begin: int = 0
    """What the sender's pushes are counted from where staleness is bounded: it has joined later."""
    view: int = 0
    """Version of the policy that has the sender's view; 0: the job is not elastic."""


class Applied(_KeyMessage, frozen=True, tag=81):
    """An owner to a rank: the rank's push has become part of a block's value."""

    block: int
    number: int
    """Number of the push."""
    behind: int
    """Staleness: updates by other ranks between the value that the gradient was computed on and this one."""
    view: int = 0
    """Version of the policy that has the sender's view; 0: the job is not elastic."""


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
    slowest: int = 0
    """Pushes of the other rank that has the fewest, in an elastic job: a newcomer counts on from there."""
    clock: int = 0
    """The same of the clocks that scripts count."""
    view: int = 0
    """Version of the policy that has the sender's view; 0: the job is not elastic."""


class Tick(_RoutedMessage, frozen=True, tag=84):
    """A rank to an owner: one of the rank's clocks has ended."""

    namespace: int
    """The n-th store that the process created."""
    clock: int
    """Number of clocks that have ended."""
    pushed: int
    """Number of blocks that the rank pushed to this owner in the clock that has ended; they may arrive
    later."""
    view: int = 0
    """Version of the policy that has the sender's view; 0: the job is not elastic."""


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
    confirmed: int = 0
    view: int = 0
    """Version of the policy that has the sender's view; 0: the job is not elastic."""


class PullStates(_KeyRequest, frozen=True, tag=86):
    """A rank to an owner: send the state of your update rule for each block of a key that you own."""

    with_values: bool = False
    """And the block's values before it, of the same moment."""


class States(_KeyMessage, DataMessage, frozen=True, tag=87):
    """An owner to a rank: a piece of the state of its update rule for a block, in frame 1. What they
    carry together begins with the block's values, if these were asked for.
    """

    block: int
    number: int
    """Number of the pull."""
    piece: int
    pieces: int
    """Number of pieces; `piece` counts from 0."""
    priority: int = 0
    view: int = 0
    """Version of the policy that has the sender's view; 0: the job is not elastic."""


class BlockCopy(_BlockMessage, DataMessage, frozen=True, tag=88):
    """An owner to a block's replica, or whoever has a block's state to its next owner: a piece of the state.

    The pieces together are the values, and the state of the update rule behind them.
    """

    piece: int
    pieces: int
    values: int
    """Bytes of the values."""
    applied: tuple[int, ...]
    """Number of pushes of each rank's present process in the state."""
    begins: tuple[int, ...]
    """By rank: what its pushes are counted from where staleness is bounded; -1: it has not pushed yet."""


class CopyKept(_BlockMessage, frozen=True, tag=89):
    """A replica to a block's owner: the copy is here."""


class CopyWanted(_BlockMessage, frozen=True, tag=90):
    """A block's next owner to a rank that has the state: send it."""


class CopyReleased(_BlockMessage, frozen=True, tag=91):
    """A block's owner to a rank that has had its state: two ranks keep a later one."""


class HeldCopy(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """A state of a block."""

    key: int
    block: int
    version: int


class HeldClocks(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """The clocks of one store, as far as a rank has heard of them."""

    namespace: int
    ended: tuple[int, ...]
    """By rank: clocks that have ended; -1: its process has joined later, and has ended none."""


class CopiesHeld(_RoutedMessage, frozen=True, tag=92):
    """A rank to another one, at the begin of a view: what it has of the blocks that are the other one's."""

    view: int
    copies: tuple[HeldCopy, ...]
    clocks: tuple[HeldClocks, ...] = ()


CopyMessage: TypeAlias = BlockCopy | CopyKept | CopyWanted | CopyReleased
"""About the state of one block."""

AsynchronousMessage: TypeAlias = (
    Push
    | Applied
    | Pull
    | Value
    | Tick
    | PullRows
    | PullStates
    | States
    | BlockCopy
    | CopyKept
    | CopyWanted
    | CopyReleased
    | CopiesHeld
)
