"""Connections of the network in memory, and the messages in flight on them: values without behaviour.
Pure.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Protocol

from netstorm.protocol.frames import Buffer
from netstorm.pslite.van.interface import Connection, VanEvent

__all__ = ["Flight", "FlightKind", "NetworkVan", "Pipe", "ReceivedFrame"]

_FRAME_OVERHEAD: Final = 9
"""Bytes that ZMTP 3 puts before each frame (RFC 37)."""

_SIGNAL_BYTES: Final = 64
"""A TCP segment without data."""


class ReceivedFrame(bytearray):
    """A received payload. Passed to `transmit` it is shared, not copied, and must not change any more."""

    __slots__ = ()


class FlightKind(enum.Enum):
    """What is in flight."""

    OPEN = enum.auto()
    ACCEPT = enum.auto()
    DATA = enum.auto()
    END = enum.auto()


@dataclass(slots=True, eq=False)
class Flight:
    """One message in flight."""

    kind: FlightKind
    header: bytes = b""
    payload: Buffer | None = None
    digest: int | None = None
    """Checksum at hand-over of a payload that the sender still shares."""
    reason: str = ""
    arrived: bool = False

    def size(self) -> int:
        """Return the bytes on the wire."""
        if self.kind is not FlightKind.DATA:
            return _SIGNAL_BYTES
        payload = 0 if self.payload is None else len(self.payload) + _FRAME_OVERHEAD
        return len(self.header) + _FRAME_OVERHEAD + payload


class NetworkVan(Protocol):
    """What the network needs of a van.

    Attributes:
        host: name of its host.
        key: stands for the public key of its process.
    """

    host: str
    key: str

    def deliver(self, event: VanEvent) -> None:
        """Receive an event."""

    def accept(self, pipe: Pipe) -> Connection:
        """Return a number for a connection that another van has opened."""


@dataclass(slots=True, eq=False)
class Pipe:
    """A connection between two vans, as the network sees it."""

    number: int
    opener: NetworkVan
    connection: Connection
    """Its number at the opener."""
    host: str
    """The host it was opened to."""
    port: int
    acceptor: NetworkVan | None = None
    accepted_as: Connection | None = None
    established: bool = False
    """The opener knows that the connection was accepted; until then its frames are held."""
    opener_knows_end: bool = False
    acceptor_knows_end: bool = False
    forward: deque[Flight] = field(default_factory=deque)
    """From the opener, in order."""
    backward: deque[Flight] = field(default_factory=deque)
    held: deque[Flight] = field(default_factory=deque)
