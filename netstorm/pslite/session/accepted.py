"""The side of a session that waits for connections. Pure."""

from __future__ import annotations

import math

from netstorm.protocol import messages as m
from netstorm.protocol.ids import Peer
from netstorm.pslite.session.link_counters import LinkCounters
from netstorm.pslite.session.session import Session, Shared
from netstorm.pslite.session.states import Event, State
from netstorm.pslite.van.interface import Connection

__all__ = ["AcceptedSession"]


class AcceptedSession(Session):
    """The side that waits for connections."""

    def __init__(
        self, shared: Shared, peer: Peer, hello: m.Hello, *, counters: LinkCounters, ordered: bool
    ) -> None:
        super().__init__(shared, peer, hello.session, counters=counters, ordered=ordered, state=State.AWAY)
        self.incarnation: int = hello.incarnation

    def is_that_of(self, hello: m.Hello) -> bool:
        """Return whether a Hello wants to go on with this session."""
        return (hello.incarnation, hello.session) == (self.incarnation, self.identity)

    def hello(self, hello: m.Hello, connection: Connection, now: float) -> None:
        """Go on over a new connection.

        Raises:
            ProtocolViolation: the Hello acknowledges what was never sent, or the session is ending.
        """
        self.sending.check(hello.received, hello.beyond)  # before the present connection is given up for it
        if self.state is State.UP:
            self.broken("replaced by another one", now)
        received, beyond = self.receiving.missing_from()
        self._control = [
            m.Welcome(
                incarnation=self._shared.incarnation, session=self.identity, received=received, beyond=beyond
            )
        ]
        self._come_up(Event.HELLO, hello.received, hello.beyond, now)
        self.connection = connection

    def _unanswered(self, reason: str, now: float) -> None:
        """Lose the session: giving up the connection would not bring another one."""
        self._lose(Event.TOO_LATE, reason, now)

    def due(self) -> float:
        """Return when `tick` has something to do."""
        if self.state is State.AWAY and not self.sending.has_work():
            return math.inf  # nothing to say: the other side comes back when it has something
        return super().due()

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.state is not State.AWAY or self.sending.has_work():
            super().tick(now)
