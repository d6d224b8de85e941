"""The side of a session that makes the connections, again and again until the link time-out. Pure."""

from __future__ import annotations

import math

from netstorm.addresses import host_port, is_loopback
from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.pslite.session.link_counters import LinkCounters
from netstorm.pslite.session.queue import Outgoing
from netstorm.pslite.session.session import Session, SessionContext
from netstorm.pslite.session.states import Event, State
from netstorm.pslite.van.interface import Transmitter

__all__ = ["OpenedSession"]


class OpenedSession(Session):
    """The side that makes the connections."""

    opened_here = True

    def __init__(
        self,
        context: SessionContext,
        peer: Peer,
        identity: int,
        *,
        counters: LinkCounters,
        ordered: bool,
        host: str,
        port: int,
    ) -> None:
        super().__init__(context, peer, identity, counters=counters, ordered=ordered, state=State.IDLE)
        self.host = host
        self.port = port
        self._to_open = False
        self._retry_at = math.inf
        self._failures = 0
        self._attempted_at = 0.0
        self._token: int | None = None
        """The peer's number of this session; None: it has not answered yet."""
        self._reachable_at = -math.inf
        """When its machine last accepted a connection over which its process did not answer: it is busy."""

    def submit(self, message: Outgoing, now: float) -> None:
        """Queue a message, and connect if this is the first."""
        super().submit(message, now)
        self._connect_if_idle(now)

    def _connect_if_idle(self, now: float) -> None:
        if self.state is State.IDLE:
            self._transition(Event.CONNECT, now)
            self._connect(now)

    def welcome(self, message: m.Welcome, now: float) -> None:
        """Process the peer's answer to Hello.

        Raises:
            ProtocolViolation: it is no answer to the last Hello.
        """
        if message.session != self.identity or self.state is not State.CONNECTING:
            raise ProtocolViolation(f"a Welcome is not legal in state {self.state.value}")
        if self.incarnation is not None and message.incarnation != self.incarnation:
            self._lose(Event.REFUSED, f"{self._address} is another process now: it was restarted", now)
            return
        if self._token not in (None, message.token):
            reason = f"{self.host}:{self.port} is another process now, which says that it is the one before"
            self._lose(Event.REFUSED, reason, now)
            return
        self.incarnation, self._token = message.incarnation, message.token
        self._failures = 0
        self.unchecked = message.unchecked and self._boot() != 0
        self._establish(Event.WELCOME, message.received, message.beyond, now)

    def refused(self, message: m.Refused, now: float) -> None:
        """Process the peer's refusal."""
        self._lose(Event.REFUSED, f"{self._address} refused this process: {message.reason}", now)

    def broken(self, reason: str, now: float) -> None:
        """Note that the present connection is gone, and make a new one after a while."""
        super().broken(reason, now)
        if self.state is State.DISCONNECTED:
            limits = self._limits
            longest = min(limits.longest_retry_s, limits.first_retry_s * 2**self._failures)
            self._retry_at = now + longest * self._context.random.uniform(0.5, 1.0)
            self._failures = min(self._failures + 1, 30)

    def tick(self, now: float) -> None:
        """Do what is due."""
        super().tick(now)
        if self.state is State.CONNECTING:
            overdue = now >= self._link_deadline()
            if (overdue or now >= self._handshake_deadline()) and self._may_wait(now - self._since, now):
                self._reachable_at = now
                overdue = False
            if overdue:
                self.reason = self.reason or "no answer"
                self._lose(Event.TIMED_OUT, self._disconnected_text(), now)
            elif now >= self._handshake_deadline():  # Hello or Welcome was lost or corrupted, or it is busy
                self.broken("no answer", now)
        elif self.state is State.DISCONNECTED and now >= self._retry_at:
            since = self._since
            self._transition(Event.RETRY, now)
            self._since = since
            self._connect(now)

    def due(self) -> float:
        """Return when `tick` has something to do."""
        if self.state is State.CONNECTING:
            return min(self._link_deadline(), self._handshake_deadline())
        if self.state is State.DISCONNECTED:
            return min(self._link_deadline(), self._retry_at)
        return super().due()

    def flush(self, van: Transmitter, now: float) -> None:
        """Hand over to the van everything that may be sent now."""
        if self._to_open and self.connection is not None:
            self._to_open = False
            van.open(self.connection, self.host, self.port)
            if not self._transmit_message(van, self._context.hello(self, self._boot()), now):
                return
        super().flush(van, now)

    def _boot(self) -> int:
        """Return the boot's number if the connection may be one within the machine; else 0.

        An address alone does not say so: behind a loopback address may be a tunnel to elsewhere. Nor does the
        boot: an emulated network within a machine stands for a real one.
        """
        return self._context.boot if is_loopback(self.host) else 0

    def _handshake_deadline(self) -> float:
        timeout_s = math.ldexp(self._limits.handshake_s, self._failures)
        return self._attempted_at + min(timeout_s, self._limits.link_timeout_s / 2)

    def _link_deadline(self) -> float:
        return max(self._since, self._reachable_at) + self._limits.link_timeout_s

    def _connect(self, now: float) -> None:
        self.connection = self._context.new_connection()
        self._to_open = True
        self._attempted_at = now

    def _disconnected_text(self) -> str:
        limit_s = self._limits.link_timeout_s
        return f"no connection to {self._address} for {limit_s:.1f} s: {self.reason}"

    @property
    def _address(self) -> str:
        return host_port(self.host, self.port)
