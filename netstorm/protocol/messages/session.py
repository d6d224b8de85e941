"""What the two ends of a session say to each other; never delivered."""

from __future__ import annotations

from netstorm.protocol.messages.kinds import SessionMessage

__all__ = ["Ack", "Goodbye", "Hello", "Nack", "Query", "Refused", "Welcome"]


class Hello(SessionMessage, frozen=True, tag=1):
    """The side that opened a connection, before anything else on it."""

    job: str
    sender: int
    """Rank of the sender; -1 while it has none."""
    incarnation: int
    """Random number of the sender's process: a restarted rank is somebody else."""
    receiver: int
    """Whom the sender believes to talk to: a rank, or -1 for the scheduler. Ports are re-used."""
    session: int
    """Random number of this session; the same after a reconnect."""
    received: int
    """Highest contiguous sequence number received from the other side in this session."""
    beyond: tuple[int, ...] = ()
    """Sequence numbers received beyond it."""
    resuming: bool = False
    """This session has been welcomed before: whoever does not remember it must refuse, not begin anew."""


class Welcome(SessionMessage, frozen=True, tag=2):
    """Answer to `Hello`: data may flow. What the opener has not yet been acknowledged is sent again."""

    incarnation: int
    session: int
    received: int
    beyond: tuple[int, ...] = ()


class Refused(SessionMessage, frozen=True, tag=3):
    """Answer to `Hello`: this connection will never be accepted; the reason is for a person."""

    reason: str


class Ack(SessionMessage, frozen=True, tag=4):
    """Everything up to `received`, and each of `beyond`, has been received, checked and stored."""

    received: int
    beyond: tuple[int, ...] = ()
    query: int = 0
    """Number of the last `Query` on this connection: whatever was sent before it and is missing here is
    lost.
    """


class Nack(SessionMessage, frozen=True, tag=5):
    """The payload of `sequence` failed its checksum: send it again."""

    sequence: int


class Query(SessionMessage, frozen=True, tag=6):
    """No acknowledgement for a while: are you there? Answered by `Ack`."""

    number: int = 0
    """Counts the queries of a connection, from 1."""


class Goodbye(SessionMessage, frozen=True, tag=7):
    """The sender closes this session on purpose; silence from now on is no failure."""
