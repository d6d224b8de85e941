"""Sends and receives: messages between two ranks, whatever the trees are.

All of them are source-routed: `path` is the sequence of nodes from the sender to the receiver, both included.
Nodes in between only forward. A small message goes at once. A large one is offered first, and its data goes
in pieces once the receiver has a place for them.
"""

from __future__ import annotations

from typing import TypeAlias

from netstorm.protocol.messages.kinds import DataMessage, Message

__all__ = [
    "Accept",
    "CountRequest",
    "MessageCount",
    "Offer",
    "Piece",
    "PointToPointMessage",
    "Rejected",
    "SendAgain",
    "SmallMessage",
    "Taken",
]


class _Directed(Message, frozen=True):
    """Forwarded from node to node along its path."""

    path: tuple[int, ...]
    hop: int
    """Index in `path` of the node that the message is sent to."""


class _Numbered(_Directed, frozen=True):
    number: int
    """Counts the messages from one rank to the other, small ones and offers, from 0."""


class _Announced(_Numbered, frozen=True):
    """The begin of a message that a program sends."""

    channel: str
    """Name of the process group."""
    tag: int
    what: str
    """Describes the values, for error messages: type and shape."""


class SmallMessage(_Announced, DataMessage, frozen=True, tag=100):
    """A sender to a receiver: a whole message of a program, in frame 1. Without frame 1 it has no bytes."""


class Offer(_Announced, frozen=True, tag=101):
    """A sender to a receiver: there is a message of this size; accept it when the program receives it."""

    nbytes: int


class Accept(_Numbered, frozen=True, tag=102):
    """A receiver to a sender: send the first `pieces` pieces of an offered message."""

    pieces: int
    """Grows as pieces arrive: it bounds what is under way."""
    missing: int = -1
    """Send again from this piece on: those before it have arrived; -1: send only what has not been sent."""


class Piece(_Numbered, DataMessage, frozen=True, tag=103):
    """A sender to a receiver: a piece of an accepted message, in frame 1. All but the last have 256 KiB."""

    piece: int
    """Counts from 0."""


class Taken(_Numbered, frozen=True, tag=104):
    """A receiver to a sender: the program has the whole message."""


class Rejected(_Numbered, frozen=True, tag=105):
    """A receiver to a sender: the program will not have the message."""

    what: str
    """What the receiver expects instead; empty if it has finished."""
    nbytes: int
    """Size of what it expects."""


class CountRequest(_Directed, frozen=True, tag=106):
    """A rank to one that has finished: how many messages have you sent to me?"""


class MessageCount(_Directed, frozen=True, tag=107):
    """The answer to a `CountRequest`."""

    count: int


class SendAgain(_Directed, frozen=True, tag=108):
    """A rank to another one, in a new view: answers from here may be lost; announce again what is open."""


PointToPointMessage: TypeAlias = (
    SmallMessage | Offer | Accept | Piece | Taken | Rejected | CountRequest | MessageCount | SendAgain
)
