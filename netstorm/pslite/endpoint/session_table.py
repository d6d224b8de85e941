"""The sessions of a process: by peer, by connection, and those that have something to send. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import Hello
from netstorm.pslite.endpoint.recent_set import RecentSet
from netstorm.pslite.session.accepted import AcceptedSession
from netstorm.pslite.session.opened import OpenedSession
from netstorm.pslite.session.session import Session
from netstorm.pslite.session.states import State
from netstorm.pslite.van.interface import Connection

__all__ = ["SessionTable"]

_REMEMBERED: Final = 256
"""How many closed connections, and ended sessions, are remembered."""


class SessionTable:
    """All sessions of a process, and the connections that they use.

    Attributes:
        opened: by peer, the sessions that this process opened.
        accepted: by peer, the sessions that the peer opened.
        by_connection: the session of each connection.
        ending: sessions that are to end once everything is acknowledged, in order; nothing new is sent over
            them.
        dirty: sessions that may have something to send, in order.
        released: connections to close.
        admitted: connections opened by others that sessions use now.
        refused: connections opened by others that are to be cut, and why.
    """

    def __init__(self) -> None:
        self.opened: Final[dict[Peer, OpenedSession]] = {}
        self.accepted: Final[dict[Peer, AcceptedSession]] = {}
        self.by_connection: Final[dict[Connection, Session]] = {}
        self.ending: Final[dict[Session, None]] = {}
        self.dirty: dict[Session, None] = {}
        self.released: Final[list[Connection]] = []
        self.admitted: Final[list[Connection]] = []
        self.refused: Final[list[tuple[Connection, str]]] = []
        self._numbers: Final = itertools.count(1)
        self._retired: Final[RecentSet[Connection]] = RecentSet(_REMEMBERED)
        self._ended: Final[RecentSet[tuple[int, int]]] = RecentSet(_REMEMBERED)
        """(incarnation, session) of accepted sessions that have ended."""

    def __iter__(self) -> Iterator[Session]:
        """Yield the sessions over which messages can be sent."""
        yield from self.opened.values()
        yield from self.accepted.values()

    def of(self, peer: Peer) -> Session | None:
        """Return the session over which messages to a peer are sent."""
        return self.opened.get(peer) or self.accepted.get(peer)

    def with_peer(self, peer: Peer) -> list[Session]:
        """Return the sessions with a peer, whoever opened them."""
        found: tuple[Session | None, ...] = (self.opened.get(peer), self.accepted.get(peer))
        return [session for session in found if session is not None]

    def connections(self) -> dict[Peer, Connection]:
        """Return the connections that were opened here and are in use, by peer."""
        return {
            peer: session.connection
            for peer, session in self.opened.items()
            if session.state is State.UP and session.connection is not None
        }

    def idle(self) -> bool:
        """Return whether everything sent has been acknowledged and no session is ending."""
        return not self.ending and not any(session.sending.has_work() for session in self)

    def take_dirty(self) -> dict[Session, None]:
        """Return the sessions that may have something to send, in order, and forget them."""
        dirty, self.dirty = self.dirty, {}
        return dirty

    # ------------------------------------------------------------------------------------------ connections

    def new_connection(self) -> Connection:
        """Return a connection number that was never used."""
        return Connection(next(self._numbers))

    def release(self, connection: Connection) -> None:
        """Have a connection closed; messages that still arrive over it are ignored."""
        self.by_connection.pop(connection, None)
        self.released.append(connection)
        self._retired.add(connection)

    def was_released(self, connection: Connection) -> bool:
        """Return whether a connection was released recently."""
        return connection in self._retired

    # ---------------------------------------------------------------------------------------------- endings

    def begin_ending(self, session: Session) -> None:
        """Note a session that is to end."""
        self.ending[session] = None
        self.dirty[session] = None

    def remove(self, session: Session) -> bool:
        """Take a session that is over out of the table; False if its peer has another one, or none."""
        session.receiving.drop_held()
        if session.opened_here:
            if self.opened.get(session.peer) is not session:
                return False
            del self.opened[session.peer]
        else:
            if self.accepted.get(session.peer) is not session:
                return False
            del self.accepted[session.peer]
        return True

    def find_ending(self, hello: Hello) -> AcceptedSession | None:
        """Return the ending session that a Hello wants to go on with."""
        for session in self.ending:
            if isinstance(session, AcceptedSession) and session.is_that_of(hello):
                return session
        return None

    def note_end(self, session: Session) -> None:
        """Record whether a session is ending or has ended."""
        if session.state in (State.CLOSED, State.LOST):
            self.ending.pop(session, None)
            session.receiving.drop_held()
        if isinstance(session, AcceptedSession) and session.state in (State.CLOSING, State.CLOSED):
            self._ended.add((session.incarnation, session.identity))

    def has_ended(self, hello: Hello) -> bool:
        """Return whether the session of a Hello has ended: its peer has missed the Goodbye."""
        return (hello.incarnation, hello.session) in self._ended
