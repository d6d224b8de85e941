"""Counts connections to the ROUTER, and those that it has refused in the handshake, and logs why.

ZeroMQ reports them through a monitor: a connection's descriptor when it is accepted and when it ends, and in
between, if so, why its handshake has failed. One thread of ZeroMQ reports both ends of a failure at once, so
the end that follows a failure is that of the same connection. Of some protocols, such as HTTP, ZeroMQ reports
no failure: such connections are accepted, and never established.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable
from typing import Final

import zmq

from netstorm import clock
from netstorm.addresses import plain_address
from netstorm.observe.log import Counters, Drops
from netstorm.pslite.zeromq.tcp_info import borrowed_socket
from netstorm.pslite.zeromq.waiting_connections import WaitingConnections

__all__ = ["RefusedConnections"]

_EVENT: Final = struct.Struct("=HI")

_MONITORED: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_MISMATCH: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_CRYPTOGRAPHIC: Final = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)

_numbers: Final = itertools.count()
"""Distinguish the monitors of a process."""


class RefusedConnections:
    """Reads the monitor of a ROUTER.

    Attributes:
        socket: to be watched; call `read` when it is readable.
        on_end: called with the descriptor of each connection that has ended.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        refusals: Drops,
        counters: Counters,
        waiting: WaitingConnections,
        *,
        has_key: bool,
    ) -> None:
        """Begin before the ROUTER listens. `has_key`: whether it requires the job's key."""
        self._waiting: Final = waiting
        self._router: Final = router
        self._refusals: Final = refusals
        self._counters: Final = counters
        self._has_key: Final = has_key
        self._senders: Final[dict[int, str]] = {}
        """Addresses of the connections that are open, by descriptor."""
        self._failure: tuple[int, int] | None = None
        self.on_end: Callable[[int], None] = lambda _: None
        endpoint = f"inproc://netstorm-refused-{os.getpid()}-{next(_numbers)}"
        router.monitor(endpoint, int(_MONITORED))
        self.socket: Final = context.socket(zmq.PAIR)
        # Without a limit: at a limit ZeroMQ's thread would wait for this one, and nothing would move.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def read(self) -> None:
        """Process all events that have come."""
        while True:
            try:
                event, value = _EVENT.unpack(self.socket.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if event == zmq.EVENT_ACCEPTED:
                self._counters.add("accepted_connections")
                self._senders[value] = _peer_of(value)
                self._waiting.accepted(value, self._senders[value], clock.monotonic())
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._counters.add("established_connections")
            elif event != zmq.EVENT_DISCONNECTED:
                self._failure = (event, value)
            else:
                self._waiting.ended(value)
                self.on_end(value)
                sender = self._senders.pop(value, "an unknown address")
                failure, self._failure = self._failure, None
                if failure is not None:
                    self._note(*failure, sender)

    def is_open(self, descriptor: int) -> bool:
        """Return whether a connection is open, as far as `read` has heard."""
        return descriptor in self._senders

    def close(self) -> None:
        """Close the monitor; before the ROUTER."""
        self._router.disable_monitor()
        self.socket.close(0)

    def _note(self, event: int, value: int, sender: str) -> None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return  # the authenticator has counted it, and knows more
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            # Of two sides without a common key either may notice first, and the other one sees only the end.
            reason, detail = "handshake", "it has ended before it was established (without the job's key?)"
        elif value == _MISMATCH and self._has_key:
            reason, detail = "no_key", "it is not encrypted: a process of this job needs NETSTORM_KEY_FILE"
        elif value == _MISMATCH:
            reason, detail = "encrypted", "it is encrypted, but this process has no key (NETSTORM_KEY_FILE)"
        elif value == _CRYPTOGRAPHIC:
            reason, detail = "key", "it has the key of another job (NETSTORM_KEY_FILE), or was tampered with"
        else:
            detail = "it does not speak ZeroMQ's protocol, or repeats or changes what a process has sent"
            reason = "protocol"
        self._refusals.note(reason, sender, detail, clock.monotonic())


def _peer_of(descriptor: int) -> str:
    """Return the address at the other end of a connection, which ZeroMQ may have closed by now."""
    try:
        with borrowed_socket(descriptor) as connection:
            return plain_address(str(connection.getpeername()[0]))
    except (OSError, IndexError):
        return "an unknown address"
