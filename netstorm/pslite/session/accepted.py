"""The side of a session that waits for its peer's connections. Pure."""

from __future__ import annotations

import math
from typing import Final

from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.pslite.session.link_counters import LinkCounters
from netstorm.pslite.session.session import Session, SessionContext
from netstorm.pslite.session.states import Event, State
from netstorm.pslite.van.interface import Connection

__all__ = ["AcceptedSession"]


class AcceptedSession(Session):
    """The side that waits for connections."""

    def __init__(
        self, context: SessionContext, peer: Peer, hello: m.Hello, *, counters: LinkCounters, ordered: bool
    ) -> None:
        super().__init__(
            context, peer, hello.session, counters=counters, ordered=ordered, state=State.DISCONNECTED
        )
        self.incarnation: int = hello.incarnation
        self._token: Final = context.tokens.getrandbits(63)

    def is_that_of(self, hello: m.Hello) -> bool:
        """Return whether a Hello goes on with this session."""
        return (hello.incarnation, hello.session) == (self.incarnation, self.identity)

    def hello(self, hello: m.Hello, connection: Connection, now: float) -> None:
        """Go on over a new connection.

        Raises:
            ProtocolViolation: the Hello acknowledges what was never sent, or the session is ending.
        """
        self.sending.check(hello.received, hello.beyond)  # before the present connection is given up for it
        if self.state is State.UP:
            self.broken("replaced by a new connection", now)
        received, beyond = self.receiving.received_numbers()
        self.unchecked = hello.boot != 0 and hello.boot == self._context.boot
        self._control = [
            m.Welcome(
                incarnation=self._context.incarnation,
                session=self.identity,
                received=received,
                beyond=beyond,
                unchecked=self.unchecked,
                token=self._token,
            )
        ]
        self._establish(Event.HELLO, hello.received, hello.beyond, now)
        self.connection = connection

    def _unanswered(self, reason: str, now: float) -> None:
        """Lose the session: this side cannot make another connection."""
        self._lose(Event.TIMED_OUT, reason, now)

    def due(self) -> float:
        """Return when `tick` has something to do."""
        if self.state is State.DISCONNECTED and not self.sending.has_work():
            return math.inf  # nothing to send: the peer connects again when it has something to send
        return super().due()

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.state is not State.DISCONNECTED or self.sending.has_work():
            super().tick(now)
