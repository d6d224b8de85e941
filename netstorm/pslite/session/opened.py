"""The side of a session that makes the connections. Pure."""

from __future__ import annotations

import math

from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.protocol.ids import Peer
from netstorm.pslite.session.link_counters import LinkCounters
from netstorm.pslite.session.queue import Outgoing
from netstorm.pslite.session.session import Session, Shared, Wire
from netstorm.pslite.session.states import Event, State

__all__ = ["OpenedSession"]


class OpenedSession(Session):
    """The side that makes the connections."""

    opened_here = True

    def __init__(
        self,
        shared: Shared,
        peer: Peer,
        identity: int,
        *,
        counters: LinkCounters,
        ordered: bool,
        host: str,
        port: int,
    ) -> None:
        super().__init__(shared, peer, identity, counters=counters, ordered=ordered, state=State.IDLE)
        self.host = host
        self.port = port
        self._to_open = False
        self._retry_at = math.inf
        self._failures = 0
        self._tried_at = 0.0

    def submit(self, message: Outgoing, now: float) -> None:
        """Queue a message, and connect if this is the first."""
        super().submit(message, now)
        self.want(now)

    def want(self, now: float) -> None:
        """Connect if that has not been tried yet."""
        if self.state is State.IDLE:
            self._go(Event.WANTED, now)
            self._connect(now)

    def welcome(self, message: m.Welcome, now: float) -> None:
        """Take the answer to Hello.

        Raises:
            ProtocolViolation: it answers something else.
        """
        if message.session != self.identity or self.state is not State.GREETING:
            raise ProtocolViolation(f"a Welcome has no place in state {self.state.value}")
        if self.incarnation is not None and message.incarnation != self.incarnation:
            self._lose(
                Event.REFUSED, f"{self.host}:{self.port} is another process now: it was restarted", now
            )
            return
        self.incarnation = message.incarnation
        self._failures = 0
        self._come_up(Event.WELCOME, message.received, message.beyond, now)

    def refused(self, message: m.Refused, now: float) -> None:
        """Take the answer to Hello."""
        self._lose(Event.REFUSED, f"{self.host}:{self.port} refused this process: {message.reason}", now)

    def broken(self, reason: str, now: float) -> None:
        """Go on without the present connection, and make a new one after a while."""
        super().broken(reason, now)
        if self.state is State.AWAY:
            limits = self._limits
            longest = min(limits.longest_retry_s, limits.first_retry_s * 2**self._failures)
            self._retry_at = now + longest * self._shared.random.uniform(0.5, 1.0)
            self._failures = min(self._failures + 1, 30)

    def tick(self, now: float) -> None:
        """Do what is due."""
        super().tick(now)
        if self.state is State.GREETING:
            if now >= self._lost_at():
                self.reason = self.reason or "no answer"
                self._lose(Event.TOO_LATE, self._away_text(), now)
            elif now >= self._greeting_until():  # Hello or Welcome was lost, corrupted maybe
                self.broken("no answer", now)
        elif self.state is State.AWAY and now >= self._retry_at:
            since = self._since
            self._go(Event.RETRY, now)
            self._since = since
            self._connect(now)

    def due(self) -> float:
        """Return when `tick` has something to do."""
        if self.state is State.GREETING:
            return min(self._lost_at(), self._greeting_until())
        if self.state is State.AWAY:
            return min(self._lost_at(), self._retry_at)
        return super().due()

    def flush(self, wire: Wire, now: float) -> None:
        """Hand over everything that may be handed over now."""
        if self._to_open and self.connection is not None:
            self._to_open = False
            wire.open(self.connection, self.host, self.port)
            if not self._hand_over(wire, self._shared.hello(self), now):
                return
        super().flush(wire, now)

    def _greeting_until(self) -> float:
        patience = math.ldexp(self._limits.greeting_s, self._failures)
        return self._tried_at + min(patience, self._limits.link_timeout_s / 2)

    def _connect(self, now: float) -> None:
        self.connection = self._shared.new_connection()
        self._to_open = True
        self._tried_at = now

    def _away_text(self) -> str:
        return (
            f"no connection to {self.host}:{self.port} for {self._limits.link_timeout_s:.1f} s: {self.reason}"
        )
