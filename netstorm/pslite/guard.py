"""Stands between a van's sockets and strangers: keys, refused connections, and users that are removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import zmq

from netstorm.observe.log import Counters, Drops
from netstorm.pslite.security.admission import Admission
from netstorm.pslite.security.credentials import Credentials
from netstorm.pslite.security.handshake_texts import Mismatch
from netstorm.pslite.security.process_proof import fresh_number
from netstorm.pslite.van.interface import Broken, Connection, VanEvent
from netstorm.pslite.zeromq.authenticator import Authenticator
from netstorm.pslite.zeromq.identities import LETTER
from netstorm.pslite.zeromq.refused_connections import RefusedConnections
from netstorm.pslite.zeromq.senders import Senders
from netstorm.pslite.zeromq.tcp_info import descriptor_of
from netstorm.pslite.zeromq.users import Users
from netstorm.pslite.zeromq.waiting_connections import WaitingConnections

__all__ = ["Guard"]


class Guard:
    """Guards one van. All methods belong to its thread.

    Attributes:
        authenticator: encrypts and answers; None: connections are plain.
        senders: whose connections were accepted; None: connections are plain, and nobody knows.
        users: those of them that can be expelled; None: nobody can.
        waiting: connections that have no session.
        mismatches: why handshakes with other processes have failed, by host and port. The side that notices
            first closes the connection, and the other one may see no more than that.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        credentials: Credentials | None,
        admission: Admission | None,
        counters: Counters,
        *,
        link_timeout_s: float,
        max_message_bytes: int,
    ) -> None:
        """Begin before the van listens."""
        self._context: Final = context
        self._counters: Final = counters
        self._refusals: Final = Drops(counters, counted_as="refused", what="refused a connection")
        self._refused: RefusedConnections | None = None
        self.waiting: Final = WaitingConnections(
            self._refusals, limit_s=link_timeout_s, max_message_bytes=max_message_bytes
        )
        self.mismatches: Final[dict[tuple[str, int], Mismatch]] = {}
        self.authenticator: Final = (
            Authenticator(context, credentials, admission, self._refusals)
            if credentials is not None and admission is not None
            else None
        )
        self.senders: Final = None if credentials is None else Senders(credentials.proof, self._refusals)
        self.users: Final = (
            Users(admission.admits) if admission is not None and admission.can_change else None
        )

    def fresh_identity(self) -> bytes:
        """Return the identity of a connection that is opened here."""
        own = self.authenticator
        return LETTER + (fresh_number() if own is None else own.fresh_proof())

    def watch(self, watch: Callable[[zmq.Socket[bytes], Callable[[], None]], None]) -> None:
        """Have ZeroMQ's questions answered; `watch` watches a socket."""
        if self.authenticator is not None:
            watch(self.authenticator.socket, self.authenticator.answer)

    def protect(self, router: zmq.Socket[bytes]) -> None:
        """Let a socket refuse strangers, before it listens."""
        if self.authenticator is not None:
            self.authenticator.encrypt_accepting(router)
        self._refused = RefusedConnections(
            self._context,
            router,
            self._refusals,
            self._counters,
            self.waiting,
            has_key=self.authenticator is not None,
        )

    def is_open(self, descriptor: int) -> bool:
        """Return whether a connection that ZeroMQ has accepted is open now."""
        if self._refused is None:
            return False
        self._refused.read()
        return self._refused.is_open(descriptor)

    def listening(
        self,
        port: int,
        watch: Callable[[zmq.Socket[bytes], Callable[[], None]], None],
        on_end: Callable[[int], None],
    ) -> None:
        """Record that the socket listens; `watch` watches a socket, `on_end` is told of the descriptors of
        connections that have ended.
        """
        if self._refused is not None:
            self._refused.on_end = on_end
            watch(self._refused.socket, self._refused.read)
        self.waiting.port = port
        if self.senders is not None:
            self.senders.port = port
        if self.users is not None:
            self.users.port = port

    def heard(self, connection: Connection, frame: zmq.Frame, user: str) -> None:
        """Record the first message over a connection that another process has opened."""
        if self._refused is not None:
            self._refused.read()  # its descriptor may be that of one whose end is not known here yet
        self.waiting.heard(connection, descriptor_of(frame), user)

    def expelled(self) -> list[VanEvent]:
        """Return the connections of users that were removed since the last call; they are cut."""
        if self.authenticator is None or self.users is None:
            return []
        removed = self.authenticator.removed()
        return [
            Broken(connection, f"the key of {removed[user]} was removed (NETSTORM_ALLOW)", expelled=True)
            for user, connection in self.users.expel(removed)
        ]

    def unprotect(self) -> None:
        """Stop watching the socket, before it is closed."""
        if self._refused is not None:
            self._refused.close()
            self._refused = None

    def close(self) -> None:
        """Close everything else, after all other sockets."""
        if self.authenticator is not None:
            self.authenticator.close()
