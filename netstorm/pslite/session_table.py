"""What an endpoint knows of its sessions: by peer, by connection, by time; and who waits for one. Pure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from netstorm.observe.trace import Trace
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, UNKNOWN, Peer
from netstorm.protocol.messages import Hello
from netstorm.pslite.link_meter import LinkMeter
from netstorm.pslite.rates import TcpProgress
from netstorm.pslite.sending import (
    HostTraffic,
    SendingHalf,
    SendQueueItem,
    TracedSendingHalf,
    Window,
    YieldingWindow,
)
from netstorm.pslite.session import (
    AcceptedSession,
    Limits,
    LinkCounters,
    OpenedSession,
    Session,
    SessionState,
    new_held_bytes,
)
from netstorm.pslite.van import Connection, PayloadMemory

__all__ = [
    "LinkStatistics",
    "LocalProcess",
    "NewSessions",
    "PendingHellos",
    "RecentSet",
    "SessionTable",
]


# Hellos that the machine cannot decide on yet, or for which there are too many.

_RETRY_S: Final = 0.05
"""How often the machine is asked again: it is about to learn who its peers are."""

_MOST_NUMBERS: Final = 100_000
"""Sequence numbers, and characters of jobs' names, in all pending Hellos together: of strangers nobody knows
how much they say."""

_AT_ONCE: Final = 1024
"""Sessions that may begin at once: a whole large job connects when it starts."""

_A_SECOND: Final = 256.0
"""Sessions that may begin in each second after that. Whoever begins one after the other, which without a key
everybody can, takes no more than 2 % of a core with it."""


class NewSessions:
    """How many sessions may begin now (a token bucket). Those that go on are not counted."""

    def __init__(self) -> None:
        self._left = float(_AT_ONCE)
        self._at = -math.inf

    def take(self, now: float) -> bool:
        """Return whether one more may begin; if so, it counts."""
        if self._at > -math.inf:
            self._left = min(float(_AT_ONCE), self._left + max(0.0, now - self._at) * _A_SECOND)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class PendingHellos:
    """A bounded number of connections, each with its Hello.

    Attributes:
        retry_at: when to ask the machine again; infinite if nothing is pending.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity: Final = capacity
        self._pending: dict[Connection, tuple[Hello, str]] = {}
        self.retry_at = math.inf

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, connection: Connection, hello: Hello, now: float, user: str = "") -> None:
        """Keep a Hello, and whose key its sender has. It replaces an older one of the same session, and the
        oldest of all if there is no room.
        """
        for other, (pending, _) in list(self._pending.items()):
            if (pending.incarnation, pending.session) == (hello.incarnation, hello.session):
                del self._pending[other]
        self._pending.pop(connection, None)
        numbers = _size(hello) + sum(_size(pending) for pending, _ in self._pending.values())
        while self._pending and (len(self._pending) >= self._capacity or numbers > _MOST_NUMBERS):
            numbers -= _size(self._pending.pop(next(iter(self._pending)))[0])
        self._pending[connection] = (hello, user)
        self.retry_at = min(self.retry_at, now + _RETRY_S)

    def take_all(self) -> list[tuple[Connection, Hello, str]]:
        """Return all pending Hellos in order, and forget them; what is still undecided is added again."""
        taken = [(connection, *pending) for connection, pending in self._pending.items()]
        self._pending.clear()
        self.retry_at = math.inf
        return taken


def _size(hello: Hello) -> int:
    return len(hello.beyond) + len(hello.job)


_REMEMBERED: Final = 256
"""How many closed connections, and ended sessions, are remembered."""

_BUSY_BYTES: Final = 16 * 1024
"""A link with less than this in flight and queued is not busy: it is the initial window of a TCP
connection."""


class SessionTable:
    """All sessions of a process, the connections that they use, and what they share (`SessionContext`).

    Attributes:
        opened: by peer, the sessions that this process opened.
        accepted: by peer, the sessions that the peer opened.
        by_connection: the session of each connection.
        ending: sessions that are to end once everything is acknowledged, in order; nothing new is sent over
            them.
        dirty: sessions that may have something to send, in order.
        released: connections to close.
        admitted: connections opened by others that sessions use now.
        refused: connections opened by others that are to be cut, and why.
        observer: told of what arrives and is acknowledged; None: nobody measures links.
        acknowledgement_stamp: `sent_at` of the acknowledgement that is being processed, in ns.
        resumed_at: when this process last went on after it had not run for a while.
    """

    def __init__(
        self,
        process: LocalProcess,
        *,
        limits: Limits,
        rng: random.Random,
        tokens: random.Random,
        stamp: Callable[[], int],
        acknowledges: Callable[[Connection], bool],
        progress: Callable[[Connection], TcpProgress | None],
        may_be_busy: Callable[[Peer, float], bool],
        trace: Trace | None,
        traffic: HostTraffic | None,
        memory: PayloadMemory | None,
        is_own: Callable[[str], bool],
    ) -> None:
        """`trace`: records all deliveries; for the others see `SessionContext`."""
        self.limits: Final = limits
        self.held_bytes: Final = new_held_bytes()
        self.incarnation: Final = process.incarnation
        self.random: Final = rng
        self.tokens: Final = tokens
        self.stamp: Final = stamp
        self.observer: LinkMeter | None = None
        self.acknowledgement_stamp = 0
        self.acknowledges: Final = acknowledges
        self.progress: Final = progress
        self.may_be_busy: Final = may_be_busy
        self.memory: Final = memory
        self.is_own: Final = is_own
        self.resumed_at = -math.inf
        self._process: Final = process
        self._trace: Final = trace
        self._traffic: Final = traffic
        self.opened: Final[dict[Peer, OpenedSession]] = {}
        self.accepted: Final[dict[Peer, AcceptedSession]] = {}
        self.by_connection: Final[dict[Connection, Session]] = {}
        self.ending: Final[dict[Session, None]] = {}
        self.dirty: dict[Session, None] = {}
        self.released: Final[list[Connection]] = []
        self.admitted: Final[list[Connection]] = []
        self.refused: Final[list[tuple[Connection, str]]] = []
        self._numbers: Final = itertools.count(1)
        self._retired: Final[RecentSet[Connection]] = RecentSet(_REMEMBERED)
        self._ended: Final[RecentSet[tuple[int, int]]] = RecentSet(_REMEMBERED)
        """(incarnation, session) of accepted sessions that have ended."""

    def __iter__(self) -> Iterator[Session]:
        """Yield the sessions over which messages can be sent."""
        yield from self.opened.values()
        yield from self.accepted.values()

    def of(self, peer: Peer) -> Session | None:
        """Return the session over which messages to a peer are sent."""
        return self.opened.get(peer) or self.accepted.get(peer)

    def with_peer(self, peer: Peer) -> list[Session]:
        """Return the sessions with a peer, whoever opened them."""
        sessions: tuple[Session | None, ...] = (self.opened.get(peer), self.accepted.get(peer))
        return [session for session in sessions if session is not None]

    def connections(self) -> dict[Peer, Connection]:
        """Return the connections that were opened here and are in use, by peer."""
        return {
            peer: session.connection
            for peer, session in self.opened.items()
            if session.state is SessionState.UP and session.connection is not None
        }

    def idle(self) -> bool:
        """Return whether everything sent has been acknowledged and no session is ending."""
        return not self.ending and not any(session.sending.has_work() for session in self)

    # ------------------------------------------------------------------------------------------ connections

    def new_connection(self) -> Connection:
        """Return a connection number that was never used."""
        return Connection(next(self._numbers))

    def release(self, connection: Connection) -> None:
        """Have a connection closed; messages that still arrive over it are ignored."""
        self.by_connection.pop(connection, None)
        self.released.append(connection)
        self._retired.add(connection)

    def was_released(self, connection: Connection) -> bool:
        """Return whether a connection was released recently."""
        return connection in self._retired

    # --------------------------------------------------------------------------------------- what they share

    @property
    def boot(self) -> int:
        """See `SessionContext`."""
        return self._process.boot

    def hello(self, session: Session, boot: int) -> m.Hello:
        """See `SessionContext`."""
        assert session.connection is not None
        self.by_connection[session.connection] = session
        received, beyond = session.receiving.received_numbers()
        return m.Hello(
            job=self._process.job,
            sender=self._process.rank,
            incarnation=self.incarnation,
            receiver=int(session.peer),
            session=session.identity,
            received=received,
            beyond=beyond,
            resuming=session.incarnation is not None,
            boot=boot,
            memory=None if self.memory is None or not boot else self.memory.lend(session.connection),
        )

    def new_sending(self, peer: Peer, host: str) -> SendingHalf:
        """See `SessionContext`."""
        fixed, shallow = self.limits.window_bytes, self.limits.shallow_windows
        window = (
            YieldingWindow(self._traffic.towards(host), fixed, shallow=shallow)
            if self._traffic is not None and host
            else Window(fixed, shallow=shallow)
        )

        def acknowledged(message: SendQueueItem, now: float) -> None:
            if self.observer is not None:
                self.observer.acknowledged(
                    peer,
                    message.size,
                    message.sent_at,
                    now,
                    self.acknowledgement_stamp,
                    resent=message.transmissions > 1 or message.sent_at <= self.resumed_at,
                )

        if self._trace is None:
            return SendingHalf(window, acknowledged)
        return TracedSendingHalf(window, peer, self._trace, acknowledged)

    def contended(self, peer: Peer) -> bool:
        """See `SessionContext`."""
        if self.observer is None or not self.observer.may_contend:
            return False
        return any(
            other.sending.window.in_flight + other.sending.queued_bytes > _BUSY_BYTES
            for to, other in self.opened.items()
            if to not in (peer, SCHEDULER)
        )

    def queued_bytes(self) -> int:
        """Return how many bytes for other nodes wait, or are not acknowledged yet."""
        return sum(
            session.sending.window.in_flight + session.sending.queued_bytes
            for to, session in self.opened.items()
            if to >= 0
        )

    # ---------------------------------------------------------------------------------------------- endings

    def begin_ending(self, session: Session) -> None:
        """Note a session that is to end."""
        self.ending[session] = None
        self.dirty[session] = None

    def remove(self, session: Session) -> bool:
        """Take a session that is over out of the table; False if its peer has another one, or none."""
        session.receiving.drop_held()
        if session.opened_here:
            if self.opened.get(session.peer) is not session:
                return False
            del self.opened[session.peer]
        else:
            if self.accepted.get(session.peer) is not session:
                return False
            del self.accepted[session.peer]
        return True

    def find_ending(self, hello: Hello) -> AcceptedSession | None:
        """Return the ending session that a Hello wants to go on with."""
        for session in self.ending:
            if isinstance(session, AcceptedSession) and session.is_that_of(hello):
                return session
        return None

    def note_end(self, session: Session) -> None:
        """Record whether a session is ending or has ended."""
        if session.state in (SessionState.CLOSED, SessionState.LOST):
            self.ending.pop(session, None)
            session.receiving.drop_held()
        if isinstance(session, AcceptedSession) and session.state in (
            SessionState.CLOSING,
            SessionState.CLOSED,
        ):
            self._ended.add((session.incarnation, session.identity))

    def has_ended(self, hello: Hello) -> bool:
        """Return whether the session of a Hello has ended: its peer has missed the Goodbye."""
        return (hello.incarnation, hello.session) in self._ended


T = TypeVar("T")


class RecentSet(Generic[T]):
    """At most `size` members; adding one more forgets the one that was added first."""

    def __init__(self, size: int) -> None:
        self._size: Final = size
        self._members: dict[T, None] = {}

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def add(self, member: T) -> None:
        """Add a member as the newest."""
        self._members.pop(member, None)
        self._members[member] = None
        if len(self._members) > self._size:
            del self._members[next(iter(self._members))]


@dataclass(slots=True, kw_only=True)
class LocalProcess:
    """What a process tells its peers about itself, and how it names them in messages for people."""

    job: str
    """Name of the job."""
    incarnation: int
    """Random number of this process."""
    rank: int = -1
    """-1: the scheduler, or a node that has no rank yet."""
    boot: int = 0
    """Number of the boot of its machine: processes of one boot are on one machine, and payloads between them
    need no checksums. 0: payloads are always checked."""

    def name_of(self, peer: Peer) -> str:
        """Return how messages for people call a peer. The scheduler numbers its peers as they arrive."""
        if peer == SCHEDULER:
            return "the scheduler"
        if peer <= UNKNOWN:
            return f"peer {UNKNOWN - peer}" if self.rank < 0 else "a scheduler that takes over"
        return f"process {peer}" if self.rank < 0 else f"rank {peer}"


class LinkStatistics:
    """What went over each link, present or past, by peer and by which side opened the connection.

    Successive sessions of a link share their counters.
    """

    def __init__(self, most: int) -> None:
        """Keep the counters of at most so many links; the oldest are dropped first."""
        self._most: Final = most
        self._counters: Final[dict[tuple[Peer, bool], LinkCounters]] = {}

    def counters(self, peer: Peer, *, opened_here: bool) -> LinkCounters:
        """Return a link's counters."""
        if len(self._counters) > self._most:
            del self._counters[next(iter(self._counters))]
        return self._counters.setdefault((peer, opened_here), LinkCounters())

    def snapshot(self) -> dict[tuple[Peer, bool], dict[str, int]]:
        """Return all numbers by name, by peer and whether the link was opened here."""
        return {link: counters.snapshot() for link, counters in self._counters.items()}
