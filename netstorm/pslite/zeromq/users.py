"""Which connections belong to which user, so that those of a removed one can be ended.

Their TCP connections are shut down, and until ZeroMQ has noticed that, whatever it still delivers is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import zmq

from netstorm.pslite.van.interface import Connection
from netstorm.pslite.zeromq.tcp_info import descriptor_of, shut_down

__all__ = ["Users"]

_MOST_CONNECTIONS: Final = 64
"""Of one user that are remembered: a node needs two, and one more for each that has just broken."""


class Users:
    """The users whose connections were accepted, for jobs with an allow list.

    Attributes:
        port: on which connections are accepted.
    """

    def __init__(self, admits: Callable[[str], bool]) -> None:
        self.port = 0
        self._admits: Final = admits
        self._connections: Final[dict[str, dict[Connection, int]]] = {}
        """By user: its connections, oldest first, with the descriptors of their TCP connections."""

    def admits(self, user: str, connection: Connection, frame: zmq.Frame) -> bool:
        """Return whether the sender of a message is still admitted; if not, its connection is cut."""
        descriptor = descriptor_of(frame)
        if not self._admits(user):
            shut_down(descriptor, self.port)
            return False
        known = self._connections.setdefault(user, {})
        if connection not in known:
            if len(known) >= _MOST_CONNECTIONS:
                del known[next(iter(known))]
            known[connection] = descriptor
        return True

    def expel(self, users: Iterable[str]) -> list[tuple[str, Connection]]:
        """Cut the connections of users; return each with its user."""
        expelled = []
        for user in users:
            for connection, descriptor in self._connections.pop(user, {}).items():
                expelled.append((user, connection))
                shut_down(descriptor, self.port)
        return expelled
