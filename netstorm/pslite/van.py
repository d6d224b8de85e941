"""The transport interface: what moves frames between processes.

`ZmqVan` and `MemoryVan` implement it; `netstorm.lab.testing.conformance` tests any implementation. A van
knows connections, not peers, sessions or messages. It may lose what is in flight when a connection breaks. It
never duplicates messages, and never reorders those of one stream. A connection is one stream, unless the van
says that it has more (`Widened`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NewType, Protocol, TypeAlias

from netstorm.protocol.frames import Buffer, Peer
from netstorm.protocol.messages import SharedMemory
from netstorm.pslite.rates import TcpProgress

__all__ = [
    "MOST_LINK_TIMEOUTS",
    "Broken",
    "Connection",
    "PayloadMemory",
    "Received",
    "Transmitter",
    "Van",
    "VanEvent",
    "Widened",
    "connecting_s",
    "progress_by_peer",
]

Connection = NewType("Connection", int)
"""Positive: opened here, numbered by the endpoint. Negative: opened by another process, numbered by the
van.
"""


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived. Its payload, frame 1, is writable and belongs to the receiver."""

    connection: Connection
    frames: tuple[Buffer, ...]
    user: str = ""
    """Text of the key of the sender's process, or node; empty: the job has no key, or the connection was
    opened here."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A connection is gone, or one opened here was never established; it does not come back by itself. All
    that came over it was received before.
    """

    connection: Connection
    reason: str
    refused: bool = False
    """No process listens at the address: it was reached, and said so."""
    expelled: bool = False
    """The process at the other end is not admitted any more; the connection may be one that it has opened."""


@dataclass(frozen=True, slots=True)
class Widened:
    """A connection that was opened here has so many streams from now on: messages with payloads may go over
    each of them. All end when one ends.
    """

    connection: Connection
    streams: int


VanEvent: TypeAlias = Received | Broken | Widened


class PayloadMemory(Protocol):
    """Payloads that lie in memory of their sender, which its peer on the same machine reads."""

    def lend(self, connection: Connection) -> SharedMemory | None:
        """Return where payloads over a connection that is opened here may lie; None: nowhere."""

    def share(self, connection: Connection) -> None:
        """Send payloads over a connection by reference from now on: its peer has the memory."""

    def borrow(self, connection: Connection, memory: SharedMemory) -> bool:
        """Have the memory of the process that has opened a connection; return whether that worked."""


class Transmitter(Protocol):
    """The part of a van that sessions use."""

    def open(self, connection: Connection, host: str, port: int) -> None:
        """See `Van`."""

    def transmit(
        self, connection: Connection, header: bytes, payload: Buffer | None, stream: int = 0
    ) -> bool:
        """See `Van`."""

    def close(self, connection: Connection) -> None:
        """See `Van`."""

    def admit(self, connection: Connection) -> None:
        """Note that a session uses a connection that another process has opened."""

    def refuse(self, connection: Connection, reason: str) -> None:
        """Cut a connection that another process has opened, and that does what no process of a job does; the
        reason is for a person.
        """


class Van(Transmitter, Protocol):
    """Moves frames. All methods but `wake` are called from one thread."""

    def bind(self, host: str, port: int) -> int:
        """Listen; return the port (a free one if `port` is 0)."""

    def open(self, connection: Connection, host: str, port: int) -> None:
        """Begin to connect under a fresh identity. Frames may be sent at once."""

    def transmit(
        self, connection: Connection, header: bytes, payload: Buffer | None, stream: int = 0
    ) -> bool:
        """Hand over a message without blocking; False: not taken, and the connection is or will be `Broken`.
        `stream`: of those that the connection has.

        The payload may be changed once this returns, unless it is a frame that this van received itself: such
        a frame is shared, not copied.
        """

    def close(self, connection: Connection) -> None:
        """Close a connection; unsent frames are dropped."""

    def poll(self, timeout_s: float) -> list[VanEvent]:
        """Wait for events, at most `timeout_s`; return a bounded number of those that have happened."""

    def progress(self, connection: Connection) -> TcpProgress | None:
        """Return how much a connection that was opened here has delivered; None: unknown."""

    def acknowledges(self, connection: Connection) -> bool:
        """Return whether the kernel at the other end acknowledges what is sent to it, though the process
        there may do nothing. False: it does not, there is no such connection, or nobody knows.
        """

    def wake(self) -> None:
        """Make a waiting `poll` return. May be called by any thread."""

    def shut(self, linger_s: float) -> None:
        """Close everything; frames handed over have up to `linger_s` to leave. A second call does nothing."""


_CONNECTING_TRIPS: Final = 8
"""Round trips that a connection may take until its Welcome: one of TCP, two of ZeroMQ's handshake, one more
with keys, and one of the Hello; and its way may fill meanwhile."""

MOST_LINK_TIMEOUTS: Final = 2
"""A connection waits for no answer for longer, however far away the other side is."""


def connecting_s(round_trip_s: float, link_timeout_s: float) -> float:
    """Return how long a connection may take at least, if its round trip takes so long."""
    return min(_CONNECTING_TRIPS * round_trip_s, MOST_LINK_TIMEOUTS * link_timeout_s)


def progress_by_peer(van: Van, connections: Mapping[Peer, Connection]) -> Iterator[tuple[Peer, TcpProgress]]:
    """Yield how much these connections have delivered, where that is known."""
    for peer, connection in connections.items():
        progress = van.progress(connection)
        if progress is not None:
            yield peer, progress
