"""All sessions of one process: which message belongs to which session, and what becomes of it. Pure.

Data from i to j goes over a connection that i opened. Its acknowledgements come back over the same
connection, so they never wait behind j's own data. A peer whose address is unknown here (for the scheduler: a
node) is answered over the connection that it opened.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterable
from typing import Final, Generic, NamedTuple, TypeVar

from netstorm import __version__
from netstorm.addresses import host_port, is_loopback
from netstorm.errors import (
    FrameError,
    NoRoom,
    NotAuthorised,
    OtherProtocol,
    Overloaded,
    PeerError,
    ProtocolViolation,
)
from netstorm.observe.log import Counters, Drops
from netstorm.observe.trace import Trace
from netstorm.protocol import messages as m
from netstorm.protocol.frames import (
    PROTOCOL_VERSION,
    SMALL,
    SPEAKS_VERSION,
    UNKNOWN,
    BodyEncoder,
    Buffer,
    Header,
    Peer,
    check_size,
    checksum,
    clean_body,
    decode_body,
    encode_body,
    open_frames,
    seal,
    tag_in,
)
from netstorm.pslite.datagram.lanes import LaneArrival, Lanes
from netstorm.pslite.link_meter import LinkMeter
from netstorm.pslite.machine import (
    Admit,
    Become,
    Bounded,
    Call,
    Connect,
    ConnectionWatcher,
    Disconnect,
    Dispatcher,
    Inquire,
    Instruction,
    LinkState,
    Machine,
    NotYet,
    Refuse,
    Rerouter,
    Send,
    TakeBack,
)
from netstorm.pslite.rates import TcpProgress
from netstorm.pslite.sending import HostTraffic, SendQueueItem
from netstorm.pslite.session import AcceptedSession, Limits, OpenedSession, Session, SessionState
from netstorm.pslite.session_table import (
    LinkStatistics,
    LocalProcess,
    NewSessions,
    PendingHellos,
    SessionTable,
)
from netstorm.pslite.van import (
    Broken,
    Connection,
    PayloadMemory,
    Received,
    Transmitter,
    VanEvent,
    Widened,
)

__all__ = ["Endpoint", "LoggedEndpoint", "Stack", "Timers", "WatchedConnections"]


_log = logging.getLogger(__name__)

_OVER: Final = (SessionState.CLOSING, SessionState.CLOSED, SessionState.LOST)

_HELLO: Final = m.Hello.__struct_config__.tag

_MOST_CHARACTERS: Final = 2000
"""Of the reason of a refusal, which may quote what the other side has sent."""


_PART_OF_SESSIONS: Final = 16
"""Of all that there may be: ended at once where there is no room, since to look at all takes a few ms."""

_MOST_AT_ONCE: Final = 8_000_000
"""Bytes that a scheduler hands over in one turn: a policy for 512 nodes is 2.4 MB each, which takes 1 ms."""


class Endpoint:
    """The sessions of one process.

    Attributes:
        process: what this process tells its peers about itself.
        counters: what was dropped or refused.
        watched: what a machine that watches connections is to be told.
        lanes: for values that may be late; None: everything goes over sessions.
    """

    lanes: Lanes | None = None

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
        tokens: random.Random | None = None,
        acknowledges: Callable[[Connection], bool] = lambda _: False,
        answers_late: Callable[[Connection], bool] = lambda _: False,
        progress: Callable[[Connection], TcpProgress | None] = lambda _: None,
        counters: Counters | None = None,
        trace: Trace | None = None,
        traffic: HostTraffic | None = None,
        memory: PayloadMemory | None = None,
        is_own: Callable[[str], bool] = is_loopback,
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
            tokens: the numbers by which peers know a session again; nobody else may guess them, but in tests.
            acknowledges: whether the kernel at the other end of a connection acknowledges what is sent to it.
            answers_late: whether it does so later than it could, because of the link.
            progress: what the kernel knows of a connection that was opened here.
            counters: what was dropped or refused is counted there.
            trace: records all deliveries.
            traffic: what this job and others on its host tell each other; None: the job has no priority.
            memory: of payloads between processes of one machine; None: they go over connections.
            is_own: whether an address is one of this machine's own.
        """
        self.process: Final = LocalProcess(job=job, incarnation=incarnation, rank=rank, boot=boot)
        self.counters: Final = counters or Counters()
        self._machine: Final = machine
        self._rerouter: Final = _rerouter_of(machine)
        self.watched: Final = WatchedConnections(machine)
        self._payloads = payloads
        self._without_room: Final = _WithoutRoom(machine, self.counters)
        self._ordered: Final = ordered
        self._stamp: Final = stamp
        self._random: Final = rng or random.Random(incarnation)
        self._drops: Final = Drops(self.counters)
        self._bodies: Final = BodyEncoder()
        self._unfinished = False
        """The last `flush` has left sessions to the next one."""
        self._timers: Final[Timers[Session]] = Timers()
        self._answers_late: Final = answers_late
        limits = Limits() if limits is None else limits
        self._statistics: Final = LinkStatistics(2 * limits.sessions)
        self._sessions: Final = SessionTable(
            self.process,
            limits=limits,
            rng=self._random,
            tokens=tokens or random.Random(f"tokens {incarnation}"),
            stamp=stamp,
            acknowledges=acknowledges,
            progress=progress,
            may_be_busy=self.watched.may_be_busy,
            trace=trace,
            traffic=traffic,
            memory=memory,
            is_own=is_own,
        )
        self._inquiries: Final[dict[Peer, _Trial]] = {}
        """Those that need a connection."""
        self._trials: Final[dict[Connection, _Trial]] = {}
        """Those that have one, by connection."""
        self._answers: Final[list[tuple[Connection, m.SessionMessage, int]]] = []
        """To be sent over connections that have no session, each in a version of the protocol."""
        self._pending: Final = PendingHellos(limits.pending_hellos)
        self._new_sessions: Final = NewSessions()
        self._reserved: Final[set[Connection]] = set()
        """Connections that others have opened for sessions to come."""
        self._refusals: Final = Drops(self.counters, counted_as="refused", what="refused a session")

    @property
    def observer(self) -> LinkMeter | None:
        """Told of what arrives and what is acknowledged, for passive measurement."""
        return self._sessions.observer

    @observer.setter
    def observer(self, observer: LinkMeter | None) -> None:
        self._sessions.observer = observer

    # ---------------------------------------------------------------------------- the machine's instructions

    def connect(self, instruction: Connect, now: float) -> None:
        """Learn a peer's address."""
        peer = instruction.peer
        session = self._sessions.opened.get(peer)
        if session is not None:
            session.host, session.port = instruction.host, instruction.port
            return
        opened = self._sessions.opened[peer] = OpenedSession(
            self._sessions,
            peer,
            self._random.getrandbits(63),
            counters=self._statistics.counters(peer, opened_here=True),
            ordered=self._ordered(peer),
            host=instruction.host,
            port=instruction.port,
        )
        if instruction.at_once:
            opened.connect(now)
            self._sessions.dirty[opened] = None

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
        if instruction.payload is not None:  # no other peer's
            body = encode_body(instruction.message)
        elif isinstance(instruction.message, m.Joined):
            body = self._bodies.encode_joined(instruction.message)
        else:
            body = self._bodies.encode(instruction.message)
        if isinstance(instruction.message, m.Datagram):
            session.submit_datagram(body)
        else:
            item = SendQueueItem(
                body,
                instruction.payload,
                instruction.order,
                instruction.payload_crc,
                instruction.tag,
                charge=instruction.charge,
            )
            if self.lanes is None or not self.lanes.take(
                session, instruction.message, instruction.payload, item, now
            ):
                session.submit(item, now)
        sessions.dirty[session] = None

    def take_back(self, instruction: TakeBack) -> None:
        """Take messages out of the links' queues again."""
        taken = []
        for session in self._sessions:
            untransmitted = session.sending.take_back(instruction.wanted)
            if untransmitted and instruction.then is not None:
                taken += as_sends(session.peer, untransmitted)
        if self.lanes is not None:
            # What nobody wants any more need not be put together; anything else may be, and goes on.
            for peer, item in self.lanes.take_back(instruction.wanted, begun=instruction.then is None):
                taken += as_sends(peer, [item])
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
                for item in () if self.lanes is None else self.lanes.end(session):
                    session.submit(item, now)
                session.end(now, at_once=instruction.at_once)
                self._sessions.begin_ending(session)
        for connection, trial in self._trials.items():
            if trial.inquiry.peer == instruction.peer:
                self._trials[connection] = trial._replace(stranger=False)  # so it is closed

    def inquire(self, instruction: Inquire, now: float) -> None:
        """Find out whether a peer is busy, or whether its process has ended: the kernel at the other end of
        its connection is asked, or a new one is tried.
        """
        session = self._sessions.accepted.get(instruction.peer)
        if session is not None and session.state is SessionState.UP and session.connection is not None:
            if self._sessions.acknowledges(session.connection):
                self._note_busy(session, now - session.counters.heard_at)
        elif all(trial.inquiry.peer != instruction.peer for trial in self._trials.values()):
            self._inquiries[instruction.peer] = _Trial(instruction, stranger=session is None)

    def _note_busy(self, session: Session, seconds: float) -> None:
        late = session.connection is not None and self._answers_late(session.connection)
        self.watched.busy(session.peer, seconds, late=late)

    # ------------------------------------------------------------------------------------ the van's events

    def handle(self, event: VanEvent, now: float) -> bool:
        """Process an event of the van; return whether the machine may have heard of it. Nothing that a peer
        sends raises an exception.
        """
        if not isinstance(event, Received):
            self._changed(event, now)
            return True
        session = self._sessions.by_connection.get(event.connection)
        frames = event.frames
        try:
            if len(frames[0]) > SMALL:
                check_size(frames[0], None if session is None else session.peer, self.process.rank)
            header = open_frames(frames[0], len(frames))
            message = header.message
            if session is None:
                if isinstance(message, m.Hello) and event.connection < 0:
                    if event.connection in self._reserved:
                        self._reserved.discard(event.connection)
                        self.counters.add("reserved_used")
                    self._accept(event.connection, message, now, event.user)
                elif isinstance(message, m.Reserve) and event.connection < 0:
                    self._reserve(event.connection, now)
                elif not self._sessions.was_released(event.connection):
                    raise ProtocolViolation(f"{type(message).__name__} on a connection without a session")
                return True
            counters = session.counters
            counters.heard_at = now
            counters.messages_received += 1
            counters.bytes_received += sum(map(len, frames))
            if isinstance(message, m.SessionMessage):
                self._sessions.dirty[session] = None
                self._session_message(session, message, header, now)
                return session.state in _OVER
            if session.state is not SessionState.UP:
                counters.drop("not_up")
            elif isinstance(message, m.Datagram):
                if header.sequence or header.has_payload:
                    raise ProtocolViolation(f"a numbered {type(message).__name__}")
                self._deliver(session, message, None, 0, now)
            else:
                self._sequenced(session, header, frames, now)
        except PeerError as error:
            if isinstance(error, OtherProtocol):
                self._refuse_other_protocol(event, error, now)
            reason = "frame" if isinstance(error, FrameError) else "protocol"
            self._drop(reason, event.connection, str(error), now)
        return True

    def _changed(self, event: Broken | Widened, now: float) -> None:
        """Note the state of a connection."""
        if isinstance(event, Broken):
            self._broken(event, now)
        elif event.connection in self._sessions.by_connection:
            self._sessions.by_connection[event.connection].widened(event.streams)

    def _broken(self, event: Broken, now: float) -> None:
        self._reserved.discard(event.connection)
        trial = self._trials.pop(event.connection, None)
        if trial is not None and event.refused:
            self.watched.refused(trial.inquiry.peer, event.reason, now)
        elif trial is not None and trial.left:
            # A process that ends closes its sockets one after the other: it may have listened a moment ago.
            self._inquiries[trial.inquiry.peer] = trial._replace(left=trial.left - 1)
        session = self._sessions.by_connection.get(event.connection)
        if session is None or session.connection != event.connection:
            return
        for with_peer in self._sessions.with_peer(session.peer) if event.expelled else ():
            with_peer.expel(event.reason, now)
            self._check_end(with_peer, now)
        was_up = session.state is SessionState.UP
        session.broken(event.reason, now)
        if was_up:
            self.watched.changed(session)
        self._sessions.dirty[session] = None
        if event.refused:
            self.watched.refused(session.peer, event.reason, now)

    def read_lanes(self, lanes: Lanes, now: float) -> None:
        """Deliver what has come over lanes."""
        for arrived in lanes.receive(now):
            self._arrived(arrived, now)

    def _arrived(self, arrived: LaneArrival, now: float) -> None:
        """Deliver a message that has come over a lane, now or once there is room for it."""
        try:
            message = clean_body(arrived.whole.body)
            if not isinstance(message, m.Part):
                raise ProtocolViolation(f"{type(message).__name__} over a lane")
        except PeerError as error:
            self._note("protocol", arrived.session, str(error), now)
            return
        try:
            self._deliver(arrived.session, message, arrived.whole.payload, None, now)
        except NoRoom:
            if self.lanes is not None:
                self.lanes.keep(arrived, now)

    def _sequenced(self, session: Session, header: Header, frames: tuple[Buffer, ...], now: float) -> None:
        message, sequence = header.message, header.sequence
        if sequence <= 0:
            raise ProtocolViolation(f"{type(message).__name__} without a sequence number")
        self._sessions.dirty[session] = None
        receiving = session.receiving
        if receiving.has(sequence):
            session.counters.duplicates += 1
            session.will_acknowledge(0, now)
            return
        session.will_acknowledge(sum(map(len, frames)), now)
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
        if self._sessions.observer is not None and isinstance(message, m.DataMessage):
            self._sessions.observer.arrived(
                session.peer,
                sum(map(len, frames)),
                header.sent_at,
                self._stamp(),
                resent=header.resent,
                contended=header.contended,
            )
        try:
            if receiving.ordered:
                arrivals = receiving.receive(sequence, arrival, sum(map(len, frames)))
            else:
                if receiving.beyond:
                    receiving.check(sequence)
                arrivals = [arrival]
        except ProtocolViolation as error:
            self._end(session, str(error), now)
            return
        for ready in arrivals:
            try:
                self._deliver(session, *ready, now)
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
            reason = f"{error}; it is asked for the rest later"
            self._without_room.add(session, self.process.name_of(session.peer), reason, now)

    def _end(self, session: Session, reason: str, now: float) -> None:
        """End the session with a peer that does what no correct process does."""
        if session.connection is not None and session.connection < 0:
            self._sessions.refused.append((session.connection, reason))
        self._expel(session, reason, now)

    def _expel(self, session: Session, reason: str, now: float) -> None:
        self._note("protocol", session, f"{reason}: the session with it is ended", now)
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
            self._note("refused", session, str(error), now)
        except Overloaded as error:
            # It is no fault: the peer sends elsewhere what is not acknowledged, and has to send no more.
            connection, reason = session.connection, f"it has sent a {error}"
            if connection is not None and connection < 0:
                received, beyond = session.receiving.received_numbers()
                self._answers.append((connection, m.Ack(received=received, beyond=beyond), PROTOCOL_VERSION))
                self._answers.append((connection, m.Refused(reason=reason), PROTOCOL_VERSION))
            self._expel(session, str(error), now)
        except PeerError as error:
            self._note(
                "authority" if isinstance(error, NotAuthorised) else "refused", session, str(error), now
            )

    def _session_message(
        self, session: Session, message: m.SessionMessage, header: Header, now: float
    ) -> None:
        if header.sequence or header.has_payload:
            raise ProtocolViolation(f"a numbered {type(message).__name__}")
        self._sessions.acknowledgement_stamp = header.sent_at
        if self._sessions.observer is not None and session.state is SessionState.UP:
            self._sessions.observer.control_arrived(session.peer, header.sent_at, self._stamp())
        if isinstance(message, (m.Welcome, m.Refused)) and isinstance(session, OpenedSession):
            if isinstance(message, m.Welcome):
                session.welcome(message, now)
            else:
                session.refused(message, now)
        elif isinstance(message, (m.LaneOffer, m.LaneAnswer)):
            self._lane_message(session, message, now)
        elif session.state in (SessionState.UP, SessionState.CLOSING) or isinstance(message, m.Goodbye):
            session.receive_session_message(message, now)
        else:
            session.counters.drop("not_up")
        if session.state in _OVER:
            self._check_end(session, now)

    def _lane_message(self, session: Session, message: m.LaneOffer | m.LaneAnswer, now: float) -> None:
        """Let this process's lanes handle an offer, or the answer to one; without lanes it is ignored."""
        if self.lanes is None or session.state is not SessionState.UP:
            self.counters.add("lane_offers_refused")
        elif isinstance(message, m.LaneOffer):
            self.lanes.offered(session, message)
        else:
            self.lanes.answered(session, message, now)

    # ---------------------------------------------------------------- which processes get a session: Hellos

    def _accept(self, connection: Connection, hello: m.Hello, now: float, user: str = "") -> Peer | None:
        """Decide on a Hello of a process with a user's key; return the peer whose session uses the connection
        from now on, if it is admitted.
        """
        if self._sessions.has_ended(hello):
            self._answers.append((connection, m.Goodbye(), PROTOCOL_VERSION))
            self._sessions.released.append(connection)
            return None
        admission = self._machine.admit(hello, user)
        if isinstance(admission, Admit):
            peer = admission.peer
            problem = self._admit(connection, hello, peer, now)
            if problem is None:
                return peer
            admission = problem
        if isinstance(admission, NotYet):
            self._pending.add(connection, hello, now, user)
            return None
        self._refusals.note("hellos", f"rank {hello.sender} of job {hello.job[:60]!r}", admission.reason, now)
        refusal = m.Refused(reason=admission.reason[:_MOST_CHARACTERS])
        self._answers.append((connection, refusal, PROTOCOL_VERSION))
        self._sessions.released.append(connection)
        return None

    def _reserve(self, connection: Connection, now: float) -> None:
        """Let a connection wait for a session to come, if there is room; else its opener makes another one.

        Raises:
            ProtocolViolation: no connection waits here, or this one does already.
        """
        most = self._sessions.limits.reserved
        if not most or connection in self._reserved:
            raise ProtocolViolation("a Reserve where no connection waits, or for the second time")
        if len(self._reserved) >= most:
            self._refusals.note("reserved", f"connection {connection}", f"{most} wait already", now)
            self._sessions.released.append(connection)
            return
        self._reserved.add(connection)
        self.counters.add("reserved")
        self._sessions.admitted.append(connection)

    def _refuse_other_protocol(self, hello: Received, error: OtherProtocol, now: float) -> None:
        """Answer the Hello of a process that speaks another version of the protocol, in that version: it
        would wait for an answer until its time-out.
        """
        if hello.connection < 0 and tag_in(hello.frames[0]) == _HELLO and self._new_sessions.take(now):
            reason = (
                f"it {SPEAKS_VERSION} {PROTOCOL_VERSION} (NetStorm {__version__}), and this process in "
                f"version {error.version}: install the same release of NetStorm everywhere"
            )
            self._answers.append((hello.connection, m.Refused(reason=reason), error.version))
            self._sessions.released.append(hello.connection)

    def _admit(
        self, connection: Connection, hello: m.Hello, peer: Peer, now: float
    ) -> Refuse | NotYet | None:
        """Give an admitted process its session, or return why that is impossible, or too early."""
        if hello.receiver != self.process.rank and hello.receiver > UNKNOWN:
            return Refuse(f"this is rank {self.process.rank}, not rank {hello.receiver} (-1: the scheduler)")
        accepted = self._sessions.accepted
        ending = self._sessions.find_ending(hello)
        session = ending or self._present_session(hello, peer, now)
        if session is None:
            if hello.resuming:
                return Refuse("that session is not known here (any more)")
            if not self._new_sessions.take(now):
                return NotYet()
            if len(accepted) >= self._sessions.limits.sessions:
                self._end_idle_sessions(now)
            if len(accepted) >= self._sessions.limits.sessions:
                return Refuse(f"this process has {len(accepted)} sessions already")
            counters = self._statistics.counters(peer, opened_here=False)
            session = AcceptedSession(
                self._sessions, peer, hello, counters=counters, ordered=self._ordered(peer)
            )
        try:
            session.hello(hello, connection, now)
        except ProtocolViolation as error:
            self._drops.note("protocol", f"connection {connection}", str(error), now)
            return Refuse(str(error))
        session.counters.heard_at = now
        if session is not ending:
            accepted[peer] = session
        self._sessions.by_connection[connection] = session
        self._sessions.admitted.append(connection)
        self._sessions.dirty[session] = None
        return None

    def _end_idle_sessions(self, now: float) -> None:
        """Make room for new sessions: end some that have had no connection for so long that correct peers
        have lost them, first those over which least has come.
        """
        limits, sessions = self._sessions.limits, self._sessions.accepted.values()
        idle = [session for session in sessions if session.away_s(now) > 2 * limits.link_timeout_s]
        idle.sort(key=lambda session: session.receiving.received)
        for session in idle[: max(1, limits.sessions // _PART_OF_SESSIONS)]:
            session.expel("it has had no connection for long, and others want a session", now)
            self._check_end(session, now)

    def _present_session(self, hello: m.Hello, peer: Peer, now: float) -> AcceptedSession | None:
        """Return the peer's session if the Hello goes on with it; otherwise end that session."""
        session = self._sessions.accepted.get(peer)
        if session is None or session.is_that_of(hello):
            return session
        name = self.process.name_of(peer)
        if session.incarnation != hello.incarnation:
            self._replace(session, f"{name} came back as another process", now)
            self._machine.peer_lost(peer, session.reason, now)
        else:
            self._replace(session, f"{name} has begun a new session", now)
        return None

    def _replace(self, session: AcceptedSession, reason: str, now: float) -> None:
        if session.sending.has_work():
            _log.warning("%s; messages that it has not acknowledged are lost", reason)
        del self._sessions.accepted[session.peer]
        session.end(now, at_once=True)
        session.reason = reason
        self._sessions.begin_ending(session)

    # --------------------------------------------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """Do what is due."""
        if now >= self._pending.retry_at:
            for connection, hello, user in self._pending.take_all():
                self._accept(connection, hello, now, user)
        while (session := self._timers.take(now)) is not None:
            if session.due() <= now:
                session.tick(now)
                if session.busy_s:
                    self._note_busy(session, session.busy_s)
                    session.busy_s = 0.0
                self._check_end(session, now)
            self._sessions.dirty[session] = None

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        due = -math.inf if self._unfinished else min(self._pending.retry_at, self._timers.next())
        return due if self.lanes is None else min(due, self.lanes.next_flush())

    def flush(self, van: Transmitter, now: float) -> None:
        """Hand over to the van the acknowledgements and all messages that windows allow.

        A scheduler hands over 8 MB at a time, and looks for messages in between.
        """
        for connection, message, version in self._answers:
            header = seal(
                encode_body(message), sequence=0, sent_at=self._stamp(), payload_crc=None, version=version
            )
            van.transmit(connection, header, None)
        self._answers.clear()
        sessions = self._sessions
        for connection in sessions.admitted:
            van.admit(connection)
        sessions.admitted.clear()
        for connection, reason in sessions.refused:
            van.refuse(connection, reason)
        sessions.refused.clear()
        if self._without_room.sessions:
            sessions.dirty.update(self._without_room.request())
        if self._inquiries or self._trials:
            self._try_connections(van)
        if self.lanes is not None:
            for failed, items in self.lanes.flush(now):
                for item in items:
                    failed.submit(item, now)
                sessions.dirty[failed] = None
        self._flush_sessions(van, now)

    def _flush_sessions(self, van: Transmitter, now: float) -> None:
        sessions = self._sessions
        self._unfinished, sent = False, 0
        while (sessions.dirty or sessions.released) and not self._unfinished:
            while sessions.released:
                van.close(sessions.released.pop())
            dirty, sessions.dirty = sessions.dirty, {}
            for session in dirty:
                if sent > _MOST_AT_ONCE and self.process.rank < 0:
                    self._unfinished = True
                    sessions.dirty[session] = None
                    continue
                was_up, before = session.state is SessionState.UP, session.counters.bytes_sent
                session.flush(van, now)
                sent += session.counters.bytes_sent - before
                if session.state is not SessionState.UP:
                    if was_up:
                        self.watched.changed(session)
                    sessions.note_end(session)
                self._timers.set(session, session.due())

    def _try_connections(self, van: Transmitter) -> None:
        """Open the connections that inquiries need, and close those to peers that have come back."""
        for connection, trial in list(self._trials.items()):
            if not self._is_away(trial):
                del self._trials[connection]
                van.close(connection)
        for trial in self._inquiries.values():
            if self._is_away(trial):
                connection = self._sessions.new_connection()
                self._trials[connection] = trial
                van.open(connection, trial.inquiry.host, trial.inquiry.port)
        self._inquiries.clear()

    def _is_away(self, trial: _Trial) -> bool:
        session = self._sessions.accepted.get(trial.inquiry.peer)
        return trial.stranger if session is None else session.state is not SessionState.UP

    def resumed(self, now: float, missed_s: float) -> None:
        """Learn that this process goes on after it did not run for `missed_s`, which `now` does not count.
        What is acknowledged now says nothing about links.
        """
        self._sessions.resumed_at = now
        if self._sessions.observer is not None:
            self._sessions.observer.resumed(missed_s)
        for session in self._sessions:
            session.sending.window.resumed_at = now

    # ------------------------------------------------------------------------------------------- for others

    def idle(self) -> bool:
        """Return whether everything sent has been acknowledged and no session is ending."""
        return self._sessions.idle() and (self.lanes is None or self.lanes.idle())

    def link_state(self, peer: Peer) -> LinkState:
        """Return the present state of the link to a peer."""
        session = self._sessions.of(peer)
        state = LinkState() if session is None else session.sending.state()
        lane = None if self.lanes is None else self.lanes.state(peer)
        if lane is None:
            return state
        return LinkState(
            messages=state.messages + lane.messages,
            bytes=state.bytes + lane.bytes,
            window=max(state.window, lane.window),
            rate=max(state.rate, lane.rate),
            latency_s=lane.latency_s,
        )

    def links(self) -> dict[tuple[Peer, bool], dict[str, int]]:
        """Return what went over each link, present or past, by peer and whether it was opened here."""
        return self._statistics.snapshot()

    def queued_bytes(self) -> int:
        """Return how many bytes for other nodes wait, or are not acknowledged yet."""
        return self._sessions.queued_bytes()

    def connections(self) -> dict[Peer, Connection]:
        """Return the connections that were opened here and are in use, by peer."""
        return self._sessions.connections()

    # ----------------------------------------------------------------------------------------------- inside

    def _check_end(self, session: Session, now: float) -> None:
        """Take a session that is ending or has ended out of the table."""
        if session.state in _OVER:
            if self.lanes is not None:
                session.undelivered += self.lanes.end(session)
            current = self._sessions.remove(session)
            if current and session.state is SessionState.CLOSING:
                self._sessions.ending[session] = None
            if current and session.state is SessionState.LOST and not session.ending:
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
        if session is not None:
            self._note(reason, session, detail, now)
            return
        if connection is not None and connection < 0:
            self._sessions.refused.append((connection, detail))
        self._drops.note(reason, "a connection without a session", detail, now)

    def _note(self, reason: str, session: Session, detail: str, now: float) -> None:
        session.counters.drop(reason)
        self._drops.note(reason, self.process.name_of(session.peer), detail, now)


def _rerouter_of(machine: object) -> Rerouter | None:
    return machine if isinstance(machine, Rerouter) else None


class _WithoutRoom:
    """Sessions with messages for which the machine has no room yet."""

    def __init__(self, machine: object, counters: Counters) -> None:
        self.machine = machine if isinstance(machine, Bounded) else None
        self._drops: Final = Drops(counters, counted_as="messages", what="cannot keep a message")
        self.sessions: Final[dict[Session, None]] = {}

    def add(self, session: Session, sender: str, reason: str, now: float) -> None:
        """Note a session that has such a message."""
        self._drops.note("no_room", sender, reason, now)
        self.sessions[session] = None

    def request(self) -> dict[Session, None]:
        """Ask for messages that have room now, or need not wait any more; return the sessions."""
        if self.machine is None:
            return {}
        waiting = self.machine.waiting
        ready = waiting.take_ready()
        asked = dict(self.sessions)
        for session in asked:
            session.request_refused(waiting.room(session.peer), ready)
            if not session.without_room:
                del self.sessions[session]
        return asked


def as_sends(peer: Peer, messages: Iterable[SendQueueItem]) -> list[Send]:
    """Return messages that the link with `peer` did not deliver as the machine sent them."""
    return [
        Send(
            peer=peer,
            message=decode_body(message.body),
            payload=message.payload,
            order=message.order,
            tag=message.tag,
            charge=message.charge,
        )
        for message in messages
    ]


T = TypeVar("T")


class Timers(Generic[T]):
    """A heap of timers: at most one for each item, and it is only ever set earlier. Whoever takes an item
    checks whether anything is due, and sets the next timer.

    A deadline that moves into the future, as with every acknowledgement, costs nothing: the old timer just
    goes off early.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._set: dict[T, float] = {}
        self._numbers: Final = itertools.count()

    def set(self, item: T, due: float) -> None:
        """Make an item due at `due` at the latest; `math.inf`: never."""
        if due < self._set.get(item, math.inf):
            self._set[item] = due
            heapq.heappush(self._heap, (due, next(self._numbers), item))

    def take(self, now: float) -> T | None:
        """Return an item that is due, and drop its timer; None if there is none."""
        while self._heap and self._heap[0][0] <= now:
            due, _, item = heapq.heappop(self._heap)
            if self._set.get(item) == due:
                del self._set[item]
                return item
        return None

    def next(self) -> float:
        """Return when the next item is due."""
        return self._heap[0][0] if self._heap else math.inf


class _Trial(NamedTuple):
    """A connection that is opened only to see whether a process listens."""

    inquiry: Inquire
    left: int = 3
    """Trials that may follow, if it ends otherwise than by a refusal."""
    stranger: bool = False
    """The peer has had no session with this process: only with the one that it was before a restart."""


class WatchedConnections:
    """Connections that ended, for a `ConnectionWatcher`, which wants to know before their sessions are lost.
    Another machine is told nothing.
    """

    def __init__(self, machine: object) -> None:
        self._watcher: Final = machine if isinstance(machine, ConnectionWatcher) else None
        self.gone: list[tuple[Peer, str]] = []
        """Peers whose connections have ended, and why."""
        self.silent: dict[Peer, tuple[float, bool]] = {}
        """For how long peers have been busy, and whether their links are slow."""

    def refused(self, peer: Peer, reason: str, now: float) -> None:
        """Tell that no process listens at a peer's address."""
        if self._watcher is not None:
            self._watcher.connection_gone(peer, reason, now, refused=True)

    def may_be_busy(self, peer: Peer, now: float) -> bool:
        """Ask whether a peer that does not answer may be busy."""
        return self._watcher is not None and self._watcher.may_be_busy(peer, now)

    def busy(self, peer: Peer, seconds: float, *, late: bool = False) -> None:
        """Note that a peer has been busy for so long; or that its link is slow (`late`)."""
        self.silent[peer] = max((seconds, late), self.silent.get(peer, (0.0, False)))

    def changed(self, session: Session) -> None:
        """Note whether the connection of a session that was up, and that the peer opened, has ended."""
        if session.state is SessionState.DISCONNECTED and not session.opened_here:
            self.gone.append((session.peer, session.reason))

    def tell(self, now: float) -> bool:
        """Tell which peers' connections were found to be gone, and who is busy; return whether there are
        any.
        """
        if not self.gone and not self.silent:
            return False
        gone, self.gone = self.gone, []
        busy, self.silent = self.silent, {}
        if self._watcher is None:
            return False
        for peer, reason in gone:
            self._watcher.connection_gone(peer, reason, now, refused=False)
        for peer, (seconds, late) in busy.items():
            self._watcher.peer_busy(peer, seconds, now, late=late)
        return True


M = TypeVar("M", bound=Machine)

_LATE_S: Final = 0.5
"""A process that runs so much later than it wanted to did not run meanwhile. Waiting for a processor takes
less, also on a busy machine."""

_CATCH_UP_S: Final = 0.25
"""For how long such a process only reads what has come meanwhile, before it checks any time-out."""

_WORTH_A_LINE_S: Final = 2.0
"""How long a process must not have run for a line in its log."""


class Stack(Generic[M]):
    """A machine on its endpoint: what drivers drive, on real sockets and in the simulated cluster.

    A driver's turn is: `handle` each event, call what the program wants, `tick`, then `flush` into the van.
    """

    def __init__(self, machine: M, endpoint: Endpoint) -> None:
        self.machine: Final = machine
        self.endpoint: Final = endpoint
        any_machine: object = machine
        self._dispatcher: Final = any_machine if isinstance(any_machine, Dispatcher) else None
        self.missed_s = 0.0
        """For how long this process did not run, which the times here do not count."""
        self._judges_from = -math.inf
        """Until then nothing is due: what has come while this process did not run is to be read first."""

    def running_time(self, now: float, wanted: float) -> float:
        """Return the time for all other methods: it stands still while this process does not run.

        Otherwise a process that was stopped, or whose interpreter lock was held by other code, would find all
        others silent when it goes on, although it has just not read what they sent.

        Args:
            now: by the local clock.
            wanted: when the process wanted to run at the latest, by the same clock.
        """
        missed = now - wanted
        if missed > _LATE_S:
            self.missed_s += missed
            self._judges_from = now - self.missed_s + _CATCH_UP_S
            self.endpoint.resumed(now - self.missed_s, missed)
            if missed > _WORTH_A_LINE_S:
                _log.warning(
                    "this process did not run for %.1f s: it was stopped, or other code kept the interpreter "
                    "lock; time-outs do not count that time",
                    missed,
                )
        return now - self.missed_s

    def handle(self, event: VanEvent, now: float) -> None:
        """Process an event of the van. Nothing that a peer sends raises an exception; an error of the machine
        does.
        """
        if self.endpoint.handle(event, now):
            for instruction in self.machine.take_instructions():
                # Not later: the next event may be a Hello that names a rank just given.
                self._carry_out_one(instruction, now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if now < self._judges_from:
            return
        self.endpoint.tick(now)
        if now >= self.machine.next_tick():
            self.machine.tick(now)

    def next_tick(self) -> float:
        """Return when `tick` has something to do; `math.inf`: never."""
        return max(min(self.machine.next_tick(), self.endpoint.next_tick()), self._judges_from)

    def flush(self, van: Transmitter, now: float) -> None:
        """Carry out all instructions of the machine, acknowledge, and hand messages over to the van."""
        if self.endpoint.lanes is not None:
            self.endpoint.read_lanes(self.endpoint.lanes, now)
        self._carry_out(now)
        self.endpoint.flush(van, now)
        watched = self.endpoint.watched
        while (watched.gone or watched.silent) and watched.tell(now):
            self._carry_out(now)
            self.endpoint.flush(van, now)

    def abort(self, error: Exception, now: float) -> None:
        """Fail everything that is outstanding, and call its callbacks; nothing is sent any more."""
        self.machine.abort(error, now)
        for instruction in self.machine.take_instructions():
            if isinstance(instruction, Call):
                instruction.function()

    def _carry_out(self, now: float) -> None:
        while True:
            instructions = self.machine.take_instructions()
            if not instructions:  # links have everything decided so far
                if self._dispatcher is None or not self._dispatcher.dispatch(self.endpoint.link_state, now):
                    return
                instructions = self.machine.take_instructions()
                if not instructions:
                    return
            for instruction in instructions:
                self._carry_out_one(instruction, now)

    def _carry_out_one(self, instruction: Instruction, now: float) -> None:
        endpoint = self.endpoint
        if isinstance(instruction, Send):
            endpoint.send(instruction, now)
        elif isinstance(instruction, Call):
            instruction.function()
        elif isinstance(instruction, Connect):
            endpoint.connect(instruction, now)
        elif isinstance(instruction, Disconnect):
            endpoint.disconnect(instruction, now)
        elif isinstance(instruction, TakeBack):
            endpoint.take_back(instruction)
        elif isinstance(instruction, Inquire):
            endpoint.inquire(instruction, now)
        elif isinstance(instruction, Become):
            endpoint.process.rank = instruction.rank


_MEMBERSHIP: Final = (
    m.Join,
    m.Joined,
    m.Finished,
    m.PeerFinished,
    m.AllFinished,
    m.Failed,
    m.PeerGone,
    m.Leave,
)

_LONGEST: Final = 300
"""Most characters of a message in the log. A policy of many nodes has megabytes."""


class LoggedEndpoint(Endpoint):
    """PS_VERBOSE: logs connections and membership (level info) and every message (level debug), without
    values.

    It is a class of its own so that logging costs other endpoints nothing.
    """

    def connect(self, instruction: Connect, now: float) -> None:
        """Learn a peer's address."""
        _log.info(
            "%s is at %s",
            self.process.name_of(instruction.peer),
            host_port(instruction.host, instruction.port),
        )
        super().connect(instruction, now)

    def disconnect(self, instruction: Disconnect, now: float) -> None:
        """End the sessions with a peer."""
        _log.info("ending the session with %s", self.process.name_of(instruction.peer))
        super().disconnect(instruction, now)

    def send(self, instruction: Send, now: float) -> None:
        """Send a message to a peer over the session with it."""
        self._log_message("to", instruction.peer, instruction.message, instruction.payload)
        super().send(instruction, now)

    def _deliver(
        self,
        session: Session,
        message: m.Message,
        payload: Buffer | None,
        payload_crc: int | None,
        now: float,
    ) -> None:
        self._log_message("from", session.peer, message, payload)
        super()._deliver(session, message, payload, payload_crc, now)

    def _session_message(
        self, session: Session, message: m.SessionMessage, header: Header, now: float
    ) -> None:
        if isinstance(message, m.Welcome):
            _log.info("connected to %s", self.process.name_of(session.peer))
        super()._session_message(session, message, header, now)

    def _accept(self, connection: Connection, hello: m.Hello, now: float, user: str = "") -> Peer | None:
        peer = super()._accept(connection, hello, now, user)
        if peer is not None:
            _log.info("%s has connected", self.process.name_of(peer))
        return peer

    def _lost(self, session: Session, now: float) -> None:
        _log.info("the link with %s is lost: %s", self.process.name_of(session.peer), session.reason)
        super()._lost(session, now)

    def _log_message(self, direction: str, peer: Peer, message: m.Message, payload: Buffer | None) -> None:
        level = logging.INFO if isinstance(message, _MEMBERSHIP) else logging.DEBUG
        if _log.isEnabledFor(level):
            values = "" if payload is None else f" and {memoryview(payload).nbytes} bytes"
            _log.log(level, "%s %s: %s%s", direction, self.process.name_of(peer), _text(message), values)


def _text(message: m.Message) -> str:
    text = repr(message)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
