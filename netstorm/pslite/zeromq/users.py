"""Which connections belong to which user, so that those of a removed one can be ended.

A ROUTER cannot disconnect a peer. So the TCP connection is shut down, and until ZeroMQ has noticed that,
whatever it still delivers is dropped.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable
from typing import Final

import zmq

from netstorm.pslite.van.interface import Connection
from netstorm.pslite.zeromq.tcp_info import borrowed_socket

__all__ = ["Users"]

_MOST_CONNECTIONS: Final = 64
"""Of one user that are remembered: a node needs two, and one more for each that has just broken."""


class Users:
    """The users whose connections were accepted, for jobs with an allow list.

    A user's name is what the authenticator has answered; the peer cannot choose it.

    Attributes:
        port: on which connections are accepted.
    """

    def __init__(self, admits: Callable[[str], bool]) -> None:
        self.port = 0
        self._admits: Final = admits
        self._connections: Final[dict[str, dict[Connection, int]]] = {}
        """By user: its connections, oldest first, with the descriptors of their TCP connections."""

    def of(self, connection: Connection, frame: zmq.Frame) -> str:
        """Return the sender of a message; empty: it is not admitted any more, and its connection is cut."""
        try:
            user, descriptor = str(frame.get("User-Id")), int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            return ""
        if not self._admits(user):
            self._cut(descriptor)
            return ""
        known = self._connections.setdefault(user, {})
        if connection not in known:
            if len(known) >= _MOST_CONNECTIONS:
                del known[next(iter(known))]
            known[connection] = descriptor
        return user

    def expel(self, users: Iterable[str]) -> list[tuple[str, Connection]]:
        """Cut the connections of users; return each with its user."""
        expelled = []
        for user in users:
            for connection, descriptor in self._connections.pop(user, {}).items():
                expelled.append((user, connection))
                self._cut(descriptor)
        return expelled

    def _cut(self, descriptor: int) -> None:
        """Shut down a TCP connection that ZeroMQ owns.

        If ZeroMQ has closed it, and its number has become that of another connection to this port, that one
        breaks, and its session makes a new one.
        """
        with contextlib.suppress(OSError), borrowed_socket(descriptor) as connection:
            if connection.getsockname()[1] == self.port:
                connection.shutdown(socket.SHUT_RDWR)
