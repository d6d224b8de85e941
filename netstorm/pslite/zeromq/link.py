"""A connection opened here: a DEALER under a fresh identity, and the monitor that reports its state."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

import zmq

from netstorm import clock
from netstorm.addresses import host_port
from netstorm.pslite.security.handshake_texts import Mismatch, reason_of_opener
from netstorm.pslite.van.interface import Connection
from netstorm.pslite.zeromq.guard import Guard
from netstorm.pslite.zeromq.options import SocketOption

__all__ = ["ZmqLink"]

_MONITORED: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MECHANISM_MISMATCH: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
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
        refused: no process listens at the address.
        deadline: when it counts as failed unless it is up by then, on the local clock.
    """

    __slots__ = (
        "_connected",
        "_guard",
        "_started",
        "address",
        "connection",
        "deadline",
        "descriptor",
        "host",
        "monitor",
        "pending",
        "port",
        "refused",
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
        guard: Guard,
    ) -> None:
        """Make the sockets. `guard` encrypts the connection, if there is a key.

        Raises:
            zmq.ZMQError: there are no descriptors left.
        """
        self.connection: Final = connection
        self.host: Final = host
        self.port: Final = port
        self._guard: Final = guard
        self.socket: Final = context.socket(zmq.DEALER)
        try:
            for option in options:
                self.socket.setsockopt(getattr(zmq, option.name), option.value)
            self.socket.setsockopt(zmq.ROUTING_ID, guard.fresh_identity())
            if guard.authenticator is not None:
                guard.authenticator.encrypt_opening(self.socket)
            self.monitor: Final = self.socket.get_monitor_socket(int(_MONITORED))
        except BaseException:
            self.socket.close(0)  # a socket left open keeps its context from ending
            raise
        self.pending: list[tuple[bytes, bytes | None]] | None = []
        self.address = ""
        self.descriptor = -1
        self.up = False
        self.refused = False
        self._started = clock.monotonic()
        self.deadline: Final = self._started + limit_s + _SLACK_S
        self._connected = False

    def connect(self, address: str) -> None:
        """Connect to a numeric address."""
        self.address = address
        if ":" in address:
            self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.connect(f"tcp://{host_port(address, self.port)}")

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
                self._guard.mismatches.pop((self.host, self.port), None)
            elif event != zmq.EVENT_CLOSED or not self._connected:  # connecting has ended
                return self._reason(event, value)

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
        return host_port(self.host, self.port)

    def _reason(self, event: int, value: int) -> str:
        if self.up:
            return f"the connection to {self._address_text} was lost"
        mismatch = self._mismatch(event, value)
        if mismatch is not None:
            own = self._guard.authenticator
            return reason_of_opener(
                self._address_text, mismatch, has_key=own is not None, name="" if own is None else own.name
            )
        if event != zmq.EVENT_CLOSED:
            return f"{self._address_text} does not speak ZeroMQ's protocol, or has closed the connection"
        timeout_s = int(self.socket.getsockopt(zmq.CONNECT_TIMEOUT)) / 1000
        if clock.monotonic() - self._started >= timeout_s:
            return self.no_answer_text()
        self.refused = True
        return f"{self._address_text} refuses connections, or cannot be reached"

    def _mismatch(self, event: int, value: int) -> Mismatch | None:
        """Return which keys do not match; None: that is not why the handshake has failed."""
        seen = self._guard.mismatches
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
            seen[self.host, self.port] = Mismatch.MECHANISM
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            seen[self.host, self.port] = Mismatch.NOT_ADMITTED
        elif event == zmq.EVENT_CLOSED:
            return None
        if self._guard.authenticator is None:
            return seen.get((self.host, self.port))
        # With another key the other side cannot read the first message, and closes the connection.
        return seen.get((self.host, self.port), Mismatch.KEY)
