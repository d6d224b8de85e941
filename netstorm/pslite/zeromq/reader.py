"""Reads messages from ZeroMQ sockets, from each in turn, and drops those that no van sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import zmq

from netstorm import clock
from netstorm.observe.log import Drops
from netstorm.protocol.frames import Buffer
from netstorm.pslite.van.interface import Broken, Connection, Received, VanEvent
from netstorm.pslite.zeromq.guard import Guard
from netstorm.pslite.zeromq.identities import connection_of, is_identity
from netstorm.pslite.zeromq.tcp_info import descriptor_of, shut_down

__all__ = ["ZmqReader"]

_NOBLOCK: Final = int(zmq.NOBLOCK)


class ZmqReader:
    """Sockets that may have something to read.

    Attributes:
        is_open: returns whether a connection that ZeroMQ has accepted is open, by descriptor, after all that
            ZeroMQ has reported so far was read.
    """

    def __init__(self, drops: Drops, guard: Guard) -> None:
        """Begin without sockets.

        Args:
            drops: counts what is dropped.
            guard: knows who has sent a message, and whose are dropped; it is told of connections over which
                messages come.
        """
        self._drops: Final = drops
        self._guard: Final = guard
        self._waiting: Final = guard.waiting
        self._senders: Final = guard.senders
        self._users: Final = guard.users
        self._readable: dict[zmq.Socket[bytes], Connection | None] = {}
        """In the order of their turns; None stands for the ROUTER."""
        self._descriptors: Final[dict[Connection, int]] = {}
        """Of the connections that others have opened, and over which messages came. As many as are open."""
        self._accepted: Final[dict[int, Connection]] = {}
        """The same by descriptor."""
        self._ended: dict[Connection, None] = {}
        """Those whose end is to be told, in order."""
        self.is_open: Callable[[int], bool] = lambda _: False

    def __bool__(self) -> bool:
        return bool(self._readable)

    def __contains__(self, socket: zmq.Socket[bytes]) -> bool:
        return socket in self._readable

    def mark(self, socket: zmq.Socket[bytes], connection: Connection | None) -> None:
        """Note that a socket may have something to read; None: it is the ROUTER."""
        self._readable[socket] = connection

    def forget(self, socket: zmq.Socket[bytes]) -> None:
        """Never read a socket again."""
        self._readable.pop(socket, None)

    def descriptor(self, connection: Connection) -> int:
        """Return the descriptor of a connection that another process has opened; -1: it has ended."""
        return self._descriptors.get(connection, -1)

    def ended(self, descriptor: int) -> bool:
        """Record that ZeroMQ has closed a connection. Return whether messages have come over it: the ROUTER
        may hold more of them, and is to be read before the end is told.
        """
        connection = self._accepted.pop(descriptor, None)
        if connection is None:
            return False
        del self._descriptors[connection]
        self._ended[connection] = None
        return True

    def take_ended(self) -> list[VanEvent]:
        """Return the ends of connections that others have opened. All their messages were read."""
        if not self._ended or None in self._readable.values():
            return []
        ended, self._ended = self._ended, {}
        return [Broken(connection, "the other side has ended the connection") for connection in ended]

    def read(self, events: list[VanEvent], room: int) -> None:
        """Append up to `room` messages to `events`, a fair share of each socket; those that have more stay
        marked.
        """
        while self._readable and room > 0:
            socket, connection = next(iter(self._readable.items()))
            del self._readable[socket]
            share = max(1, room // (len(self._readable) + 1))
            for _ in range(share):
                room -= 1
                if not self.read_one(socket, connection, events):
                    break
            else:
                self._readable[socket] = connection

    def read_one(
        self, socket: zmq.Socket[bytes], connection: Connection | None, events: list[VanEvent]
    ) -> bool:
        """Append one message to `events`, unless no van sends such; False if there is nothing to read."""
        recv: Any = socket.recv
        identity, user = b"", ""
        try:
            if connection is None:
                identity = recv(_NOBLOCK)
            header = recv(_NOBLOCK, False)
        except zmq.Again:
            return False
        frames: tuple[Buffer, ...]
        if header.more:
            payload = recv(_NOBLOCK, False)
            if payload.more:
                self._skip_rest(socket, header)
                return True
            frames = (header.bytes, payload)
        else:
            frames = (header.bytes,)
        if connection is None:
            if self._senders is not None:
                user = self._senders.of(identity, header)
                if not user:
                    return True
            if not is_identity(identity):
                self._drop("identity", header, "its identity is not one of a NetStorm process")
                shut_down(descriptor_of(header), self._waiting.port)
                return True
            connection = connection_of(identity)
            if not self._waiting.knows(connection):
                self._guard.heard(connection, header, user)
            if connection not in self._descriptors:
                self._first_message(connection, descriptor_of(header))
            if self._users is not None and not self._users.admits(user, connection, header):
                self._drop("expelled", header, "the key of its sender is not admitted any more")
                return True
        events.append(Received(connection, frames, user))
        return True

    def _first_message(self, connection: Connection, descriptor: int) -> None:
        open_now = self.is_open(descriptor)  # first: it may report the end of another one of this number
        if descriptor in self._accepted:
            self.ended(descriptor)
        if not open_now:
            self._ended[connection] = None
            return
        self._descriptors[connection], self._accepted[descriptor] = descriptor, connection

    def _skip_rest(self, socket: zmq.Socket[bytes], header: zmq.Frame) -> None:
        while socket.recv(_NOBLOCK, copy=False).more:
            pass
        self._drop("frames", header, "it has more than 2 frames")

    def _drop(self, reason: str, header: zmq.Frame, detail: str) -> None:
        try:
            sender = str(header.get("Peer-Address"))
        except zmq.ZMQError:
            sender = "an unknown address"
        self._drops.note(reason, sender, detail, clock.monotonic())
