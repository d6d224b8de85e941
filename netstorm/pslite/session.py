"""A session: one exactly-once stream of messages in both directions, over successive connections. Pure.

The process that opened it (`OpenedSession`) makes the connections; the other process (`AcceptedSession`)
waits for them. On every connection the opener first sends a Hello that says what it has received so far. Data
flows after the Welcome, which says the same of the other side. What has not been received is transmitted
again.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable
from random import Random
from typing import Final, Protocol

from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer, encode_body, seal
from netstorm.pslite.session.limits import Limits
from netstorm.pslite.session.link_counters import LinkCounters
from netstorm.pslite.session.query_timer import QueryTimer
from netstorm.pslite.session.queue import Outgoing
from netstorm.pslite.session.receiving import ReceivingHalf
from netstorm.pslite.session.sending import SendingHalf
from netstorm.pslite.session.states import TRANSITIONS, Event, State
from netstorm.pslite.van.interface import Connection, Transmitter
from netstorm.pslite.waiting_bytes import OF_MESSAGE, WaitingBytes

__all__ = ["Session", "SessionContext"]


_MOST_REFUSED: Final = 16_384
"""Messages without room whose numbers are kept: a correct sender has fewer under way (`sending`)."""


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

    def hello(self, session: Session, boot: int) -> m.Hello:
        """Return this process's Hello for the new connection of a session."""

    def new_sending(self, peer: Peer) -> SendingHalf:
        """Return the sending half of a new session."""

    def contended(self, peer: Peer) -> bool:
        """Return whether other busy links may slow the link to `peer`."""

    def release(self, connection: Connection) -> None:
        """Close a connection; messages that still arrive over it are ignored."""

    def acknowledges(self, connection: Connection) -> bool:
        """Return whether the kernel at the other end of a connection acknowledges what is sent."""

    def may_be_busy(self, peer: Peer, now: float) -> bool:
        """Return whether a peer that does not answer, and whose kernel acknowledges, may just be busy."""


class Session:
    """The common part of both sides of a session.

    Attributes:
        peer: the other process.
        identity: random number of the session.
        state: see `states`.
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
        state: State,
    ) -> None:
        self._context: Final = context
        self._limits: Final = context.limits
        self.peer: Final = peer
        self.identity: Final = identity
        self.state = state
        self.connection: Connection | None = None
        self.incarnation: int | None = None
        self.sending: Final = context.new_sending(peer)
        self.receiving: Final = ReceivingHalf(ordered=ordered, held_bytes=context.held_bytes, peer=peer)
        self.counters: Final = counters
        self.reason = ""
        self.ending = False
        self.undelivered: list[Outgoing] = []
        self.acknowledge = False
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

    def submit(self, message: Outgoing, now: float) -> None:
        """Queue a message for exactly-once delivery."""
        if self.state is State.DISCONNECTED and not self.sending.has_work():
            self._since = now  # until now no connection was needed
        self.sending.submit(message)

    def submit_datagram(self, body: bytes, now: float) -> None:
        """Send a message that may be lost; without a connection it is dropped."""
        if self.state is State.UP:
            self._datagrams.append(body)

    def end(self, now: float, *, at_once: bool) -> None:
        """End the session on purpose; unless `at_once`, after everything queued is acknowledged."""
        self.ending = True
        if at_once:
            self.sending.clear()
        if self.state is State.UP:
            if not self.sending.has_work():
                self._close(now)
        elif self.state in (State.IDLE, State.CONNECTING, State.DISCONNECTED) and not self.sending.has_work():
            self._transition(Event.ABORTED, now)
            self._release_connection()

    # ----------------------------------------------------------------------------------------- the other side

    def receive_session_message(self, message: m.SessionMessage, now: float) -> None:
        """Process a message for the session itself, other than Hello, Welcome and Refused.

        Raises:
            ProtocolViolation: the message is not legal in the present state.
        """
        if isinstance(message, m.Ack):
            self._acknowledged(message, now)
        elif isinstance(message, m.Nack):
            if message.later:
                self.sending.keep(message.sequence)
            elif self.sending.resend(message.sequence):
                self.counters.drop("nacked")
        elif isinstance(message, m.Query):
            self._answer_to = message.number
            self.acknowledge = True
        elif isinstance(message, m.Goodbye):
            self._goodbye(now)
        else:
            raise ProtocolViolation(f"{type(message).__name__} is not legal in state {self.state.value}")

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

    def broken(self, reason: str, now: float) -> None:
        """Note that the present connection is gone."""
        if self.state in (State.CONNECTING, State.UP, State.CLOSING):
            was_up = self.state is State.UP
            self._release_connection()
            self.reason = reason
            since = self._since
            self._transition(Event.BROKEN, now)
            if not was_up:
                self._since = since  # it has been disconnected for longer
            self.sending.disconnected()

    def expel(self, reason: str, now: float) -> None:
        """Lose the session at once: its peer is not admitted any more."""
        if self.state in (State.CONNECTING, State.UP):
            self._lose(Event.REFUSED, reason, now)
        elif self.state is State.DISCONNECTED:
            self._lose(Event.TIMED_OUT, reason, now)

    # -------------------------------------------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.state is State.UP:
            self._check_liveness(now)
        elif self.state is State.CLOSING and now >= self._since + self._limits.goodbye_s:
            self._transition(Event.CLOSE_TIMED_OUT, now)
            self._release_connection()
        elif self.state is State.DISCONNECTED and now >= self._link_deadline():
            self._lose(Event.TIMED_OUT, self._disconnected_text(), now)

    def due(self) -> float:
        """Return when `tick` has something to do."""
        if self.state is State.UP:
            return self._queries.due()
        if self.state is State.CLOSING:
            return self._since + self._limits.goodbye_s
        if self.state is State.DISCONNECTED:
            return self._link_deadline()
        return math.inf

    def flush(self, van: Transmitter, now: float) -> None:
        """Hand over to the van everything that may be sent now."""
        if self.state is not State.UP and self.state is not State.CLOSING:
            return
        if self._control or self._datagrams:
            bodies = [encode_body(message) for message in self._control] + self._datagrams
            self._control, self._datagrams = [], []
            for body in bodies:
                if not self._transmit(van, body, None, now):
                    return
        if self.acknowledge:
            self.acknowledge = False
            received, beyond = self.receiving.received_numbers()
            if not self._transmit_message(
                van, m.Ack(received=received, beyond=beyond, query=self._answer_to), now
            ):
                return
        if self.state is State.UP:
            self._pump(van, now)
            if self.ending and not self.sending.has_work():
                self._close(now)
                self.flush(van, now)

    # ------------------------------------------------------------------------------------------------- inside

    def _transition(self, event: Event, now: float) -> None:
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ProtocolViolation(f"{event.value} is not legal in state {self.state.value}")
        self.state = following
        self._since = now

    def _pump(self, van: Transmitter, now: float) -> None:
        sending = self.sending
        idle = not sending.unacknowledged
        message = sending.next(now)
        if message is None:
            return
        if idle:
            self._queries.progress(now)
            self._queries.expect(something=True)
        while message is not None:
            if not self._transmit(van, message.body, message, now):
                return
            message = sending.next(now)

    def _transmit_message(self, van: Transmitter, message: m.Message, now: float) -> bool:
        return self._transmit(van, encode_body(message), None, now)

    def _transmit(self, van: Transmitter, body: bytes, message: Outgoing | None, now: float) -> bool:
        assert self.connection is not None
        stamp = self._context.stamp()
        counters = self.counters
        if message is None:
            header = seal(body, sequence=0, sent_at=stamp, payload_crc=None)
            taken = van.transmit(self.connection, header, None)
            size = len(header)
        else:
            again = message.transmissions > 1
            unchecked = self.unchecked and message.payload is not None
            header = seal(
                body,
                sequence=message.sequence,
                sent_at=stamp,
                payload_crc=None if unchecked else message.crc(),
                unchecked=unchecked,
                resent=again,
                contended=message.payload is not None and self._context.contended(self.peer),
            )
            taken = van.transmit(self.connection, header, message.payload)
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

    def _check_liveness(self, now: float) -> None:
        """Send a query if nothing has been acknowledged for a while; give up if no answer comes."""
        silence = self._queries.silence(self.counters.heard_at, now)
        if silence and self._may_wait(silence, now):
            self._queries.excuse(now)
        elif silence:
            self._unanswered(f"no answer for {silence:.1f} s", now)
            return
        if self._queries.query_due(now):
            self._control.append(m.Query(number=self._queries.query_sent(self.sending.mark(), now)))

    def _may_wait(self, silence_s: float, now: float) -> bool:
        """Return whether a peer may be silent for even longer: the kernel of its machine acknowledges, and it
        is only slow, or busy.
        """
        limits, context = self._limits, self._context
        if self.connection is None or not context.acknowledges(self.connection):
            return False
        if self.state is State.UP and silence_s < limits.link_timeout_s:
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
        if self.state is State.UP:
            self._control.append(m.Goodbye())
        self._transition(Event.GOODBYE, now)
        self.sending.clear()
        if self.state is State.CLOSED:
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
        self._queries.progress(now)
        self._queries.expect(something=bool(self.sending.unacknowledged))
        if self.ending and not self.sending.has_work():
            self._close(now)

    def _link_deadline(self) -> float:
        return self._since + self._limits.link_timeout_s

    def _disconnected_text(self) -> str:
        return f"no connection for {self._limits.link_timeout_s:.1f} s: {self.reason}"

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
