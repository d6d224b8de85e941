"""Messages between the two ends of a session; they are never delivered to the machine."""

from __future__ import annotations

from netstorm.protocol.messages.kinds import SessionMessage

__all__ = ["Ack", "Goodbye", "Hello", "Nack", "Query", "Refused", "Welcome"]


class Hello(SessionMessage, frozen=True, tag=1):
    """The first message on a connection, from the side that opened it."""

    job: str
    sender: int
    """Rank of the sender; -1 while it has none."""
    incarnation: int
    """Random number of the sender's process: a restarted rank has another one."""
    receiver: int
    """The rank that the sender expects at this address; -1: the scheduler. Ports are re-used. Below -1: a
    scheduler that takes the job over asks whoever is there."""
    session: int
    """Random number of this session; the same after a reconnect."""
    received: int
    """Highest contiguous sequence number received from the other side in this session."""
    beyond: tuple[int, ...] = ()
    """Sequence numbers received beyond it."""
    resuming: bool = False
    """The session was established before: a receiver that does not know it must refuse it, not begin a new
    one."""
    boot: int = 0
    """Number of the boot of the sender's machine, if the connection leads to a loopback address; a receiver
    of the same boot is on the same machine. 0: another address, or payloads are to be checked always."""


class Welcome(SessionMessage, frozen=True, tag=2):
    """Answer to `Hello`: data may flow. Both sides retransmit what the other one has not received."""

    incarnation: int
    session: int
    received: int
    beyond: tuple[int, ...] = ()
    unchecked: bool = False
    """Payloads need no checksums on this connection: it does not leave the machine."""
    token: int = 0
    """Random number of this session, which the sender alone has made: the same over each of its connections,
    so that no other process goes on with the session."""


class Refused(SessionMessage, frozen=True, tag=3):
    """Answer to `Hello`: the session is not accepted; the reason is for a person."""

    reason: str


class Ack(SessionMessage, frozen=True, tag=4):
    """Everything up to `received`, and each of `beyond`, has been received, checked and stored."""

    received: int
    beyond: tuple[int, ...] = ()
    query: int = 0
    """Number of the last `Query` on this connection: what was sent before it and is missing here is lost."""


class Nack(SessionMessage, frozen=True, tag=5):
    """Message `sequence` was not taken: its payload failed its checksum, or had no room. Send it again."""

    sequence: int
    later: bool = False
    """There is no room for it yet: keep it until another Nack asks for it. Others may be sent meanwhile."""


class Query(SessionMessage, frozen=True, tag=6):
    """A liveness check after a while without acknowledgement. Answered by `Ack`."""

    number: int = 0
    """Number of the query on this connection, from 1."""


class Goodbye(SessionMessage, frozen=True, tag=7):
    """The sender ends this session on purpose; silence from now on is no failure."""
