"""All sessions of one process: who may have one, which message belongs to which. Pure.

Data from i to j goes over a connection that i opened, and its acknowledgements come back over the same one,
so they never wait behind j's own data. A peer whose address is not known here (a node, for the scheduler) is
answered over the connection that it opened.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Final

from netstorm.errors import FrameError, PeerError, ProtocolViolation
from netstorm.observe.counters import Counters
from netstorm.observe.drops import Drops
from netstorm.observe.trace import Trace
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer, Header, checksum, decode_body, encode_body, open_frames, seal
from netstorm.protocol.ids import SCHEDULER, Peer
from netstorm.pslite.endpoint.pending_hellos import PendingHellos
from netstorm.pslite.endpoint.recent_set import RecentSet
from netstorm.pslite.endpoint.timers import Timers
from netstorm.pslite.endpoint.traffic_observer import TrafficObserver
from netstorm.pslite.machine import (
    Admit,
    Connect,
    Disconnect,
    Machine,
    NotYet,
    Refuse,
    Rerouter,
    Send,
    TakeBack,
)
from netstorm.pslite.session.accepted import AcceptedSession
from netstorm.pslite.session.limits import Limits
from netstorm.pslite.session.link_counters import LinkCounters
from netstorm.pslite.session.link_state import LinkState
from netstorm.pslite.session.opened import OpenedSession
from netstorm.pslite.session.queue import Outgoing
from netstorm.pslite.session.sending import SendingHalf
from netstorm.pslite.session.session import Session, Wire
from netstorm.pslite.session.states import State
from netstorm.pslite.session.traced_sending import TracedSendingHalf
from netstorm.pslite.session.window import Window
from netstorm.pslite.van.interface import Broken, Connection, Received, VanEvent

__all__ = ["Endpoint"]

_log = logging.getLogger(__name__)

_REMEMBERED: Final = 256
"""How many connections that were given up, and sessions that ended, are remembered."""

_BUSY_BYTES: Final = 16 * 1024
"""With less under way a link is not busy: the window of a TCP that has just begun."""

_ENDED: Final = (State.OVER, State.LOST)


class Endpoint:
    """The sessions of one process.

    Attributes:
        rank: this process's rank, as every Hello says it; -1 while it has none.
        observer: told of what comes and goes, for passive measurement.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        job: str,
        incarnation: int,
        ordered: Callable[[Peer], bool],
        stamp: Callable[[], int],
        rank: int = -1,
        limits: Limits | None = None,
        rng: random.Random | None = None,
        counters: Counters | None = None,
        trace: Trace | None = None,
    ) -> None:
        """Begin without any session.

        Args:
            machine: asked who may open a session; takes what arrives.
            job: name of the job, for every Hello.
            incarnation: random number of this process.
            ordered: whether sessions with a peer deliver in the order of transmission: control messages
                need that, chunks don't.
            stamp: the cluster clock, in ns.
            rng: numbers sessions and spreads attempts to connect.
            trace: takes note of all that is delivered.
        """
        self.job: Final = job
        self.incarnation: Final = incarnation
        self.rank = rank
        self.limits: Final = limits or Limits()
        self.random: Final = rng or random.Random(incarnation)
        self.stamp: Final = stamp
        self.counters: Final = counters or Counters()
        self.observer: TrafficObserver | None = None
        self._stamped_at = 0
        """`sent_at` of the acknowledgement that is being read."""
        self._machine: Final = machine
        any_machine: object = machine
        self._rerouter: Final = any_machine if isinstance(any_machine, Rerouter) else None
        self._trace: Final = trace
        self._ordered: Final = ordered
        self._drops: Final = Drops(self.counters)
        self._numbers: Final = itertools.count(1)
        self._opened: dict[Peer, OpenedSession] = {}
        self._accepted: dict[Peer, AcceptedSession] = {}
        self._by_connection: dict[Connection, Session] = {}
        self._ending: dict[Session, None] = {}
        """Sessions whose end is wanted, in order; no message is sent over them any more."""
        self._parted: Final[RecentSet[tuple[int, int]]] = RecentSet(_REMEMBERED)
        """(incarnation, session) of accepted sessions that ended of late: whoever missed the Goodbye hears it
        again."""
        self._retired: Final[RecentSet[Connection]] = RecentSet(_REMEMBERED)
        """Connections given up of late: what still comes over them is nobody's fault."""
        self._dirty: dict[Session, None] = {}
        """Sessions that may have something to hand over, in order."""
        self._timers: Final[Timers[Session]] = Timers()
        self._waiting: Final = PendingHellos(self.limits.waiting_hellos)
        self._counters: dict[tuple[Peer, bool], LinkCounters] = {}
        self._answers: list[tuple[Connection, m.SessionMessage]] = []
        """To connections without a session."""
        self._released: list[Connection] = []

    # --------------------------------------------------------------------------------- what the machine wants

    def connect(self, instruction: Connect, now: float) -> None:
        """Learn a peer's address."""
        session = self._opened.get(instruction.peer)
        if session is not None:
            session.host, session.port = instruction.host, instruction.port
            return
        self._opened[instruction.peer] = OpenedSession(
            self,
            instruction.peer,
            self.random.getrandbits(63),
            counters=self._counters_of(instruction.peer, opened_here=True),
            ordered=self._ordered(instruction.peer),
            host=instruction.host,
            port=instruction.port,
        )

    def send(self, instruction: Send, now: float) -> None:
        """Send a message to a peer over the session with it."""
        peer = instruction.peer
        session: Session | None = self._opened.get(peer) or self._accepted.get(peer)
        if instruction.back:
            session = self._accepted.get(peer) or session
        if session is None:
            self.counters.add("sends_without_session")
            _log.debug("nothing sent to %s: no session", self.name_of(peer))
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
        self._dirty[session] = None

    def take_back(self, instruction: TakeBack) -> None:
        """Take messages out of the links' queues again."""
        taken = []
        for session in self._sessions():
            found = session.sending.take_back(instruction.wanted)
            if found and instruction.then is not None:
                taken += [_as_send(session.peer, one) for one in found]
        if taken and instruction.then is not None:
            instruction.then(taken)

    def disconnect(self, instruction: Disconnect, now: float) -> None:
        """End the sessions with a peer."""
        sessions: tuple[Session | None, ...] = (
            self._opened.pop(instruction.peer, None),
            self._accepted.pop(instruction.peer, None),
        )
        for session in sessions:
            if session is not None:
                session.end(now, at_once=instruction.at_once)
                self._ending[session] = None
                self._dirty[session] = None

    # -------------------------------------------------------------------------------------- what the van says

    def handle(self, event: VanEvent, now: float) -> None:
        """Take an event of the van. Nothing that a peer sends raises."""
        if isinstance(event, Broken):
            session = self._by_connection.get(event.connection)
            if session is not None and session.connection == event.connection:
                session.broken(event.reason, now)
                self._dirty[session] = None
            return
        try:
            self._received(event, now)
        except PeerError as error:
            reason = "frame" if isinstance(error, FrameError) else "protocol"
            self._drop(reason, event.connection, str(error), now)

    def _received(self, event: Received, now: float) -> None:
        frames = event.frames
        header = open_frames(frames[0], len(frames))
        message = header.message
        session = self._by_connection.get(event.connection)
        if session is None:
            if isinstance(message, m.Hello) and event.connection < 0:
                self._hello(event.connection, message, now)
            elif event.connection not in self._retired:
                raise ProtocolViolation(f"{type(message).__name__} on a connection without a session")
            return
        counters = session.counters
        counters.heard_at = now
        counters.heard = message
        counters.messages_received += 1
        counters.bytes_received += sum(map(len, frames))
        if isinstance(message, m.SessionMessage):
            self._dirty[session] = None
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
        self._dirty[session] = None
        receiving = session.receiving
        if receiving.has(sequence):
            session.counters.duplicates += 1
            return
        payload: Buffer | None = None
        if header.has_payload:
            payload = frames[1]
            if not isinstance(message, m.DataMessage):
                raise ProtocolViolation(f"{type(message).__name__} with a payload")
            if checksum(payload) != header.payload_crc:
                session.corrupt(sequence)
                self._drop("checksum", session.connection, "the payload fails its checksum", now)
                return
        if self.observer is not None and isinstance(message, m.DataMessage):
            size = sum(map(len, frames))
            self.observer.arrived(
                session.peer,
                size,
                header.sent_at,
                self.stamp(),
                resent=header.resent,
                contended=header.contended,
            )
        for arrival in receiving.take(sequence, (message, payload, header.payload_crc)):
            self._deliver(session, *arrival, now)

    def _deliver(
        self, session: Session, message: m.Message, payload: Buffer | None, payload_crc: int, now: float
    ) -> None:
        try:
            self._machine.receive(session.peer, message, payload, payload_crc, now)
        except PeerError as error:
            session.counters.drop("refused")
            self._drops.note("refused", self.name_of(session.peer), str(error), now)

    # ----------------------------------------------------------------------------------- messages of sessions

    def _session_message(
        self, session: Session, message: m.SessionMessage, header: Header, now: float
    ) -> None:
        if header.sequence or header.has_payload:
            raise ProtocolViolation(f"a numbered {type(message).__name__}")
        self._stamped_at = header.sent_at
        if self.observer is not None and session.state is State.UP:
            self.observer.control_arrived(session.peer, header.sent_at, self.stamp())
        if isinstance(message, (m.Welcome, m.Refused)) and isinstance(session, OpenedSession):
            if isinstance(message, m.Welcome):
                session.welcome(message, now)
            else:
                session.refused(message, now)
        elif session.state in (State.UP, State.PARTING) or isinstance(message, m.Goodbye):
            session.take_session_message(message, now)
        else:
            session.counters.drop("not_up")
        self._check_end(session, now)

    def _hello(self, connection: Connection, hello: m.Hello, now: float) -> None:
        if (hello.incarnation, hello.session) in self._parted:
            self._answers.append((connection, m.Goodbye()))
            return
        decision = self._machine.admit(hello)
        if isinstance(decision, NotYet):
            self._waiting.sit(connection, hello, now)
            return
        if isinstance(decision, Admit):
            decision = self._admit(connection, hello, decision.peer, now) or decision
        if isinstance(decision, Refuse):
            self.counters.add("refused_hellos")
            _log.info("refused a session to rank %d of job %r: %s", hello.sender, hello.job, decision.reason)
            self._answers.append((connection, m.Refused(reason=decision.reason)))

    def _admit(self, connection: Connection, hello: m.Hello, peer: Peer, now: float) -> Refuse | None:
        """Give a process that the machine admits its session, or say why not."""
        if hello.receiver != self.rank:
            return Refuse(f"this is rank {self.rank}, not rank {hello.receiver} (-1: the scheduler)")
        session = self._accepted.get(peer)
        ending = self._find_ending(hello)
        if ending is not None:
            session = ending
        elif session is not None and not session.is_that_of(hello):
            if session.incarnation != hello.incarnation:
                self._replace(session, f"{self.name_of(peer)} came back as another process", now)
                self._machine.peer_lost(peer, session.reason, now)
            else:
                self._replace(session, f"{self.name_of(peer)} has begun a new session", now)
            session = None
        if session is None:
            if hello.resuming:
                return Refuse("that session is not known here (any more)")
            if len(self._accepted) >= self.limits.sessions:
                return Refuse(f"this process has {len(self._accepted)} sessions already")
            counters = self._counters_of(peer, opened_here=False)
            session = AcceptedSession(self, peer, hello, counters=counters, ordered=self._ordered(peer))
        try:
            session.hello(hello, connection, now)
        except ProtocolViolation as error:
            self._drop("protocol", connection, str(error), now)
            return Refuse(str(error))
        session.counters.heard_at = now
        session.counters.heard = hello
        if session is not ending:
            self._accepted[peer] = session
        self._by_connection[connection] = session
        self._dirty[session] = None
        return None

    def _replace(self, session: AcceptedSession, reason: str, now: float) -> None:
        if session.sending.has_work():
            _log.warning("%s, and what was under way to it is gone", reason)
        del self._accepted[session.peer]
        session.end(now, at_once=True)
        session.reason = reason
        self._ending[session] = None
        self._dirty[session] = None

    def _find_ending(self, hello: m.Hello) -> AcceptedSession | None:
        for session in self._ending:
            if isinstance(session, AcceptedSession) and session.is_that_of(hello):
                return session
        return None

    # --------------------------------------------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """Do what is due."""
        if now >= self._waiting.ask_again_at:
            for connection, hello in self._waiting.call():
                self._hello(connection, hello, now)
        while (session := self._timers.take(now)) is not None:
            if session.due() <= now:
                session.tick(now)
                self._check_end(session, now)
            self._dirty[session] = None

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return min(self._waiting.ask_again_at, self._timers.next())

    def flush(self, wire: Wire, now: float) -> None:
        """Acknowledge what has been taken, and hand over what may be handed over, to the van."""
        for connection, message in self._answers:
            wire.transmit(connection, self._seal(message), None)
        self._answers.clear()
        while self._dirty or self._released:
            while self._released:
                wire.close(self._released.pop())
            dirty, self._dirty = self._dirty, {}
            for session in dirty:
                session.flush(wire, now)
                self._timers.set(session, session.due())
                if session.state in _ENDED:
                    self._ending.pop(session, None)
                if isinstance(session, AcceptedSession) and session.state in (State.PARTING, State.OVER):
                    self._parted.add((session.incarnation, session.identity))

    # --------------------------------------------------------------------------------------------- for others

    def idle(self) -> bool:
        """Return whether everything sent has been acknowledged and every ended session has parted."""
        return not self._ending and not any(session.sending.has_work() for session in self._sessions())

    def last_heard(self, peer: Peer) -> tuple[float, str] | None:
        """Return when something last came from a peer, and what; None if nothing ever did."""
        heard = [
            (counters.heard_at, type(counters.heard).__name__)
            for counters in (self._counters.get((peer, True)), self._counters.get((peer, False)))
            if counters is not None and counters.heard is not None
        ]
        return max(heard, default=None)

    def window_of(self, peer: Peer) -> int:
        """Return how many bytes may be un-acknowledged on the link to a peer; 0 if there is no session."""
        session = self._opened.get(peer) or self._accepted.get(peer)
        return 0 if session is None else session.sending.window.size

    def link_state(self, peer: Peer) -> LinkState:
        """Return how the link to a peer is now."""
        session = self._opened.get(peer) or self._accepted.get(peer)
        return LinkState() if session is None else session.sending.state()

    def links(self) -> dict[tuple[Peer, bool], dict[str, int]]:
        """Return what went over each link, present or past, by peer and whether it was opened here."""
        return {link: counters.snapshot() for link, counters in self._counters.items()}

    # -------------------------------------------------------------------------------- for sessions (`Shared`)

    def new_connection(self) -> Connection:
        """Return a connection number that was never used."""
        return Connection(next(self._numbers))

    def hello(self, session: Session) -> m.Hello:
        """Return how this process introduces itself."""
        assert session.connection is not None
        self._by_connection[session.connection] = session
        received, beyond = session.receiving.missing_from()
        return m.Hello(
            job=self.job,
            sender=self.rank,
            incarnation=self.incarnation,
            receiver=int(session.peer),
            session=session.identity,
            received=received,
            beyond=beyond,
            resuming=session.incarnation is not None,
        )

    def new_sending(self, peer: Peer) -> SendingHalf:
        """Return the sending half of a new session."""
        window = Window(self.limits.window_bytes)

        def noted(message: Outgoing, now: float) -> None:
            if self.observer is not None and message.payload is not None:
                self.observer.acknowledged(
                    peer,
                    message.size,
                    message.sent_at,
                    now,
                    self._stamped_at,
                    resent=message.transmissions > 1,
                )

        if self._trace is None:
            return SendingHalf(window, noted)
        return TracedSendingHalf(window, peer, self._trace, noted)

    def contended(self, peer: Peer) -> bool:
        """Return whether other links are busy that may slow the one to `peer`."""
        if self.observer is None or not self.observer.may_contend:
            return False
        return any(
            other.sending.window.in_flight + other.sending.queue.bytes > _BUSY_BYTES
            for to, other in self._opened.items()
            if to not in (peer, SCHEDULER)
        )

    def release(self, connection: Connection) -> None:
        """Close a connection; what comes over it from now on is ignored."""
        self._by_connection.pop(connection, None)
        self._released.append(connection)
        self._retired.add(connection)

    def connections(self) -> dict[Peer, Connection]:
        """Return the connections that were opened here and are in use, by peer."""
        return {
            peer: session.connection
            for peer, session in self._opened.items()
            if session.state is State.UP and session.connection is not None
        }

    def name_of(self, peer: Peer) -> str:
        """Return a peer as messages for a person name it. The scheduler numbers its peers as they come."""
        if peer == SCHEDULER:
            return "the scheduler"
        return f"process {peer}" if self.rank < 0 else f"rank {peer}"

    # ------------------------------------------------------------------------------------------------- inside

    def _sessions(self) -> Iterator[Session]:
        yield from self._opened.values()
        yield from self._accepted.values()

    def _counters_of(self, peer: Peer, *, opened_here: bool) -> LinkCounters:
        """Return a link's counters: its sessions, one after the other, share them."""
        if len(self._counters) > 2 * self.limits.sessions:
            del self._counters[next(iter(self._counters))]
        return self._counters.setdefault((peer, opened_here), LinkCounters())

    def _seal(self, message: m.Message) -> bytes:
        return seal(encode_body(message), sequence=0, sent_at=self.stamp(), payload_crc=None)

    def _check_end(self, session: Session, now: float) -> None:
        """Take a session off the books that has ended."""
        if session.state is State.PARTING or session.state in _ENDED:
            books: dict[Peer, Session] = self._opened if session.opened_here else self._accepted  # type: ignore[assignment]
            mine = books.get(session.peer) is session
            if mine:
                del books[session.peer]
                if session.state is State.PARTING:
                    self._ending[session] = None
            if session.state is State.LOST and mine and not session.ending:
                self._lost(session, now)

    def _lost(self, session: Session, now: float) -> None:
        """Tell the machine that a session is lost, and give back what it was to deliver."""
        if self._rerouter is None or not session.opened_here:
            self._machine.peer_lost(session.peer, session.reason, now)
            return
        undelivered = [_as_send(session.peer, one) for one in session.undelivered]
        session.undelivered = []
        self._rerouter.link_lost(session.peer, session.reason, undelivered, now)

    def _drop(self, reason: str, connection: Connection | None, detail: str, now: float) -> None:
        session = None if connection is None else self._by_connection.get(connection)
        if session is None:
            sender = f"connection {connection}"
        else:
            session.counters.drop(reason)
            sender = self.name_of(session.peer)
        self._drops.note(reason, sender, detail, now)


def _as_send(peer: Peer, message: Outgoing) -> Send:
    """Return a message as the machine once sent it."""
    return Send(
        peer=peer,
        message=decode_body(message.body),
        payload=message.payload,
        order=message.order,
        tag=message.tag,
    )
