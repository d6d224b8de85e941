"""The transport interface: what moves frames between processes. Two implementations ship, and one conformance
suite.

A van knows connections, not peers, sessions or messages. It may lose what is in flight when a connection
breaks; it never reorders within a connection and never duplicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NewType, Protocol, TypeAlias

from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.pslite.measurement.tcp_progress import Progress

__all__ = ["Broken", "Connection", "Received", "Van", "VanEvent", "progress_by_peer"]

Connection = NewType("Connection", int)
"""Positive: opened here, numbered by the endpoint. Negative: opened by another process, numbered by the
van.
"""


@dataclass(frozen=True, slots=True)
class Received:
    """A message came in. `payload` is writable and belongs to the receiver."""

    connection: Connection
    frames: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """A connection opened here is gone (or never came to be); it will not come back by itself."""

    connection: Connection
    reason: str


VanEvent: TypeAlias = Received | Broken


class Van(Protocol):
    """Moves frames. All methods but `wake` are called from one thread."""

    def bind(self, host: str, port: int) -> int:
        """Listen; return the port (a free one if `port` is 0)."""

    def open(self, connection: Connection, host: str, port: int) -> None:
        """Begin to connect under a fresh identity. Frames may be sent at once."""

    def transmit(self, connection: Connection, header: bytes, payload: Buffer | None) -> bool:
        """Hand over a message without blocking; the payload may be changed once this returns, unless it is a
        frame that this van received itself (which is shared, not copied). False: not taken, and the
        connection is or will be `Broken`.
        """

    def close(self, connection: Connection) -> None:
        """Forget a connection; unsent frames are dropped."""

    def poll(self, timeout_s: float) -> list[VanEvent]:
        """Wait for something to happen, at most `timeout_s`; return everything that has (bounded)."""

    def progress(self, connection: Connection) -> Progress | None:
        """Return how far a connection that was opened here has come; None: nobody can tell."""

    def wake(self) -> None:
        """Make a waiting `poll` return. Any thread."""

    def shut(self, linger_s: float) -> None:
        """Close everything, giving frames handed over up to `linger_s` to leave. Twice does no harm."""


def progress_by_peer(van: Van, connections: Mapping[Peer, Connection]) -> Iterator[tuple[Peer, Progress]]:
    """Say how far these connections have come, as far as somebody can tell."""
    for peer, connection in connections.items():
        found = van.progress(connection)
        if found is not None:
            yield peer, found
