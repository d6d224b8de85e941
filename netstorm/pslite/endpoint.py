"""All sessions of one process: which message belongs to which session, and what becomes of it. Pure.

Data from i to j goes over a connection that i opened. Its acknowledgements come back over the same
connection, so they never wait behind j's own data. A peer whose address is unknown here (for the scheduler: a
node) is answered over the connection that it opened.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Final

from netstorm.errors import FrameError, NoRoom, NotAuthorised, OtherProtocol, PeerError, ProtocolViolation
from netstorm.observe.log import Counters, Drops
from netstorm.observe.trace import Trace
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer, Header, Peer, checksum, encode_body, open_frames, seal
from netstorm.pslite.endpoint.acceptor import Acceptor
from netstorm.pslite.endpoint.endpoint_context import EndpointContext
from netstorm.pslite.endpoint.link_statistics import LinkStatistics
from netstorm.pslite.endpoint.local_process import LocalProcess
from netstorm.pslite.endpoint.message_sizes import SMALL, check_size
from netstorm.pslite.endpoint.returned_messages import as_sends
from netstorm.pslite.endpoint.session_table import SessionTable
from netstorm.pslite.endpoint.timers import Timers
from netstorm.pslite.endpoint.traffic_observer import TrafficObserver
from netstorm.pslite.endpoint.watched_connections import Inquiries, WatchedConnections
from netstorm.pslite.machine import Bounded, Connect, Disconnect, Inquire, Machine, Rerouter, Send, TakeBack
from netstorm.pslite.session.limits import Limits
from netstorm.pslite.session.link_state import LinkState
from netstorm.pslite.session.opened import OpenedSession
from netstorm.pslite.session.queue import Outgoing
from netstorm.pslite.session.session import Session
from netstorm.pslite.session.states import State
from netstorm.pslite.van.interface import Broken, Connection, Received, Transmitter, VanEvent

__all__ = ["Endpoint"]

_log = logging.getLogger(__name__)

_ENDED: Final = (State.CLOSED, State.LOST)


class Endpoint:
    """The sessions of one process.

    Attributes:
        process: what this process tells its peers about itself.
        counters: what was dropped or refused.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        job: str,
        incarnation: int,
        ordered: Callable[[Peer], bool],
        stamp: Callable[[], int],
        payloads: Callable[[Peer], bool] = lambda _: True,
        rank: int = -1,
        boot: int = 0,
        limits: Limits | None = None,
        rng: random.Random | None = None,
        counters: Counters | None = None,
        trace: Trace | None = None,
    ) -> None:
        """Begin without any session.

        Args:
            machine: decides who may open a session; receives what arrives.
            job: name of the job, for every Hello.
            incarnation: random number of this process.
            ordered: whether sessions with a peer deliver in order: control messages need it, chunks do not.
            stamp: returns the cluster clock, in ns.
            payloads: whether messages of a peer may have values.
            rank: this process's rank, for every Hello; -1 while it has none.
            boot: see `LocalProcess`.
            limits: time-outs and bounds.
            rng: numbers sessions and spreads attempts to connect.
            counters: what was dropped or refused is counted there.
            trace: records all deliveries.
        """
        self.process: Final = LocalProcess(job=job, incarnation=incarnation, rank=rank, boot=boot)
        self.counters: Final = counters or Counters()
        self._machine: Final = machine
        self._rerouter: Final = _rerouter_of(machine)
        self._watched: Final = WatchedConnections(machine)
        self._payloads = payloads
        self._without_room: Final = _WithoutRoom(machine, self.counters)
        self._ordered: Final = ordered
        self._stamp: Final = stamp
        self._random: Final = rng or random.Random(incarnation)
        self._drops: Final = Drops(self.counters)
        self._sessions: Final = SessionTable()
        self._timers: Final[Timers[Session]] = Timers()
        limits = Limits() if limits is None else limits
        self._statistics: Final = LinkStatistics(2 * limits.sessions)
        self._context: Final = EndpointContext(
            self.process, self._sessions, limits=limits, rng=self._random, stamp=stamp, trace=trace
        )
        self._context.may_be_busy = self._watched.may_be_busy
        self._inquiries: Final = Inquiries(self._sessions, self._context, self._watched)
        self._acceptor: Final = Acceptor(
            machine,
            self.process,
            self._sessions,
            self._context,
            self._statistics,
            ordered=ordered,
            counters=self.counters,
            drops=self._drops,
        )

    @property
    def acknowledges(self) -> Callable[[Connection], bool]:
        """Returns whether the kernel at the other end of a connection acknowledges what is sent to it."""
        return self._context.acknowledges

    @acknowledges.setter
    def acknowledges(self, acknowledges: Callable[[Connection], bool]) -> None:
        self._context.acknowledges = acknowledges

    @property
    def observer(self) -> TrafficObserver | None:
        """Told of what arrives and what is acknowledged, for passive measurement."""
        return self._context.observer

    @observer.setter
    def observer(self, observer: TrafficObserver | None) -> None:
        self._context.observer = observer

    def draw_tokens_from(self, source: random.Random) -> None:
        """Take the numbers by which peers know a session again from a source that others cannot guess."""
        self._context.tokens = source

    # ---------------------------------------------------------------------------- the machine's instructions

    def connect(self, instruction: Connect, now: float) -> None:
        """Learn a peer's address."""
        peer = instruction.peer
        session = self._sessions.opened.get(peer)
        if session is not None:
            session.host, session.port = instruction.host, instruction.port
            return
        self._sessions.opened[peer] = OpenedSession(
            self._context,
            peer,
            self._random.getrandbits(63),
            counters=self._statistics.counters(peer, opened_here=True),
            ordered=self._ordered(peer),
            host=instruction.host,
            port=instruction.port,
        )

    def send(self, instruction: Send, now: float) -> None:
        """Send a message to a peer over the session with it."""
        peer, sessions = instruction.peer, self._sessions
        session: Session | None = sessions.opened.get(peer) or sessions.accepted.get(peer)
        if instruction.back:
            session = sessions.accepted.get(peer) or session
        if session is None:
            self.counters.add("sends_without_session")
            _log.debug("nothing sent to %s: no session", self.process.name_of(peer))
            return
        body = encode_body(instruction.message)
        if isinstance(instruction.message, m.Datagram):
            session.submit_datagram(body, now)
        else:
            session.submit(
                Outgoing(
                    body, instruction.payload, instruction.order, instruction.payload_crc, instruction.tag
                ),
                now,
            )
        sessions.dirty[session] = None

    def take_back(self, instruction: TakeBack) -> None:
        """Take messages out of the links' queues again."""
        taken = []
        for session in self._sessions:
            found = session.sending.take_back(instruction.wanted)
            if found and instruction.then is not None:
                taken += as_sends(session.peer, found)
        if taken and instruction.then is not None:
            instruction.then(taken)

    def disconnect(self, instruction: Disconnect, now: float) -> None:
        """End the sessions with a peer."""
        sessions: tuple[Session | None, ...] = (
            self._sessions.opened.pop(instruction.peer, None),
            self._sessions.accepted.pop(instruction.peer, None),
        )
        for session in sessions:
            if session is not None:
                session.end(now, at_once=instruction.at_once)
                self._sessions.begin_ending(session)

    def inquire(self, instruction: Inquire, now: float) -> None:
        """Find out whether a peer is busy, or whether its process has ended."""
        self._inquiries.begin(instruction, now)

    # ------------------------------------------------------------------------------------ the van's events

    def handle(self, event: VanEvent, now: float) -> None:
        """Process an event of the van. Nothing that a peer sends raises an exception."""
        if isinstance(event, Broken):
            self._inquiries.broken(event, now)
            session = self._sessions.by_connection.get(event.connection)
            if session is None or session.connection != event.connection:
                return
            for one in self._sessions.with_peer(session.peer) if event.expelled else ():
                one.expel(event.reason, now)
                self._check_end(one, now)
            was_up = session.state is State.UP
            session.broken(event.reason, now)
            self._watched.changed(session, was_up=was_up)
            self._sessions.dirty[session] = None
            if event.refused:
                self._watched.refused(session.peer, event.reason, now)
            return
        try:
            self._received(event, now)
        except PeerError as error:
            if isinstance(error, OtherProtocol):
                self._acceptor.refuse_other_protocol(event, error, now)
            reason = "frame" if isinstance(error, FrameError) else "protocol"
            self._drop(reason, event.connection, str(error), now)

    def _received(self, event: Received, now: float) -> None:
        frames = event.frames
        session = self._sessions.by_connection.get(event.connection)
        if len(frames[0]) > SMALL:
            check_size(frames[0], None if session is None else session.peer, self.process.rank)
        header = open_frames(frames[0], len(frames))
        message = header.message
        if session is None:
            if isinstance(message, m.Hello) and event.connection < 0:
                self._accept(event.connection, message, now, event.user)
            elif not self._sessions.was_released(event.connection):
                raise ProtocolViolation(f"{type(message).__name__} on a connection without a session")
            return
        counters = session.counters
        counters.heard_at = now
        counters.messages_received += 1
        counters.bytes_received += sum(map(len, frames))
        if isinstance(message, m.SessionMessage):
            self._sessions.dirty[session] = None
            self._session_message(session, message, header, now)
        elif session.state is not State.UP:
            counters.drop("not_up")
        elif isinstance(message, m.Datagram):
            if header.sequence or header.has_payload:
                raise ProtocolViolation(f"a numbered {type(message).__name__}")
            self._deliver(session, message, None, 0, now)
        else:
            self._sequenced(session, header, frames, now)

    def _sequenced(self, session: Session, header: Header, frames: tuple[Buffer, ...], now: float) -> None:
        message, sequence = header.message, header.sequence
        if sequence <= 0:
            raise ProtocolViolation(f"{type(message).__name__} without a sequence number")
        session.acknowledge = True
        self._sessions.dirty[session] = None
        receiving = session.receiving
        if receiving.has(sequence):
            session.counters.duplicates += 1
            return
        payload: Buffer | None = None
        if header.has_payload:
            payload = frames[1]
            if not isinstance(message, m.DataMessage):
                raise ProtocolViolation(f"{type(message).__name__} with a payload")
            if not self._payloads(session.peer):
                what = f"{type(message).__name__} with {len(payload)} bytes of values"
                self._end(session, f"{what}, which no message between these two processes has", now)
                return
            if (
                not (header.payload_crc is None and session.unchecked)
                and checksum(payload) != header.payload_crc
            ):
                session.request_again(sequence)
                self._drop("checksum", session.connection, "the payload fails its checksum", now)
                return
        arrival = message, payload, header.payload_crc
        if self._context.observer is not None and isinstance(message, m.DataMessage):
            size = sum(map(len, frames))
            self._context.observer.arrived(
                session.peer,
                size,
                header.sent_at,
                self._stamp(),
                resent=header.resent,
                contended=header.contended,
            )
        try:
            if receiving.ordered:
                arrivals = receiving.receive(sequence, arrival, sum(map(len, frames)))
            else:
                receiving.check(sequence)
                arrivals = [arrival]
        except ProtocolViolation as error:
            self._end(session, str(error), now)
            return
        for one in arrivals:
            try:
                self._deliver(session, *one, now)
            except NoRoom as error:
                self._leave(session, sequence, frames, error, now)
                return
        if not receiving.ordered:
            receiving.receive(sequence, arrival)

    def _leave(
        self, session: Session, sequence: int, frames: tuple[Buffer, ...], error: NoRoom, now: float
    ) -> None:
        """Leave a message to its sender, as if it had not come, until there is room for it."""
        try:
            session.refuse_for_now(sequence, sum(map(len, frames)), error.waits_for)
        except ProtocolViolation as violation:
            self._end(session, str(violation), now)
        else:
            self._without_room.add(session, self.process.name_of(session.peer), str(error), now)

    def _end(self, session: Session, reason: str, now: float) -> None:
        """End the session with a peer that does what no correct process does."""
        session.counters.drop("protocol")
        text = f"{reason}: the session with it is ended"
        self._drops.note("protocol", self.process.name_of(session.peer), text, now)
        if session.connection is not None and session.connection < 0:
            self._sessions.refused.append((session.connection, reason))
        session.expel(f"{self.process.name_of(session.peer)} has sent a {reason}", now)
        self._check_end(session, now)

    def _deliver(
        self,
        session: Session,
        message: m.Message,
        payload: Buffer | None,
        payload_crc: int | None,
        now: float,
    ) -> None:
        try:
            self._machine.receive(session.peer, message, payload, payload_crc, now)
        except NoRoom as error:
            if not session.receiving.ordered:
                raise
            session.counters.drop("refused")
            self._drops.note("refused", self.process.name_of(session.peer), str(error), now)
        except PeerError as error:
            reason = "authority" if isinstance(error, NotAuthorised) else "refused"
            session.counters.drop(reason)
            self._drops.note(reason, self.process.name_of(session.peer), str(error), now)

    def _session_message(
        self, session: Session, message: m.SessionMessage, header: Header, now: float
    ) -> None:
        if header.sequence or header.has_payload:
            raise ProtocolViolation(f"a numbered {type(message).__name__}")
        self._context.acknowledgement_stamp = header.sent_at
        if self._context.observer is not None and session.state is State.UP:
            self._context.observer.control_arrived(session.peer, header.sent_at, self._stamp())
        if isinstance(message, (m.Welcome, m.Refused)) and isinstance(session, OpenedSession):
            if isinstance(message, m.Welcome):
                session.welcome(message, now)
            else:
                session.refused(message, now)
        elif session.state in (State.UP, State.CLOSING) or isinstance(message, m.Goodbye):
            session.receive_session_message(message, now)
        else:
            session.counters.drop("not_up")
        self._check_end(session, now)

    def _accept(self, connection: Connection, hello: m.Hello, now: float, user: str = "") -> Peer | None:
        """Answer a Hello; return the peer whose session uses the connection from now on, if it is
        admitted.
        """
        return self._acceptor.receive(connection, hello, now, user)

    # --------------------------------------------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """Do what is due."""
        pending = self._acceptor.pending
        if now >= pending.retry_at:
            for connection, hello, user in pending.take_all():
                self._accept(connection, hello, now, user)
        while (session := self._timers.take(now)) is not None:
            if session.due() <= now:
                session.tick(now)
                if session.busy_s:
                    self._watched.busy(session.peer, session.busy_s)
                    session.busy_s = 0.0
                self._check_end(session, now)
            self._sessions.dirty[session] = None

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return min(self._acceptor.pending.retry_at, self._timers.next())

    def flush(self, van: Transmitter, now: float) -> None:
        """Hand over to the van the acknowledgements and all messages that windows allow."""
        for connection, message, version in self._acceptor.answers:
            header = seal(
                encode_body(message), sequence=0, sent_at=self._stamp(), payload_crc=None, version=version
            )
            van.transmit(connection, header, None)
        self._acceptor.answers.clear()
        sessions = self._sessions
        for connection in sessions.admitted:
            van.admit(connection)
        sessions.admitted.clear()
        for connection, reason in sessions.refused:
            van.refuse(connection, reason)
        sessions.refused.clear()
        sessions.dirty.update(self._without_room.request())
        self._inquiries.flush(van)
        while sessions.dirty or sessions.released:
            while sessions.released:
                van.close(sessions.released.pop())
            for session in sessions.take_dirty():
                was_up = session.state is State.UP
                session.flush(van, now)
                self._watched.changed(session, was_up=was_up)
                self._timers.set(session, session.due())
                sessions.note_end(session)

    def resumed(self, now: float, missed_s: float) -> None:
        """Learn that this process goes on after it did not run for `missed_s`, which `now` does not count.
        What is acknowledged now says nothing about links.
        """
        self._context.resumed_at = now
        if self._context.observer is not None:
            self._context.observer.resumed(missed_s)
        for session in self._sessions:
            session.sending.window.resumed_at = now

    def tell_disconnections(self, now: float) -> bool:
        """Tell the machine which peers' connections were found to be gone; return whether there are any."""
        return self._watched.tell(now)

    # ------------------------------------------------------------------------------------------- for others

    def idle(self) -> bool:
        """Return whether everything sent has been acknowledged and no session is ending."""
        return self._sessions.idle()

    def link_state(self, peer: Peer) -> LinkState:
        """Return the present state of the link to a peer."""
        session = self._sessions.of(peer)
        return LinkState() if session is None else session.sending.state()

    def links(self) -> dict[tuple[Peer, bool], dict[str, int]]:
        """Return what went over each link, present or past, by peer and whether it was opened here."""
        return self._statistics.snapshot()

    def connections(self) -> dict[Peer, Connection]:
        """Return the connections that were opened here and are in use, by peer."""
        return self._sessions.connections()

    # ----------------------------------------------------------------------------------------------- inside

    def _check_end(self, session: Session, now: float) -> None:
        """Take a session that is ending or has ended out of the table."""
        if session.state is State.CLOSING or session.state in _ENDED:
            current = self._sessions.remove(session)
            if current and session.state is State.CLOSING:
                self._sessions.ending[session] = None
            if current and session.state is State.LOST and not session.ending:
                self._lost(session, now)

    def _lost(self, session: Session, now: float) -> None:
        """Tell the machine that a session is lost, and return to it what could not be delivered."""
        if self._rerouter is None or not session.opened_here:
            self._machine.peer_lost(session.peer, session.reason, now)
            return
        undelivered = as_sends(session.peer, session.undelivered)
        session.undelivered = []
        self._rerouter.link_lost(session.peer, session.reason, undelivered, now)

    def _drop(self, reason: str, connection: Connection | None, detail: str, now: float) -> None:
        session = None if connection is None else self._sessions.by_connection.get(connection)
        if session is None:
            sender = "a connection without a session"
            if connection is not None and connection < 0:
                self._sessions.refused.append((connection, detail))
        else:
            session.counters.drop(reason)
            sender = self.process.name_of(session.peer)
        self._drops.note(reason, sender, detail, now)


def _rerouter_of(machine: object) -> Rerouter | None:
    return machine if isinstance(machine, Rerouter) else None


class _WithoutRoom:
    """Sessions with messages for which the machine has no room yet."""

    def __init__(self, machine: object, counters: Counters) -> None:
        self.machine = machine if isinstance(machine, Bounded) else None
        self._drops: Final = Drops(counters, counted_as="messages", what="cannot keep a message")
        self._sessions: Final[dict[Session, None]] = {}

    def add(self, session: Session, sender: str, reason: str, now: float) -> None:
        """Note a session that has such a message."""
        self._drops.note("no_room", sender, reason, now)
        self._sessions[session] = None

    def request(self) -> dict[Session, None]:
        """Ask for messages that have room now, or need not wait any more; return the sessions."""
        if not self._sessions or self.machine is None:
            return {}
        waiting = self.machine.waiting
        ready = waiting.take_ready()
        asked = dict(self._sessions)
        for session in asked:
            session.request_refused(waiting.room(session.peer), ready)
            if not session.without_room:
                del self._sessions[session]
        return asked
