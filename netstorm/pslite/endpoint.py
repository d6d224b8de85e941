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
from typing import Final, Generic, TypeVar

from netstorm.addresses import host_port
from netstorm.errors import FrameError, NoRoom, NotAuthorised, OtherProtocol, PeerError, ProtocolViolation
from netstorm.observe.log import Counters, Drops
from netstorm.observe.trace import Trace
from netstorm.protocol import messages as m
from netstorm.protocol.frames import (
    SCHEDULER,
    Buffer,
    Header,
    Peer,
    checksum,
    decode_body,
    encode_body,
    open_frames,
    seal,
    tag_in,
)
from netstorm.pslite.acceptor import (
    Acceptor,
    EndpointContext,
    LinkStatistics,
    LocalProcess,
    SessionTable,
    TrafficObserver,
)
from netstorm.pslite.machine import (
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
    Rerouter,
    Send,
    TakeBack,
)
from netstorm.pslite.sending import SendQueueItem
from netstorm.pslite.session import Limits, OpenedSession, Session, SessionState
from netstorm.pslite.van import Broken, Connection, Received, Transmitter, VanEvent

__all__ = ["Endpoint", "LoggedEndpoint", "Stack", "Timers", "WatchedConnections", "check_size"]


_log = logging.getLogger(__name__)

_ENDED: Final = (SessionState.CLOSED, SessionState.LOST)


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
                SendQueueItem(
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
            was_up = session.state is SessionState.UP
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
        elif session.state is not SessionState.UP:
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
        if self._context.observer is not None and session.state is SessionState.UP:
            self._context.observer.control_arrived(session.peer, header.sent_at, self._stamp())
        if isinstance(message, (m.Welcome, m.Refused)) and isinstance(session, OpenedSession):
            if isinstance(message, m.Welcome):
                session.welcome(message, now)
            else:
                session.refused(message, now)
        elif session.state in (SessionState.UP, SessionState.CLOSING) or isinstance(message, m.Goodbye):
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
                was_up = session.state is SessionState.UP
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
        if session.state is SessionState.CLOSING or session.state in _ENDED:
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


# How large a message may be before it is decoded, by its class and by who has sent it. Pure.
#
# Decoding takes 0.4 s and 40 MB for a megabyte of the worst values, so nobody gets more than he needs.
# Payloads have their own bound (`MAXMSGSIZE`), and are not decoded.

SMALL: Final = 2**18
"""Bytes that every message may have: measurements of the links of a thousand nodes."""

_MEDIUM: Final = 2**20
"""Of those that name all keys, or all that has been received, or describe a call of thousands of ranks."""

_LARGE: Final = 4 * 2**20
"""Of those to the scheduler that describe all keys, or what a node has of them."""

_BOUNDS: Final = {
    kind.__struct_config__.tag: bound
    for bound, kinds in (
        (
            _MEDIUM,
            (
                m.Ack,
                m.CallTimedOut,
                m.Failed,
                m.Heartbeat,
                m.Hello,
                m.StateOffered,
                m.StateReceived,
                m.Welcome,
            ),
        ),
        (
            _LARGE,
            (m.CallsWaiting, m.Finished, m.RegisterKeys, m.Resume, m.TopologyRequest, m.ViewReport),
        ),
    )
    for kind in kinds
}
"""By tag; of all others it is `SMALL`."""


def check_size(frame: Buffer, sender: Peer | None, own_rank: int) -> None:
    """Check the size of a message, without its payload, that is larger than `SMALL`.

    Args:
        frame: frame 0.
        sender: whose session it has come over; None: there is no session.
        own_rank: of this process; -1: the scheduler, or a node that has no rank yet.

    Raises:
        FrameError: no correct process of that kind sends as much.
    """
    if sender == SCHEDULER:
        return  # `open_frames` has a bound for all
    size, tag = len(frame), tag_in(frame)
    bound = _BOUNDS.get(tag, SMALL)
    if sender is None:
        bound = _MEDIUM if tag == m.Hello.__struct_config__.tag else SMALL
    elif own_rank >= 0:
        bound = min(bound, _MEDIUM)
    if size > bound:
        place = "a connection without a session" if sender is None else "a session with a node"
        raise FrameError(
            f"{size} bytes before the payload, on {place}: more than the {bound} that a message with tag "
            f"{tag} has there"
        )


# Messages that a link did not deliver, as the machine that sent them knows them. Pure.


def as_sends(peer: Peer, messages: Iterable[SendQueueItem]) -> list[Send]:
    """Return messages for `peer` as the machine sent them."""
    return [
        Send(
            peer=peer,
            message=decode_body(message.body),
            payload=message.payload,
            order=message.order,
            tag=message.tag,
        )
        for message in messages
    ]


# A heap of timers, each of which is only ever set earlier. Pure.

T = TypeVar("T")


class Timers(Generic[T]):
    """At most one timer for each item. Whoever takes an item checks whether anything is due, and sets the
    next timer.

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


# Connections that ended, for a machine that wants to know before their sessions are lost. Pure.


class WatchedConnections:
    """What a `ConnectionWatcher` is told; nothing, if the machine is none."""

    def __init__(self, machine: object) -> None:
        self._watcher: Final = machine if isinstance(machine, ConnectionWatcher) else None
        self._gone: list[tuple[Peer, str]] = []
        self._busy: dict[Peer, float] = {}

    def refused(self, peer: Peer, reason: str, now: float) -> None:
        """Tell that no process listens at a peer's address."""
        if self._watcher is not None:
            self._watcher.connection_gone(peer, reason, now, refused=True)

    def may_be_busy(self, peer: Peer, now: float) -> bool:
        """Ask whether a peer that does not answer may be busy."""
        return self._watcher is not None and self._watcher.may_be_busy(peer, now)

    def busy(self, peer: Peer, seconds: float) -> None:
        """Note that a peer has been busy for so long."""
        self._busy[peer] = max(seconds, self._busy.get(peer, 0.0))

    def changed(self, session: Session, *, was_up: bool) -> None:
        """Note whether the connection of a session that the peer opened has ended."""
        if was_up and session.state is SessionState.DISCONNECTED and not session.opened_here:
            self._gone.append((session.peer, session.reason))

    def tell(self, now: float) -> bool:
        """Tell which peers' connections were found to be gone, and who is busy; return whether there are
        any.
        """
        if not self._gone and not self._busy:
            return False
        gone, self._gone = self._gone, []
        busy, self._busy = self._busy, {}
        if self._watcher is None:
            return False
        for peer, reason in gone:
            self._watcher.connection_gone(peer, reason, now, refused=False)
        for peer, seconds in busy.items():
            self._watcher.peer_busy(peer, seconds, now)
        return True


class Inquiries:
    """Inquiries about peers: the kernel at the other end of a connection is asked, or a new one is tried."""

    def __init__(self, sessions: SessionTable, context: EndpointContext, watched: WatchedConnections) -> None:
        """Begin without any; `watched` tells the machine what is found."""
        self._sessions: Final = sessions
        self._context: Final = context
        self._watched: Final = watched
        self._new: Final[dict[Peer, Inquire]] = {}
        """Those that need a connection."""
        self._trials: Final[dict[Connection, Peer]] = {}
        """Connections that were opened only to see whether a process listens."""

    def begin(self, inquiry: Inquire, now: float) -> None:
        """Find out about a peer."""
        session = self._sessions.accepted.get(inquiry.peer)
        if session is not None and session.state is SessionState.UP and session.connection is not None:
            if self._context.acknowledges(session.connection):
                self._watched.busy(inquiry.peer, now - session.counters.heard_at)
        elif inquiry.peer not in self._trials.values():
            self._new[inquiry.peer] = inquiry

    def broken(self, event: Broken, now: float) -> None:
        """Handle the end of a connection, which may be a trial."""
        peer = self._trials.pop(event.connection, None)
        if peer is not None and event.refused:
            self._watched.refused(peer, event.reason, now)

    def flush(self, van: Transmitter) -> None:
        """Open the connections that are needed, and close those to peers that have come back."""
        if not self._new and not self._trials:
            return
        for connection, peer in list(self._trials.items()):
            if not self._is_away(peer):
                del self._trials[connection]
                van.close(connection)
        for peer, inquiry in self._new.items():
            if self._is_away(peer):
                connection = self._context.new_connection()
                self._trials[connection] = peer
                van.open(connection, inquiry.host, inquiry.port)
        self._new.clear()

    def _is_away(self, peer: Peer) -> bool:
        session = self._sessions.accepted.get(peer)
        return session is not None and session.state is not SessionState.UP


# A machine on its endpoint: what drivers drive, on real sockets and in the simulated cluster. Pure.
#
# A driver's turn is: `handle` each event, `call` what the program wants, `tick`, then `flush` into the van.

M = TypeVar("M", bound=Machine)

_LATE_S: Final = 0.5
"""A process that runs so much later than it wanted to did not run meanwhile. Waiting for a processor takes
less, also on a busy machine."""

_CATCH_UP_S: Final = 0.25
"""For how long such a process only reads what has come meanwhile, before it checks any time-out."""

_WORTH_A_LINE_S: Final = 2.0
"""How long a process must not have run for a line in its log."""


class Stack(Generic[M]):
    """Carries out the instructions of a machine."""

    def __init__(self, machine: M, endpoint: Endpoint) -> None:
        self.machine: Final = machine
        self.endpoint: Final = endpoint
        any_machine: object = machine
        self._dispatcher: Final = any_machine if isinstance(any_machine, Dispatcher) else None
        self._missed_s = 0.0
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
            self._missed_s += missed
            self._judges_from = now - self._missed_s + _CATCH_UP_S
            self.endpoint.resumed(now - self._missed_s, missed)
            if missed > _WORTH_A_LINE_S:
                _log.warning(
                    "this process did not run for %.1f s: it was stopped, or other code kept the interpreter "
                    "lock; time-outs do not count that time",
                    missed,
                )
        return now - self._missed_s

    def local_time(self, running: float) -> float:
        """Return the time by the local clock, of a time to come."""
        return running + self._missed_s

    def handle(self, event: VanEvent, now: float) -> None:
        """Process an event of the van. Nothing that a peer sends raises an exception; an error of the machine
        does.
        """
        self.endpoint.handle(event, now)
        for instruction in self.machine.take_instructions():
            self._carry_out_one(
                instruction, now
            )  # the next event may be a Hello that names a rank just given

    def call(self, function: Callable[[float], T], now: float) -> T:
        """Call something that uses the machine, with the time."""
        return function(now)

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
        self._carry_out(now)
        self.endpoint.flush(van, now)
        while self.endpoint.tell_disconnections(now):
            self._carry_out(now)
            self.endpoint.flush(van, now)

    def abort(self, error: Exception, now: float) -> None:
        """Fail everything that is outstanding, and call its callbacks; nothing is sent any more."""
        self.machine.abort(error, now)
        for instruction in self.machine.take_instructions():
            if isinstance(instruction, Call):
                instruction.function()

    def _carry_out(self, now: float) -> None:
        while instructions := self._instructions(now):
            for instruction in instructions:
                self._carry_out_one(instruction, now)

    def _instructions(self, now: float) -> list[Instruction]:
        instructions = self.machine.take_instructions()
        if instructions or self._dispatcher is None:
            return instructions
        if self._dispatcher.dispatch(self.endpoint.link_state, now):  # links have everything decided so far
            return self.machine.take_instructions()
        return []

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


# An endpoint that logs its connections and messages (PS_VERBOSE). Pure apart from the log.

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
    """Logs connections and membership (level info) and every message (level debug), without its values.

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
