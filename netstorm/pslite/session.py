"""A session: one exactly-once stream of messages in both directions, over successive connections. Pure.

The process that opened it (`OpenedSession`) makes the connections; the other process (`AcceptedSession`)
waits for them. On every connection the opener first sends a Hello that says what it has received so far. Data
flows after the Welcome, which says the same of the other side. What has not been received is transmitted
again.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Container, Hashable, Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

from netstorm.addresses import host_port
from netstorm.errors import NoRoom, ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, Buffer, Peer, encode_body, seal
from netstorm.protocol.messages import Message
from netstorm.pslite.machine import OF_MESSAGE, Charge, WaitingBytes
from netstorm.pslite.rates import TcpProgress
from netstorm.pslite.sending import NOWHERE, Mark, SendingHalf, SendQueueItem, Window
from netstorm.pslite.van import Connection, PayloadMemory, Transmitter, connecting_s

__all__ = [
    "TRANSITIONS",
    "AcceptedSession",
    "Arrival",
    "Event",
    "Limits",
    "LinkCounters",
    "OpenedSession",
    "QueryTimer",
    "ReceivingHalf",
    "Session",
    "SessionState",
    "new_held_bytes",
]


class SessionState(enum.Enum):
    """The state of a session."""

    IDLE = "idle"
    """Opened here, and nothing has been sent yet: no connection."""
    CONNECTING = "connecting"
    """A connection was opened and Hello handed over; no answer yet."""
    UP = "up"
    """Messages flow."""
    DISCONNECTED = "disconnected"
    """Between two connections."""
    CLOSING = "closing"
    """Goodbye was sent; the session waits for the other side's, but not for long."""
    CLOSED = "closed"
    """Ended on purpose."""
    LOST = "lost"
    """Could not be re-established in time, or was refused."""


class Event(enum.Enum):
    """What can happen to a session."""

    CONNECT = "first message, or one is expected soon"
    RETRY = "time for another attempt"
    HELLO = "Hello on a new connection"
    WELCOME = "Welcome"
    BROKEN = "connection broken or silent"
    REFUSED = "Refused, or another process answers"
    TIMED_OUT = "no connection within the link time-out"
    DRAINED = "everything is acknowledged, and the session is to end"
    GOODBYE = "Goodbye"
    ABORTED = "the session is to end, has nothing to send, and is not up"
    CLOSE_TIMED_OUT = "no Goodbye in time"


_S, _E = SessionState, Event
TRANSITIONS: Final[Mapping[SessionState, Mapping[Event, SessionState]]] = MappingProxyType(
    {
        _S.IDLE: {_E.CONNECT: _S.CONNECTING, _E.ABORTED: _S.CLOSED},
        _S.CONNECTING: {
            _E.WELCOME: _S.UP,
            _E.BROKEN: _S.DISCONNECTED,
            _E.REFUSED: _S.LOST,
            _E.TIMED_OUT: _S.LOST,
            _E.ABORTED: _S.CLOSED,
            _E.GOODBYE: _S.CLOSED,
        },
        _S.UP: {
            _E.HELLO: _S.UP,
            _E.BROKEN: _S.DISCONNECTED,
            _E.REFUSED: _S.LOST,
            _E.TIMED_OUT: _S.LOST,
            _E.DRAINED: _S.CLOSING,
            _E.GOODBYE: _S.CLOSING,
        },
        _S.DISCONNECTED: {
            _E.RETRY: _S.CONNECTING,
            _E.HELLO: _S.UP,
            _E.TIMED_OUT: _S.LOST,
            _E.ABORTED: _S.CLOSED,
        },
        _S.CLOSING: {_E.GOODBYE: _S.CLOSED, _E.BROKEN: _S.CLOSED, _E.CLOSE_TIMED_OUT: _S.CLOSED},
        _S.CLOSED: {},
        _S.LOST: {},
    }
)


_ACKNOWLEDGE_S: Final = 0.025
"""How long the acknowledgement of little may wait for more to acknowledge, within a machine. Each one wakes
two threads here and two at the sender: a batch of a small network took a third longer with one a message."""

_LITTLE: Final = 65_536
_FEW: Final = 64
"""Bytes and messages whose acknowledgement may wait: a small part of any window, and of no use to measure."""

_MOST_REFUSED: Final = 16_384
"""Messages without room whose numbers are kept: a correct sender has fewer under way (`SendingHalf`)."""


class SessionContext(Protocol):
    """What all sessions of a process share."""

    @property
    def limits(self) -> Limits:
        """Time-outs and bounds."""

    @property
    def incarnation(self) -> int:
        """Random number of this process."""

    @property
    def random(self) -> Random:
        """Source of random numbers."""

    @property
    def tokens(self) -> Random:
        """Source of random numbers that nobody else can guess, unless a test decides them."""

    @property
    def held_bytes(self) -> WaitingBytes:
        """What messages of ordered sessions that wait for others count."""

    def stamp(self) -> int:
        """Return the cluster clock, in ns."""

    def new_connection(self) -> Connection:
        """Return a connection number that was never used."""

    @property
    def boot(self) -> int:
        """Number of the boot of this process's machine; 0: payloads are always checked."""

    @property
    def memory(self) -> PayloadMemory | None:
        """Payloads between processes of one machine may lie in it; None: they go over connections."""

    def is_own(self, host: str) -> bool:
        """Return whether an address is one of this machine's own."""

    def hello(self, session: Session, boot: int) -> m.Hello:
        """Return this process's Hello for the new connection of a session."""

    def new_sending(self, peer: Peer, host: str) -> SendingHalf:
        """Return the sending half of a new session; `host`: the peer's, if it is opened here."""

    def contended(self, peer: Peer) -> bool:
        """Return whether other busy links may slow the link to `peer`."""

    def release(self, connection: Connection) -> None:
        """Close a connection; messages that still arrive over it are ignored."""

    def acknowledges(self, connection: Connection) -> bool:
        """Return whether the kernel at the other end of a connection acknowledges what is sent."""

    def progress(self, connection: Connection) -> TcpProgress | None:
        """Return what the kernel knows of a connection that was opened here, even before it is up."""

    def may_be_busy(self, peer: Peer, now: float) -> bool:
        """Return whether a peer that does not answer, and whose kernel acknowledges, may just be busy."""


class Session(ABC):
    """The common part of both sides of a session.

    Attributes:
        peer: the other process.
        identity: random number of the session.
        state: see `SessionState`.
        connection: the present one; None while there is none.
        incarnation: random number of the other process; None before it is known.
        sending: messages to the peer.
        receiving: messages from the peer.
        counters: of the link.
        reason: why the session is disconnected or lost.
        ending: it is to end once everything is acknowledged.
        undelivered: what was not acknowledged when the session was lost, in order.
        acknowledge: something was received that has to be acknowledged.
        without_room: messages for which there is no room yet: by number, the size and what it waits for.
        unchecked: payloads go without checksums: the present connection does not leave the machine.
        busy_s: for how long the peer is busy, if `tick` has just found that it is; else 0.
    """

    opened_here = False

    def __init__(
        self,
        context: SessionContext,
        peer: Peer,
        identity: int,
        *,
        counters: LinkCounters,
        ordered: bool,
        state: SessionState,
        host: str = "",
    ) -> None:
        self._context: Final = context
        self._limits: Final = context.limits
        self.peer: Final = peer
        self.identity: Final = identity
        self.state = state
        self.connection: Connection | None = None
        self.incarnation: int | None = None
        self.sending: Final = context.new_sending(peer, host)
        self.receiving: Final = ReceivingHalf(ordered=ordered, held_bytes=context.held_bytes, peer=peer)
        self.counters: Final = counters
        self.reason = ""
        self.ending = False
        self.undelivered: list[SendQueueItem] = []
        self.acknowledge = False
        self._acknowledge_at = -math.inf
        """When at the latest."""
        self._to_acknowledge = [0, 0]
        """Bytes and messages."""
        self.without_room: Final[dict[int, tuple[int, Hashable]]] = {}
        self.unchecked = False
        self.busy_s = 0.0
        self._control: list[m.SessionMessage] = []
        self._datagrams: list[bytes] = []
        self._since = 0.0
        """When the present state began; for a session that is not up, when it was up last."""
        # The opener then tries another connection, for longer; the other side can only wait for that.
        answer_timeout_s = context.limits.link_timeout_s * (0.5 if self.opened_here else 2)
        self._queries: Final = QueryTimer(context.limits, self.sending.window, answer_timeout_s)
        self._answer_to = 0
        """Number of the query that the next acknowledgement answers."""

    # ------------------------------------------------------------------------------------------ the endpoint

    def submit(self, message: SendQueueItem, now: float) -> None:
        """Queue a message for exactly-once delivery."""
        if self.state is SessionState.DISCONNECTED and not self.sending.has_work():
            self._since = now  # until now no connection was needed
        self.sending.submit(message)

    def submit_datagram(self, body: bytes) -> None:
        """Send a message that may be lost; without a connection it is dropped."""
        if self.state is SessionState.UP:
            self._datagrams.append(body)

    def control(self, message: m.SessionMessage) -> None:
        """Send a message for the session itself; without a connection it is dropped."""
        if self.state is SessionState.UP:
            self._control.append(message)

    def end(self, now: float, *, at_once: bool) -> None:
        """End the session on purpose; unless `at_once`, after everything queued is acknowledged."""
        self.ending = True
        if at_once:
            self.sending.clear()
        if self.state is SessionState.UP:
            if not self.sending.has_work():
                self._close(now)
        elif (
            self.state in (SessionState.IDLE, SessionState.CONNECTING, SessionState.DISCONNECTED)
            and not self.sending.has_work()
        ):
            self._transition(Event.ABORTED, now)
            self._release_connection()

    # ----------------------------------------------------------------------------------------- the other side

    def receive_session_message(self, message: m.SessionMessage, now: float) -> None:
        """Process a message for the session itself, other than Hello, Welcome and Refused.

        Raises:
            ProtocolViolation: the message is not legal in the present state.
        """
        if isinstance(message, m.Ack):
            sending = self.sending
            mark = self._queries.mark_of(message.query) if message.query else NOWHERE
            before = sending.arrived
            news = sending.acknowledge(message.received, message.beyond, now, mark=mark)
            # What goes on over other streams says nothing of the one that the oldest message is on.
            if news and (len(sending.window.streams) == 1 or sending.arrived > before):
                self._queries.progress(now, expecting=bool(sending.unacknowledged))
        elif isinstance(message, m.Nack):
            if message.later:
                self.sending.keep(message.sequence)
            elif self.sending.resend(message.sequence):
                self.counters.drop("nacked")
        elif isinstance(message, m.Query):
            self._answer_to = message.number
            self.acknowledge, self._acknowledge_at = True, -math.inf
        elif isinstance(message, m.Goodbye):
            self._goodbye(now)
        else:
            raise ProtocolViolation(f"{type(message).__name__} is not legal in state {self.state.value}")

    def will_acknowledge(self, nbytes: int, now: float) -> None:
        """Acknowledge a message that has come: at once, or with others if it is small and comes from within
        the machine.
        """
        may_wait = self.unchecked and not self.receiving.ordered and not self._limits.window_bytes
        if not self.acknowledge:
            self.acknowledge = True
            self._to_acknowledge = [0, 0]
            self._acknowledge_at = now + _ACKNOWLEDGE_S if may_wait else -math.inf
        waiting = self._to_acknowledge
        waiting[0] += nbytes
        waiting[1] += 1
        if waiting[0] >= _LITTLE or waiting[1] >= _FEW or not nbytes:
            self._acknowledge_at = -math.inf

    def request_again(self, sequence: int) -> None:
        """Ask for a message again: its payload failed its checksum."""
        self._control.append(m.Nack(sequence=sequence))

    def refuse_for_now(self, sequence: int, nbytes: int, waits_for: Hashable) -> None:
        """Leave a message to its sender until `request_refused`: there is no room for it.

        Raises:
            ProtocolViolation: no correct sender has so many under way.
        """
        if len(self.without_room) >= _MOST_REFUSED:
            raise ProtocolViolation(f"message {sequence}, and {_MOST_REFUSED} have no room here already")
        self.without_room[sequence] = nbytes + OF_MESSAGE, waits_for
        self._control.append(m.Nack(sequence=sequence, later=True))

    def request_refused(self, room: float, ready: Container[Hashable]) -> None:
        """Ask for refused messages: as many as there is `room` for, and all that need not wait any more."""
        for sequence, (nbytes, waits_for) in list(self.without_room.items()):
            if room >= nbytes or waits_for in ready:
                del self.without_room[sequence]
                if not self.receiving.has(sequence):
                    self.request_again(sequence)
                room -= nbytes

    def widened(self, streams: int) -> None:
        """Use more streams of the present connection."""
        self.sending.window.widen(streams)

    def broken(self, reason: str, now: float) -> None:
        """Note that the present connection is gone."""
        if self.state in (SessionState.CONNECTING, SessionState.UP, SessionState.CLOSING):
            was_up = self.state is SessionState.UP
            self._release_connection()
            self.reason = reason
            since = self._since
            self._transition(Event.BROKEN, now)
            if not was_up:
                self._since = since  # it has been disconnected for longer
            self.sending.disconnected()

    def expel(self, reason: str, now: float) -> None:
        """Lose the session at once: its peer is not admitted any more."""
        if self.state in (SessionState.CONNECTING, SessionState.UP):
            self._lose(Event.REFUSED, reason, now)
        elif self.state is SessionState.DISCONNECTED:
            self._lose(Event.TIMED_OUT, reason, now)

    def away_s(self, now: float) -> float:
        """Return since when there is no connection, or one was needed, in s; 0: there is one."""
        return now - self._since if self.state is SessionState.DISCONNECTED else 0.0

    # -------------------------------------------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.state is SessionState.UP:
            self._check_liveness(now)
        elif self.state is SessionState.CLOSING and now >= self._since + self._limits.goodbye_s:
            self._transition(Event.CLOSE_TIMED_OUT, now)
            self._release_connection()
        elif self.state is SessionState.DISCONNECTED and now >= self._link_deadline():
            self._lose(Event.TIMED_OUT, self._disconnected_text(), now)

    def due(self) -> float:
        """Return when `tick` has something to do."""
        if self.state is SessionState.UP:
            due = min(self._queries.due(), self.sending.window.resume_at)
            return min(due, self._acknowledge_at) if self.acknowledge else due
        if self.state is SessionState.CLOSING:
            return self._since + self._limits.goodbye_s
        return self._due_without_connection()

    @abstractmethod
    def _due_without_connection(self) -> float:
        """Return when `tick` has something to do while there is no connection, or none that is answered."""

    def flush(self, van: Transmitter, now: float) -> None:
        """Hand over to the van everything that may be sent now."""
        if self.state is SessionState.CONNECTING:
            self._open(van, now)
        if self.state is not SessionState.UP and self.state is not SessionState.CLOSING:
            return
        if self._control or self._datagrams:
            stream = self._queries.stream
            bodies = [(encode_body(one), stream if isinstance(one, m.Query) else 0) for one in self._control]
            bodies += [(body, 0) for body in self._datagrams]
            self._control, self._datagrams = [], []
            for body, stream in bodies:
                if not self._transmit(van, body, None, now, stream):
                    return
        if self.acknowledge and now >= self._acknowledge_at:
            self.acknowledge = False
            received, beyond = self.receiving.received_numbers()
            ack = m.Ack(received=received, beyond=beyond, query=self._answer_to)
            if not self._transmit(van, encode_body(ack), None, now):
                return
        if self.state is SessionState.UP:
            sending = self.sending
            sending.window.resume_at = math.inf
            while sending.queue or sending.lost:
                idle = not sending.unacknowledged
                message = sending.next(now)
                if message is None:
                    break
                if idle:
                    self._queries.progress(now, expecting=True)
                if not self._transmit(van, message.body, message, now):
                    return
            if self.ending and not sending.has_work():
                self._close(now)
                self.flush(van, now)

    # ------------------------------------------------------------------------------------------------- inside

    def _open(self, van: Transmitter, now: float) -> None:
        """Open a connection and say Hello."""
        raise NotImplementedError("only the side that opened a session is ever connecting")

    def _transition(self, event: Event, now: float) -> None:
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ProtocolViolation(f"{event.value} is not legal in state {self.state.value}")
        self.state = following
        self._since = now

    def _transmit(
        self, van: Transmitter, body: bytes, message: SendQueueItem | None, now: float, stream: int = 0
    ) -> bool:
        assert self.connection is not None
        stamp = self._context.stamp()
        counters = self.counters
        if message is None:
            header = seal(body, sequence=0, sent_at=stamp, payload_crc=None)
            taken = van.transmit(self.connection, header, None, stream)
            size = len(header)
        else:
            again = message.transmissions > 1
            unchecked = self.unchecked and message.payload is not None
            header = seal(
                body,
                sequence=message.sequence,
                sent_at=stamp,
                payload_crc=None if unchecked or message.payload is None else message.crc(),
                unchecked=unchecked,
                resent=again,
                contended=message.payload is not None and self._context.contended(self.peer),
            )
            taken = van.transmit(self.connection, header, message.payload, message.stream)
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

    def _check_liveness(self, now: float) -> None:
        """Send a query if nothing has been acknowledged for a while; give up if no answer comes."""
        single = len(self.sending.window.streams) == 1
        silence = self._queries.silence(self.counters.heard_at if single else -math.inf, now)
        if silence and self._may_wait(silence, now):
            self._queries.excuse(now)
        elif silence:
            self._unanswered(f"no answer for {silence:.1f} s", now)
            return
        if self._queries.query_due(now):
            mark = self.sending.mark(self._queries.turn)
            self._control.append(m.Query(number=self._queries.query_sent(mark, now)))

    def _may_wait(self, silence_s: float, now: float) -> bool:
        """Return whether a peer may be silent for even longer: the kernel of its machine acknowledges, and it
        is only slow, or busy.
        """
        limits, context = self._limits, self._context
        if self.connection is None or not context.acknowledges(self.connection):
            return False
        if self.state is SessionState.UP and silence_s < limits.link_timeout_s:
            return True
        busy = silence_s < limits.busy_timeout_s and context.may_be_busy(self.peer, now)
        self.busy_s = silence_s if busy else 0.0
        return busy

    def _unanswered(self, reason: str, now: float) -> None:
        """Give up a connection that exists, but over which the peer does not answer."""
        self.broken(reason, now)

    def _close(self, now: float) -> None:
        self._transition(Event.DRAINED, now)
        self._control.append(m.Goodbye())

    def _goodbye(self, now: float) -> None:
        if self.state is SessionState.UP:
            self._control.append(m.Goodbye())
        self._transition(Event.GOODBYE, now)
        self.sending.clear()
        if self.state is SessionState.CLOSED:
            self._release_connection()

    def _establish(self, event: Event, received: int, beyond: tuple[int, ...], now: float) -> None:
        """Go on over a new connection, given what the other side has received.

        Raises:
            ProtocolViolation: it acknowledges what was never sent.
        """
        self.sending.disconnected()
        self.sending.acknowledge(received, beyond, now)
        self._transition(event, now)
        self.counters.connections += 1
        self.reason = ""
        self._answer_to = 0
        self._queries.stop()
        self._queries.progress(now, expecting=bool(self.sending.unacknowledged))
        if self.ending and not self.sending.has_work():
            self._close(now)

    def _link_deadline(self) -> float:
        return self._since + self._limits.link_timeout_s

    def _disconnected_text(self) -> str:
        return f"no connection for {self._limits.link_timeout_s:.1f} s (NETSTORM_LINK_TIMEOUT): {self.reason}"

    def _lose(self, event: Event, reason: str, now: float) -> None:
        self._release_connection()
        self._transition(event, now)
        self.reason = reason
        self.undelivered = self.sending.take_all()

    def _release_connection(self) -> None:
        if self.connection is not None:
            self._context.release(self.connection)
            self.connection = None
        self._control.clear()
        self._datagrams.clear()
        self.without_room.clear()  # all that is missing comes again over the next connection
        self.acknowledge = False


class OpenedSession(Session):
    """The side that makes the connections, again and again until the link time-out."""

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
        super().__init__(
            context, peer, identity, counters=counters, ordered=ordered, state=SessionState.IDLE, host=host
        )
        self.host = host
        self.port = port
        self._to_open = False
        self._retry_at = math.inf
        self._failures = 0
        self._attempted_at = 0.0
        self._far_s = 0.0
        """How long the present attempt may take, since the peer is so far away; 0: as long as others."""
        self._token: int | None = None
        """The peer's number of this session; None: it has not answered yet."""
        self._reachable_at = -math.inf
        """When its machine last accepted a connection over which its process did not answer: it is busy."""

    def submit(self, message: SendQueueItem, now: float) -> None:
        """Queue a message, and connect if this is the first."""
        super().submit(message, now)
        self.connect(now)

    def connect(self, now: float) -> None:
        """Connect, if there was no need to until now."""
        if self.state is SessionState.IDLE:
            self._transition(Event.CONNECT, now)
            self._connect(now)

    def welcome(self, message: m.Welcome, now: float) -> None:
        """Process the peer's answer to Hello.

        Raises:
            ProtocolViolation: it is no answer to the last Hello.
        """
        if message.session != self.identity or self.state is not SessionState.CONNECTING:
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
        memory = self._context.memory
        if message.shares and memory is not None and self.connection is not None:
            memory.share(self.connection)
        self._establish(Event.WELCOME, message.received, message.beyond, now)

    def refused(self, message: m.Refused, now: float) -> None:
        """Process the peer's refusal."""
        self._lose(Event.REFUSED, f"{self._address} refused this process: {message.reason}", now)

    def broken(self, reason: str, now: float) -> None:
        """Note that the present connection is gone, and make a new one after a while."""
        super().broken(reason, now)
        if self.state is SessionState.DISCONNECTED:
            limits = self._limits
            longest = limits.scheduler_retry_s if self.peer == SCHEDULER else limits.longest_retry_s
            pause = min(longest, limits.first_retry_s * 2**self._failures)
            self._retry_at = now + pause * self._context.random.uniform(0.5, 1.0)
            self._failures = min(self._failures + 1, 30)

    def tick(self, now: float) -> None:
        """Do what is due."""
        super().tick(now)
        if self.state is SessionState.CONNECTING:
            if now >= self._due_without_connection():
                self._allow_for_distance()
            overdue = now >= self._link_deadline()
            if (overdue or now >= self._handshake_deadline()) and self._may_wait(now - self._since, now):
                self._reachable_at = now
                overdue = False
            if overdue:
                self.reason = self.reason or "no answer"
                self._lose(Event.TIMED_OUT, self._disconnected_text(), now)
            elif now >= self._handshake_deadline():  # Hello or Welcome was lost or corrupted, or it is busy
                self.broken("no answer", now)
        elif self.state is SessionState.DISCONNECTED and now >= self._retry_at:
            since = self._since
            self._transition(Event.RETRY, now)
            self._since = since
            self._connect(now)

    def _due_without_connection(self) -> float:
        if self.state is SessionState.CONNECTING:
            return min(self._link_deadline(), self._handshake_deadline())
        if self.state is SessionState.DISCONNECTED:
            return min(self._link_deadline(), self._retry_at)
        return math.inf

    def _open(self, van: Transmitter, now: float) -> None:
        if self._to_open and self.connection is not None:
            self._to_open = False
            van.open(self.connection, self.host, self.port)
            self._transmit(van, encode_body(self._context.hello(self, self._boot())), None, now)

    def _boot(self) -> int:
        """Return the boot's number if the connection may be one within the machine; else 0.

        An address alone does not say so: behind one of this machine may be a tunnel to elsewhere. Nor does
        the boot: an emulated network within a machine stands for a real one.
        """
        return self._context.boot if self._context.is_own(self.host) else 0

    def _handshake_deadline(self) -> float:
        timeout_s = math.ldexp(self._limits.handshake_s, self._failures)
        return self._attempted_at + max(min(timeout_s, self._limits.link_timeout_s / 2), self._far_s)

    def _allow_for_distance(self) -> None:
        """Let this attempt take the round trips that it needs: another one would need them, too."""
        progress = None if self.connection is None else self._context.progress(self.connection)
        if progress is not None:
            far_s = connecting_s(progress.smoothed_rtt_s, self._limits.link_timeout_s)
            self._far_s = max(self._far_s, far_s)

    def _link_deadline(self) -> float:
        deadline = max(self._since, self._reachable_at) + self._limits.link_timeout_s
        if self.state is SessionState.CONNECTING:
            deadline = max(deadline, self._attempted_at + self._far_s)
        return deadline

    def _connect(self, now: float) -> None:
        self.connection = self._context.new_connection()
        self._to_open = True
        self._attempted_at, self._far_s = now, 0.0

    def _disconnected_text(self) -> str:
        limit_s = self._limits.link_timeout_s
        return f"no connection to {self._address} for {limit_s:.1f} s (NETSTORM_LINK_TIMEOUT): {self.reason}"

    @property
    def _address(self) -> str:
        return host_port(self.host, self.port)


class AcceptedSession(Session):
    """The side that waits for its peer's connections."""

    def __init__(
        self, context: SessionContext, peer: Peer, hello: m.Hello, *, counters: LinkCounters, ordered: bool
    ) -> None:
        super().__init__(
            context, peer, hello.session, counters=counters, ordered=ordered, state=SessionState.DISCONNECTED
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
        if self.state is SessionState.UP:
            self.broken("replaced by a new connection", now)
        received, beyond = self.receiving.received_numbers()
        self.unchecked = hello.boot != 0 and hello.boot == self._context.boot
        memory = self._context.memory
        shares = (
            self.unchecked
            and memory is not None
            and hello.memory is not None
            and memory.borrow(connection, hello.memory)
        )
        self._control = [
            m.Welcome(
                incarnation=self._context.incarnation,
                session=self.identity,
                received=received,
                beyond=beyond,
                unchecked=self.unchecked,
                token=self._token,
                shares=shares,
            )
        ]
        self._establish(Event.HELLO, hello.received, hello.beyond, now)
        self.connection = connection

    def _unanswered(self, reason: str, now: float) -> None:
        """Lose the session: this side cannot make another connection."""
        self._lose(Event.TIMED_OUT, reason, now)

    def _due_without_connection(self) -> float:
        if self.state is SessionState.DISCONNECTED and self.sending.has_work():
            return self._link_deadline()
        return math.inf  # nothing to send: the peer connects again when it has something to send

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.state is not SessionState.DISCONNECTED or self.sending.has_work():
            super().tick(now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Time-outs of sessions in s, and bounds on memory in bytes."""

    link_timeout_s: float = 10.0
    """A session that has no connection for this long is lost."""
    busy_timeout_s: float = 3600.0
    """How long a peer may be busy: it answers nothing, but the kernel of its machine acknowledges."""
    window_bytes: int = 0
    """Most unacknowledged bytes of a session; 0: adapt to the bandwidth-delay product."""
    shallow_windows: bool = False
    """Little may be in flight, since what is cannot be taken back."""
    query_after_s: float = 2.0
    """A query is sent after this time, or four round trips, without an acknowledgement."""
    slowest_link: float = 125_000.0
    """bytes/s of the slowest link to expect (1 Mbit/s). The answer to a query may take as long as such a link
    needs for the bytes in flight."""
    handshake_s: float = 5.0
    """How long a Hello waits for its answer before it is sent again over another connection; doubled with
    each failure, up to half of `link_timeout_s`. A peer that is far away has eight round trips."""
    first_retry_s: float = 0.05
    """Wait before the second attempt to connect; doubled with each attempt, so that processes do not all
    connect at once after a switch was restarted."""
    longest_retry_s: float = 1.0
    scheduler_retry_s: float = 0.25
    """`longest_retry_s` of a session with the scheduler. Each view after it was restarted waits for the last
    node to come back."""
    goodbye_s: float = 1.0
    """How long an ending session waits for the other side's Goodbye."""
    pending_hellos: int = 1024
    """Most processes that wait to be admitted."""
    sessions: int = 16_384
    """Most sessions that other processes may open."""
    reserved: int = 0
    """Most connections of others that may wait for a session which is to come (`Reserve`)."""


class LinkCounters:
    """What went over one link, in both directions and in all its sessions. Bytes are those of frames, without
    the headers of ZeroMQ and TCP.
    """

    __slots__ = (
        "bytes_received",
        "bytes_resent",
        "bytes_sent",
        "connections",
        "dropped",
        "duplicates",
        "heard_at",
        "messages_received",
        "messages_resent",
        "messages_sent",
    )

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.messages_sent = 0
        self.bytes_resent = 0
        """Part of `bytes_sent`."""
        self.messages_resent = 0
        self.bytes_received = 0
        self.messages_received = 0
        self.duplicates = 0
        self.connections = 0
        """Connections that the link has had."""
        self.dropped: dict[str, int] = {}
        """By reason."""
        self.heard_at = -math.inf
        """When the last message of any kind arrived, on the local clock."""

    def drop(self, reason: str) -> None:
        """Count a message that was dropped."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def snapshot(self) -> dict[str, int]:
        """Return all numbers by name; dropped messages as `dropped_REASON`."""
        others = ("dropped", "heard_at")
        numbers = {name: getattr(self, name) for name in self.__slots__ if name not in others}
        return numbers | {f"dropped_{reason}": number for reason, number in self.dropped.items()}


class QueryTimer:
    """When to query a peer that acknowledges nothing any more, and when to give up waiting for its answer.

    A time-out never retransmits anything.
    """

    __slots__ = (
        "_answer_timeout_s",
        "_excused_at",
        "_limits",
        "_mark",
        "_next_at",
        "_sent_at",
        "_turn_began",
        "_unanswered_since",
        "_window",
        "sent",
        "turn",
    )

    def __init__(self, limits: Limits, window: Window, answer_timeout_s: float) -> None:
        """Check a connection whose messages `window` counts; an answer may take `answer_timeout_s`."""
        self._answer_timeout_s: Final = answer_timeout_s
        self._limits: Final = limits
        self._window: Final = window
        self.sent = 0
        """Number of queries sent on this connection."""
        self.turn = 0
        """Whose turn it is among the streams: the next one's once a query was answered."""
        self.stop()

    def stop(self) -> None:
        """Reset: there is no connection."""
        self.sent = self.turn = self._turn_began = 0
        self._mark = NOWHERE
        self._sent_at = -math.inf
        self._unanswered_since = self._next_at = math.inf
        self._excused_at = -math.inf

    def progress(self, now: float, *, expecting: bool) -> None:
        """Note an acknowledgement, or that from now on something is unacknowledged, and set when to send a
        query: only if more acknowledgements are expected.
        """
        self._next_at = max(now, self._sent_at) + self._pause() if expecting else math.inf

    def due(self) -> float:
        """Return when to check again."""
        if self._unanswered_since == math.inf:
            return self._next_at
        return min(self._next_at, self._overdue_at())

    def query_due(self, now: float) -> bool:
        """Return whether it is time for a query."""
        return now >= self._next_at

    @property
    def stream(self) -> int:
        """Over which the last query is sent."""
        return self._mark.stream

    def query_sent(self, mark: Mark, now: float) -> int:
        """Note a query that is sent after everything before `mark` on its stream; return its number."""
        self.sent += 1
        self._turn_began = self._turn_began or self.sent
        self._mark = mark
        self._sent_at = now
        self._unanswered_since = min(self._unanswered_since, now)
        self._next_at = now + self._pause()
        return self.sent

    def silence(self, heard_at: float, now: float) -> float:
        """Return for how long no answer has come, if that is too long; else 0.

        Args:
            heard_at: when a message last arrived over this connection, if it is a single stream: only an
                answer shows that one of several streams works.
            now: s on the local clock.
        """
        if heard_at > self._sent_at:
            self._unanswered_since = math.inf
        return now - self._unanswered_since if now >= self._overdue_at() else 0.0

    def excuse(self, now: float) -> None:
        """Wait for an answer for as long again: the peer is only busy."""
        self._excused_at = now

    def mark_of(self, query: int) -> Mark:
        """Return the mark of the query that an acknowledgement answers; `NOWHERE` if a later query is still
        open.

        Raises:
            ProtocolViolation: there was no such query.
        """
        if query > self.sent:
            raise ProtocolViolation(f"answers query {query}, and {self.sent} were sent")
        if query >= self._turn_began > 0:
            self.turn += 1
            self._turn_began, self._unanswered_since = 0, math.inf
        return self._mark if query and query == self.sent else NOWHERE

    def _pause(self) -> float:
        return max(self._limits.query_after_s, 4 * self._window.smooth_rtt_s)

    def _overdue_at(self) -> float:
        # a query waits behind what is in flight, and so does its answer
        answer_timeout_s = self._answer_timeout_s + self._window.in_flight / self._limits.slowest_link
        return max(self._unanswered_since, self._excused_at) + answer_timeout_s


Arrival: TypeAlias = tuple[Message, "Buffer | None", "int | None"]
"""A message, its payload, the payload's checksum, if it has one."""

_BEYOND: Final = 16_384
"""Most messages that may arrive before a missing one. A correct sender has fewer in flight, and beside one
that it was asked to keep (`SendingHalf`)."""

_HELD_OF_ONE: Final = 16 * 2**20
_HELD_OF_ALL: Final = 128 * 2**20
"""Bytes of messages of ordered sessions which wait for a missing one: a bound on memory. These are control
messages, and only a frame that was damaged on the way lets others wait for it: seconds of the largest job's
fit."""


def new_held_bytes() -> WaitingBytes:
    """Return what all ordered sessions of a process count together."""
    return WaitingBytes(of_one=_HELD_OF_ONE, of_all=_HELD_OF_ALL)


class ReceivingHalf:
    """Messages from one peer in one session: each is delivered once and, if the session is ordered, in
    order.
    """

    __slots__ = ("_held", "_held_bytes", "_peer", "beyond", "ordered", "received")

    def __init__(
        self, *, ordered: bool, held_bytes: WaitingBytes | None = None, peer: Peer | None = None
    ) -> None:
        """`held_bytes`: counts what is held of all peers, of this `peer` among others."""
        self.ordered: Final = ordered
        self.received = 0
        """Highest contiguous sequence number received."""
        self.beyond: Final[set[int]] = set()
        """Sequence numbers received beyond it."""
        self._peer: Final = peer
        self._held_bytes: Final = held_bytes or new_held_bytes()
        self._held: Final[dict[int, tuple[Arrival, Charge]]] = {}

    def has(self, sequence: int) -> bool:
        """Return whether a message has been received already."""
        return sequence <= self.received or sequence in self.beyond

    def check(self, sequence: int) -> None:
        """Check that a message that was not received yet may come now.

        Raises:
            ProtocolViolation: too many wait for one that is missing.
        """
        if len(self.beyond) >= _BEYOND and sequence != self.received + 1:
            raise ProtocolViolation(
                f"message {sequence} arrived, {self.received + 1} is missing, and {_BEYOND} wait for it"
            )

    def receive(self, sequence: int, arrival: Arrival, nbytes: int = 0) -> list[Arrival]:
        """Add a message of `nbytes` that was not received yet; return the messages to deliver now.

        Raises:
            ProtocolViolation: too many messages, or bytes, wait for one that is missing.
        """
        if sequence == self.received + 1 and not self.beyond:
            self.received = sequence
            return [arrival]
        self.check(sequence)
        ready = []
        if not self.ordered:
            ready.append(arrival)
        else:
            self._held_bytes.begin(self._peer, again=sequence == self.received + 1)
            try:
                charge = self._held_bytes.take(nbytes, None, f"message {self.received + 1}")
            except NoRoom as error:
                raise ProtocolViolation(f"message {sequence} is too early: {error}") from None
            self._held[sequence] = arrival, charge
        self.beyond.add(sequence)
        while self.received + 1 in self.beyond:
            self.received += 1
            self.beyond.remove(self.received)
            if self.ordered:
                following, charge = self._held.pop(self.received)
                self._held_bytes.give_back(charge)
                ready.append(following)
        return ready

    def drop_held(self) -> None:
        """Drop what waits: the session is over."""
        while self._held:
            self._held_bytes.give_back(self._held.popitem()[1][1])

    def received_numbers(self) -> tuple[int, tuple[int, ...]]:
        """Return what an acknowledgement names: the highest contiguous number, and those beyond it."""
        return self.received, tuple(sorted(self.beyond)) if self.beyond else ()
