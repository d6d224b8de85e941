"""A connection opened here: a DEALER under a fresh identity, and the monitor that reports its state."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from typing import Final

import zmq

from netstorm import clock
from netstorm.pslite.van.interface import Connection
from netstorm.pslite.zeromq.options import SocketOption
from netstorm.pslite.zeromq.reader import LETTER

__all__ = ["ZmqLink", "bracketed"]

_MONITORED: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENT: Final = struct.Struct("=HI")
_SLACK_S: Final = 1.0
"""Time beyond ZeroMQ's own time-outs after which a connection counts as failed: ZeroMQ does not report all
failures."""


class ZmqLink:
    """One connection opened here. It does not come back once it has ended.

    Attributes:
        pending: frames handed over while the host's name is looked up; None once it is connecting.
        address: the host's address.
        descriptor: the number of its TCP socket, which libzmq owns; -1: it has none yet.
        up: messages can flow.
        deadline: when it counts as failed unless it is up by then, on the local clock.
    """

    __slots__ = (
        "_connected",
        "_started",
        "address",
        "connection",
        "deadline",
        "descriptor",
        "host",
        "monitor",
        "pending",
        "port",
        "socket",
        "up",
    )

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        options: Iterable[SocketOption],
        connection: Connection,
        *,
        host: str,
        port: int,
        limit_s: float,
    ) -> None:
        """Make the sockets.

        Raises:
            zmq.ZMQError: there are no descriptors left.
        """
        self.connection: Final = connection
        self.host: Final = host
        self.port: Final = port
        self.socket: Final = context.socket(zmq.DEALER)
        try:
            for option in options:
                self.socket.setsockopt(getattr(zmq, option.name), option.value)
            self.socket.setsockopt(zmq.ROUTING_ID, LETTER + os.urandom(8))
            self.monitor: Final = self.socket.get_monitor_socket(int(_MONITORED))
        except BaseException:
            self.socket.close(0)  # a socket left open keeps its context from ending
            raise
        self.pending: list[tuple[bytes, bytes | None]] | None = []
        self.address = ""
        self.descriptor = -1
        self.up = False
        self._started = clock.monotonic()
        self.deadline: Final = self._started + limit_s + _SLACK_S
        self._connected = False

    def connect(self, address: str) -> None:
        """Connect to a numeric address."""
        self.address = address
        if ":" in address:
            self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.connect(f"tcp://{bracketed(address)}:{self.port}")

    def read_monitor(self) -> str | None:
        """Process the monitor's events; if the connection has ended, return why, for a person."""
        while True:
            try:
                event, value = _EVENT.unpack(self.monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return None
            if event == zmq.EVENT_CONNECTED:
                self._connected, self.descriptor = True, int(value)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.up = True
            elif event != zmq.EVENT_CLOSED or not self._connected:  # connecting has ended
                return self._reason(event)

    def close(self, linger_ms: int) -> None:
        """Close both sockets."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)

    def no_answer_text(self) -> str:
        """Return the reason of a connection that was not answered."""
        return f"no answer from {self._address_text} for {clock.monotonic() - self._started:.1f} s"

    @property
    def _address_text(self) -> str:
        return f"{self.host}:{self.port}"

    def _reason(self, event: int) -> str:
        if self.up:
            return f"the connection to {self._address_text} was lost"
        if event != zmq.EVENT_CLOSED:
            return f"{self._address_text} does not speak ZeroMQ's protocol, or has closed the connection"
        timeout_s = int(self.socket.getsockopt(zmq.CONNECT_TIMEOUT)) / 1000
        if clock.monotonic() - self._started >= timeout_s:
            return self.no_answer_text()
        return f"{self._address_text} refuses connections, or cannot be reached"


def bracketed(address: str) -> str:
    """Return an address as ZeroMQ's endpoint names have it."""
    return f"[{address}]" if ":" in address else address
