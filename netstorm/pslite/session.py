"""A session: one exactly-once stream of messages in both directions, over one connection after the other.
Pure.

The process that opened it (`OpenedSession`) makes the connections; the other one (`AcceptedSession`) can only
wait for them. On every connection the opener says Hello before anything else, with what it has received so
far; data flows after the Welcome, which says the same of the other side. What neither has is transmitted
again.

`TRANSITIONS` is all there is to know about the states; docs draw their figure from it.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer, encode_body, seal
from netstorm.protocol.ids import Peer
from netstorm.pslite.limits import Limits
from netstorm.pslite.link_counters import LinkCounters
from netstorm.pslite.queue import Outgoing
from netstorm.pslite.receiving import ReceivingHalf
from netstorm.pslite.sending import SendingHalf
from netstorm.pslite.van import Connection
from netstorm.pslite.window import Window

__all__ = ["TRANSITIONS", "AcceptedSession", "Event", "OpenedSession", "Session", "Shared", "State", "Wire"]


class State(enum.Enum):
    """Where a session is in its life."""

    IDLE = "idle"
    """Opened here, and nothing has been sent yet: no connection."""
    GREETING = "greeting"
    """A connection has been asked for and Hello handed over; no answer yet."""
    UP = "up"
    """Messages flow."""
    AWAY = "away"
    """Between two connections."""
    PARTING = "parting"
    """Goodbye has been said here; the other side's is awaited, but not for long."""
    OVER = "over"
    """Ended on purpose."""
    LOST = "lost"
    """Could not be re-established in time, or was refused."""


class Event(enum.Enum):
    """What can happen to a session."""

    WANTED = "first message"
    RETRY = "time for another attempt"
    HELLO = "Hello on a new connection"
    WELCOME = "Welcome"
    BROKEN = "connection broken or silent"
    REFUSED = "Refused, or another process answers"
    TOO_LATE = "no connection within the link time-out"
    DRAINED = "everything acknowledged, and the end is wanted"
    GOODBYE = "Goodbye"
    DROPPED = "the end is wanted at once, and there is no connection"
    ENOUGH = "no Goodbye in time"


_S, _E = State, Event
TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = MappingProxyType(
    {
        _S.IDLE: {_E.WANTED: _S.GREETING, _E.DROPPED: _S.OVER},
        _S.GREETING: {
            _E.WELCOME: _S.UP,
            _E.BROKEN: _S.AWAY,
            _E.REFUSED: _S.LOST,
            _E.TOO_LATE: _S.LOST,
            _E.DROPPED: _S.OVER,
        },
        _S.UP: {
            _E.HELLO: _S.UP,
            _E.BROKEN: _S.AWAY,
            _E.REFUSED: _S.LOST,
            _E.DRAINED: _S.PARTING,
            _E.GOODBYE: _S.PARTING,
        },
        _S.AWAY: {
            _E.RETRY: _S.GREETING,
            _E.HELLO: _S.UP,
            _E.TOO_LATE: _S.LOST,
            _E.DROPPED: _S.OVER,
        },
        _S.PARTING: {_E.GOODBYE: _S.OVER, _E.BROKEN: _S.OVER, _E.ENOUGH: _S.OVER},
        _S.OVER: {},
        _S.LOST: {},
    }
)


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

    def hello(self, session: OpenedSession) -> m.Hello:
        """Return how this process introduces itself."""

    def release(self, connection: Connection) -> None:
        """Close a connection; what comes over it from now on is ignored."""


class Session:
    """What both sides of a session have in common."""

    opened_here = False

    def __init__(self, shared: Shared, peer: Peer, identity: int, *, ordered: bool, state: State) -> None:
        self._shared: Final = shared
        self._limits: Final = shared.limits
        self.peer: Final = peer
        self.identity: Final = identity
        self.state = state
        self.connection: Connection | None = None
        self.incarnation: int | None = None
        """Of the other process; None before it has said so."""
        self.sending: Final = SendingHalf(Window(shared.limits.window_bytes))
        self.receiving: Final = ReceivingHalf(ordered=ordered)
        self.counters: Final = LinkCounters()
        self.heard_at = -math.inf
        self.heard: m.Message | None = None
        """The last message that came, of any kind."""
        self.reason = ""
        """Why it is away or lost."""
        self.ending = False
        """The end is wanted once everything is acknowledged."""
        self.acknowledge = False
        """Something came that has to be acknowledged."""
        self._control: list[m.SessionMessage] = []
        self._datagrams: list[bytes] = []
        self._since = 0.0
        """When the present state began; for a session that is not up, when it last was."""
        self._progress_at = 0.0
        self._next_query = math.inf
        self._unanswered_since = math.inf
        self._queries = 0
        self._query_mark = 0
        self._asked_at = -math.inf
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
            self._acknowledged(message.received, message.beyond, now, query=message.query)
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
            self._next_query = math.inf

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
            return min(self._next_query, self._unanswered_since + self._patience())
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
            self._progress_at = now
            self._next_query = now + self._query_after()
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
                body, sequence=message.sequence, sent_at=stamp, payload_crc=message.crc(), resent=again
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

    def _acknowledged(self, received: int, beyond: tuple[int, ...], now: float, *, query: int) -> None:
        if query > self._queries:
            raise ProtocolViolation(f"answers query {query}, and {self._queries} were sent")
        mark = self._query_mark if query and query == self._queries else 0
        if self.sending.acknowledge(received, beyond, now, mark=mark):
            self._progress_at = now
        self._next_query = (
            max(self._progress_at, self._asked_at) + self._query_after()
            if self.sending.unacknowledged
            else math.inf
        )

    def _watch(self, now: float) -> None:
        """Ask if nothing is acknowledged any more; give the connection up if nobody answers."""
        if self.heard_at > self._asked_at:
            self._unanswered_since = math.inf
        if now >= self._unanswered_since + self._patience():
            self.broken(f"no answer for {now - self._unanswered_since:.1f} s", now)
        elif now >= self._next_query:
            self._queries += 1
            self._query_mark = self.sending.mark()
            self._control.append(m.Query(number=self._queries))
            self._asked_at = now
            self._unanswered_since = min(self._unanswered_since, now)
            self._next_query = now + self._query_after()

    def _query_after(self) -> float:
        return max(self._limits.query_after_s, 4 * self.sending.window.smooth_rtt_s)

    def _patience(self) -> float:
        return self._limits.link_timeout_s + self.sending.window.in_flight / self._limits.slowest_link

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
        self._queries = self._answer_to = 0
        self._unanswered_since = math.inf
        self._asked_at = -math.inf
        self._progress_at = now
        self._next_query = now + self._query_after() if self.sending.unacknowledged else math.inf
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
        self.sending.clear()

    def _forget_connection(self) -> None:
        if self.connection is not None:
            self._shared.release(self.connection)
            self.connection = None
        self._control.clear()
        self._datagrams.clear()
        self.acknowledge = False


class OpenedSession(Session):
    """The side that makes the connections."""

    opened_here = True

    def __init__(
        self, shared: Shared, peer: Peer, identity: int, *, ordered: bool, host: str, port: int
    ) -> None:
        super().__init__(shared, peer, identity, ordered=ordered, state=State.IDLE)
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


class AcceptedSession(Session):
    """The side that waits for connections."""

    def __init__(self, shared: Shared, peer: Peer, hello: m.Hello, *, ordered: bool) -> None:
        super().__init__(shared, peer, hello.session, ordered=ordered, state=State.AWAY)
        self.incarnation = hello.incarnation

    def is_that_of(self, hello: m.Hello) -> bool:
        """Return whether a Hello wants to go on with this session."""
        return (hello.incarnation, hello.session) == (self.incarnation, self.identity)

    def hello(self, hello: m.Hello, connection: Connection, now: float) -> None:
        """Go on over a new connection.

        Raises:
            ProtocolViolation: the Hello acknowledges what was never sent, or the session is ending.
        """
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

    def due(self) -> float:
        """Return when `tick` has something to do."""
        if self.state is State.AWAY and not self.sending.has_work():
            return math.inf  # nothing to say: the other side comes back when it has something
        return super().due()

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.state is not State.AWAY or self.sending.has_work():
            super().tick(now)
