"""A session: one exactly-once stream of messages in both directions, over one connection after the other.
Pure.

The process that opened it (`OpenedSession`) makes the connections; the other one (`AcceptedSession`) can only
wait for them. On every connection the opener says Hello before anything else, with what it has received so
far; data flows after the Welcome, which says the same of the other side. What neither has is transmitted
again.
"""

from __future__ import annotations

import math
import random
from typing import Final, Protocol

from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer, encode_body, seal
from netstorm.protocol.ids import Peer
from netstorm.pslite.session.limits import Limits
from netstorm.pslite.session.link_counters import LinkCounters
from netstorm.pslite.session.query_timer import QueryTimer
from netstorm.pslite.session.queue import Outgoing
from netstorm.pslite.session.receiving import ReceivingHalf
from netstorm.pslite.session.sending import SendingHalf
from netstorm.pslite.session.states import TRANSITIONS, Event, State
from netstorm.pslite.van.interface import Connection

__all__ = ["Session", "Shared", "Wire"]


class Wire(Protocol):
    """The part of a van that sessions use."""

    def open(self, connection: Connection, host: str, port: int) -> None:
        """See `Van`."""

    def transmit(self, connection: Connection, header: bytes, payload: Buffer | None) -> bool:
        """See `Van`."""

    def close(self, connection: Connection) -> None:
        """See `Van`."""


class Shared(Protocol):
    """What all sessions of a process share; the endpoint is it."""

    @property
    def limits(self) -> Limits:
        """How patient to be."""

    @property
    def incarnation(self) -> int:
        """Random number of this process."""

    @property
    def random(self) -> random.Random:
        """Where randomness comes from."""

    def stamp(self) -> int:
        """Return the cluster clock, in ns."""

    def new_connection(self) -> Connection:
        """Return a connection number that was never used."""

    def hello(self, session: Session) -> m.Hello:
        """Return how this process introduces itself over a session's new connection."""

    def new_sending(self, peer: Peer) -> SendingHalf:
        """Return the sending half of a new session."""

    def contended(self, peer: Peer) -> bool:
        """Return whether other links are busy that may slow the one to `peer`."""

    def release(self, connection: Connection) -> None:
        """Close a connection; what comes over it from now on is ignored."""


class Session:
    """What both sides of a session have in common."""

    opened_here = False

    def __init__(
        self,
        shared: Shared,
        peer: Peer,
        identity: int,
        *,
        counters: LinkCounters,
        ordered: bool,
        state: State,
    ) -> None:
        self._shared: Final = shared
        self._limits: Final = shared.limits
        self.peer: Final = peer
        self.identity: Final = identity
        self.state = state
        self.connection: Connection | None = None
        self.incarnation: int | None = None
        """Of the other process; None before it has said so."""
        self.sending: Final = shared.new_sending(peer)
        self.receiving: Final = ReceivingHalf(ordered=ordered)
        self.counters: Final = counters
        self.reason = ""
        """Why it is away or lost."""
        self.ending = False
        """The end is wanted once everything is acknowledged."""
        self.undelivered: list[Outgoing] = []
        """What was not acknowledged when it was lost, in order."""
        self.acknowledge = False
        """Something came that has to be acknowledged."""
        self._control: list[m.SessionMessage] = []
        self._datagrams: list[bytes] = []
        self._since = 0.0
        """When the present state began; for a session that is not up, when it last was."""
        # Whoever opened it tries another connection then, for as long again; the other side can only wait.
        patience_s = shared.limits.link_timeout_s * (1 if self.opened_here else 2)
        self._queries: Final = QueryTimer(shared.limits, self.sending.window, patience_s)
        self._answer_to = 0
        """Number of the query that the next acknowledgement answers."""

    # ---------------------------------------------------------------------------------------------- the user

    def submit(self, message: Outgoing, now: float) -> None:
        """Queue a message for exactly-once delivery."""
        if self.state is State.AWAY and not self.sending.has_work():
            self._since = now  # until now nobody missed the connection
        self.sending.submit(message)

    def submit_datagram(self, body: bytes, now: float) -> None:
        """Send a message that may be lost; it is, if there is no connection now."""
        if self.state is State.UP:
            self._datagrams.append(body)

    def end(self, now: float, *, at_once: bool) -> None:
        """End it on purpose; unless `at_once`, after everything queued is acknowledged."""
        self.ending = True
        if at_once:
            self.sending.clear()
        if self.state is State.UP:
            if not self.sending.has_work():
                self._part(now)
        elif self.state in (State.IDLE, State.GREETING, State.AWAY) and not self.sending.has_work():
            self._go(Event.DROPPED, now)
            self._forget_connection()

    # ----------------------------------------------------------------------------------------- the other side

    def take_session_message(self, message: m.SessionMessage, now: float) -> None:
        """Take a message that is for the session itself; not Hello.

        Raises:
            ProtocolViolation: it makes no sense now.
        """
        if isinstance(message, m.Ack):
            self._acknowledged(message, now)
        elif isinstance(message, m.Nack):
            if self.sending.not_received(message.sequence):
                self.counters.drop("nacked")
        elif isinstance(message, m.Query):
            self._answer_to = message.number
            self.acknowledge = True
        elif isinstance(message, m.Goodbye):
            self._goodbye(now)
        else:
            raise ProtocolViolation(f"{type(message).__name__} has no place in state {self.state.value}")

    def corrupt(self, sequence: int) -> None:
        """Ask for a message again whose payload failed its checksum."""
        self._control.append(m.Nack(sequence=sequence))

    def broken(self, reason: str, now: float) -> None:
        """Go on without the present connection."""
        if self.state in (State.GREETING, State.UP, State.PARTING):
            was_up = self.state is State.UP
            self._forget_connection()
            self.reason = reason
            since = self._since
            self._go(Event.BROKEN, now)
            if not was_up:
                self._since = since  # being away began earlier
            self.sending.disconnected()

    # -------------------------------------------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.state is State.UP:
            self._watch(now)
        elif self.state is State.PARTING and now >= self._since + self._limits.goodbye_s:
            self._go(Event.ENOUGH, now)
            self._forget_connection()
        elif self.state is State.AWAY and now >= self._lost_at():
            self._lose(Event.TOO_LATE, self._away_text(), now)

    def due(self) -> float:
        """Return when `tick` has something to do."""
        if self.state is State.UP:
            return self._queries.due()
        if self.state is State.PARTING:
            return self._since + self._limits.goodbye_s
        if self.state is State.AWAY:
            return self._lost_at()
        return math.inf

    def flush(self, wire: Wire, now: float) -> None:
        """Hand over everything that may be handed over now."""
        if self.state is not State.UP and self.state is not State.PARTING:
            return
        if self._control or self._datagrams:
            bodies = [encode_body(message) for message in self._control] + self._datagrams
            self._control, self._datagrams = [], []
            for body in bodies:
                if not self._transmit(wire, body, None, now):
                    return
        if self.acknowledge:
            self.acknowledge = False
            received, beyond = self.receiving.missing_from()
            if not self._hand_over(wire, m.Ack(received=received, beyond=beyond, query=self._answer_to), now):
                return
        if self.state is State.UP:
            self._pump(wire, now)
            if self.ending and not self.sending.has_work():
                self._part(now)
                self.flush(wire, now)

    # ------------------------------------------------------------------------------------------------- inside

    def _go(self, event: Event, now: float) -> None:
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ProtocolViolation(f"{event.value} has no place in state {self.state.value}")
        self.state = following
        self._since = now

    def _pump(self, wire: Wire, now: float) -> None:
        sending = self.sending
        idle = not sending.unacknowledged
        message = sending.next(now)
        if message is None:
            return
        if idle:
            self._queries.progress(now)
            self._queries.expect(something=True)
        while message is not None:
            if not self._transmit(wire, message.body, message, now):
                return
            message = sending.next(now)

    def _hand_over(self, wire: Wire, message: m.Message, now: float) -> bool:
        return self._transmit(wire, encode_body(message), None, now)

    def _transmit(self, wire: Wire, body: bytes, message: Outgoing | None, now: float) -> bool:
        assert self.connection is not None
        stamp = self._shared.stamp()
        counters = self.counters
        if message is None:
            header = seal(body, sequence=0, sent_at=stamp, payload_crc=None)
            taken = wire.transmit(self.connection, header, None)
            size = len(header)
        else:
            again = message.transmissions > 1
            header = seal(
                body,
                sequence=message.sequence,
                sent_at=stamp,
                payload_crc=message.crc(),
                resent=again,
                contended=message.payload is not None and self._shared.contended(self.peer),
            )
            taken = wire.transmit(self.connection, header, message.payload)
            size = len(header) + message.size - len(body)
            if again and taken:
                counters.messages_resent += 1
                counters.bytes_resent += size
        if not taken:
            self.broken("the connection takes no more messages", now)
            return False
        counters.messages_sent += 1
        counters.bytes_sent += size
        return True

    def _acknowledged(self, ack: m.Ack, now: float) -> None:
        queries, sending = self._queries, self.sending
        if sending.acknowledge(ack.received, ack.beyond, now, mark=queries.mark_of(ack.query)):
            queries.progress(now)
        queries.expect(something=bool(sending.unacknowledged))

    def _watch(self, now: float) -> None:
        """Ask if nothing is acknowledged any more."""
        silence = self._queries.silence(self.counters.heard_at, now)
        if silence:
            self._unanswered(f"no answer for {silence:.1f} s", now)
        elif self._queries.wants_to_ask(now):
            self._control.append(m.Query(number=self._queries.ask(self.sending.mark(), now)))

    def _unanswered(self, reason: str, now: float) -> None:
        """Give up a connection that lives, but over which nobody answers."""
        self.broken(reason, now)

    def _part(self, now: float) -> None:
        self._go(Event.DRAINED, now)
        self._control.append(m.Goodbye())

    def _goodbye(self, now: float) -> None:
        if self.state is State.UP:
            self._control.append(m.Goodbye())
        self._go(Event.GOODBYE, now)
        self.sending.clear()
        if self.state is State.OVER:
            self._forget_connection()

    def _come_up(self, event: Event, received: int, beyond: tuple[int, ...], now: float) -> None:
        """Begin on a new connection, knowing what the other side has.

        Raises:
            ProtocolViolation: it has what was never sent.
        """
        self.sending.disconnected()
        self.sending.acknowledge(received, beyond, now)
        self._go(event, now)
        self.counters.connections += 1
        self.reason = ""
        self._answer_to = 0
        self._queries.stop()
        self._queries.progress(now)
        self._queries.expect(something=bool(self.sending.unacknowledged))
        if self.ending and not self.sending.has_work():
            self._part(now)

    def _lost_at(self) -> float:
        return self._since + self._limits.link_timeout_s

    def _away_text(self) -> str:
        return f"no connection for {self._limits.link_timeout_s:.1f} s: {self.reason}"

    def _lose(self, event: Event, reason: str, now: float) -> None:
        self._forget_connection()
        self._go(event, now)
        self.reason = reason
        self.undelivered = self.sending.take_all()

    def _forget_connection(self) -> None:
        if self.connection is not None:
            self._shared.release(self.connection)
            self.connection = None
        self._control.clear()
        self._datagrams.clear()
        self.acknowledge = False
