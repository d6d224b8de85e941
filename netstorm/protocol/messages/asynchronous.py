"""Asynchronous training: what ranks and the owners of blocks say to each other.

All of it is source-routed: `path` is the sequence of nodes from the sender to whom it is for, both included,
and `hop` the index in it of the node that the message is sent to. Those between forward only.
"""

from __future__ import annotations

from typing import TypeAlias

from netstorm.protocol.messages.kinds import DataMessage, Message

__all__ = ["Applied", "Pull", "PullRows", "PullStates", "Push", "Routed", "States", "Tick", "Value"]


class Push(DataMessage, frozen=True, tag=80):
    """A rank to an owner: a gradient's values for one chunk, in frame 1, as its codec has them."""

    path: tuple[int, ...]
    hop: int
    key: int
    chunk: int
    number: int
    """Counts this rank's pushes of this key, from 0."""
    seen: int
    """How many updates by other ranks were in the value that the gradient was computed on."""
    clock: int
    """The rank's clock when it pushed."""
    dtype: str
    """NumPy name of the values' type."""
    rule: str
    """Fingerprint of the rank's update rule; the owner's must be the same."""
    live: tuple[float, ...] = ()
    """What scripts change of the rule between pushes (learning rate, scale of gradients): as it was when this
    rank pushed.
    """
    priority: int = 0
    codec: int = 0
    """The form of the values. No frame 1: zeros, or no rows."""
    threshold: float = 0.0
    """What a quantised 1 stands for."""


class Applied(Message, frozen=True, tag=81):
    """An owner to a rank: its push has become part of a block's value."""

    path: tuple[int, ...]
    hop: int
    key: int
    block: int
    number: int
    """Of the push."""
    behind: int
    """Updates by other ranks between the value that the gradient was computed on and this one."""


class Pull(Message, frozen=True, tag=82):
    """A rank to an owner: send the newest values of the blocks of a key that you own."""

    path: tuple[int, ...]
    hop: int
    key: int
    number: int
    """Counts this rank's pulls of this key, from 0."""
    pushed: int
    """So many pushes of this rank must be in the value."""
    least: int = 0
    """So many clocks of every rank must be in it, but of those that have finished; 0 or less: no matter."""
    counted: bool = False
    """Clocks are those that scripts count; or else each push of a key is one."""
    priority: int = 0


class Value(DataMessage, frozen=True, tag=83):
    """An owner to a rank: the newest values of one chunk, or of the rows that were asked for, in frame 1."""

    path: tuple[int, ...]
    hop: int
    key: int
    chunk: int
    number: int
    """Of the pull."""
    others: int
    """How many updates by ranks other than the receiver are in it."""
    dtype: str
    priority: int = 0


class Tick(Message, frozen=True, tag=84):
    """A rank to an owner: one of its clocks has ended."""

    path: tuple[int, ...]
    hop: int
    namespace: int
    """The n-th store that the process created."""
    clock: int
    """How many have."""
    pushed: int
    """How many pushes of blocks the rank made to this owner in the clock that has ended; they may come
    later than this.
    """


class PullRows(DataMessage, frozen=True, tag=85):
    """A rank to an owner: send the newest values of some rows of a chunk. Frame 1 has their numbers, counted
    from the first row of the chunk on, rising, as little-endian `uint32`. The answer is a `Value`.
    """

    path: tuple[int, ...]
    hop: int
    key: int
    chunk: int
    number: int
    """Counts this rank's pulls of this key, as `Pull.number` does."""
    pushed: int
    """See `Pull`; so are the following."""
    least: int = 0
    counted: bool = False
    priority: int = 0


class PullStates(Message, frozen=True, tag=86):
    """A rank to an owner: send what your update rule keeps of each of the blocks of a key that you own."""

    path: tuple[int, ...]
    hop: int
    key: int
    number: int
    """Counts this rank's pulls of this key, as `Pull.number` does."""
    pushed: int
    """So many pushes of this rank must be in the states."""
    least: int = 0
    """0: a slower rank is no matter."""
    counted: bool = False
    priority: int = 0


class States(DataMessage, frozen=True, tag=87):
    """An owner to a rank: a piece of what its update rule keeps of a block, in frame 1."""

    path: tuple[int, ...]
    hop: int
    key: int
    block: int
    number: int
    """Of the pull."""
    piece: int
    pieces: int
    """There are so many, from 0 on."""
    priority: int = 0


Routed: TypeAlias = Push | Applied | Pull | Value | Tick | PullRows | PullStates | States
