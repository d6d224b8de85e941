"""Which processes get a session here: what follows from a Hello. Pure.

The machine decides whom to admit. An admitted process goes on with the session that it had, or gets a new
one; a new process or session of the same peer replaces the old one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from netstorm import __version__
from netstorm.errors import OtherProtocol, ProtocolViolation
from netstorm.observe.log import Counters, Drops
from netstorm.protocol import messages as m
from netstorm.protocol.frames import PROTOCOL_VERSION, SPEAKS_VERSION, UNKNOWN, Peer, tag_in
from netstorm.pslite.endpoint.endpoint_context import EndpointContext
from netstorm.pslite.endpoint.link_statistics import LinkStatistics
from netstorm.pslite.endpoint.local_process import LocalProcess
from netstorm.pslite.endpoint.pending_hellos import NewSessions, PendingHellos
from netstorm.pslite.endpoint.session_table import SessionTable
from netstorm.pslite.machine import Admit, Machine, NotYet, Refuse
from netstorm.pslite.session.accepted import AcceptedSession
from netstorm.pslite.van.interface import Connection, Received

__all__ = ["Acceptor"]

_log = logging.getLogger(__name__)

_HELLO: Final = m.Hello.__struct_config__.tag

_MOST_CHARACTERS: Final = 2000
"""Of the reason of a refusal, which may quote what the other side has sent."""


class Acceptor:
    """Answers Hellos.

    Attributes:
        answers: to be sent over connections that have no session, each in a version of the protocol.
        pending: Hellos that the machine cannot decide on yet, or for which there are too many new sessions.
    """

    def __init__(
        self,
        machine: Machine,
        process: LocalProcess,
        sessions: SessionTable,
        context: EndpointContext,
        statistics: LinkStatistics,
        *,
        ordered: Callable[[Peer], bool],
        counters: Counters,
        drops: Drops,
    ) -> None:
        """`ordered`: whether sessions with a peer deliver in order, see `Endpoint`."""
        self.answers: Final[list[tuple[Connection, m.SessionMessage, int]]] = []
        self.pending: Final = PendingHellos(context.limits.pending_hellos)
        self._new_sessions: Final = NewSessions()
        self._machine: Final = machine
        self._process: Final = process
        self._sessions: Final = sessions
        self._context: Final = context
        self._statistics: Final = statistics
        self._ordered: Final = ordered
        self._refusals: Final = Drops(counters, counted_as="refused", what="refused a session")
        self._drops: Final = drops

    def receive(self, connection: Connection, hello: m.Hello, now: float, user: str = "") -> Peer | None:
        """Decide on a Hello of a process with a user's key; return the peer whose session uses the connection
        from now on, if it is admitted.
        """
        if self._sessions.has_ended(hello):
            self.answers.append((connection, m.Goodbye(), PROTOCOL_VERSION))
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
            self.pending.add(connection, hello, now, user)
            return None
        self._refusals.note("hellos", f"rank {hello.sender} of job {hello.job[:60]!r}", admission.reason, now)
        refusal = m.Refused(reason=admission.reason[:_MOST_CHARACTERS])
        self.answers.append((connection, refusal, PROTOCOL_VERSION))
        self._sessions.released.append(connection)
        return None

    def refuse_other_protocol(self, hello: Received, error: OtherProtocol, now: float) -> None:
        """Answer the Hello of a process that speaks another version of the protocol, in that version: it
        would wait for an answer until its time-out.
        """
        if hello.connection < 0 and tag_in(hello.frames[0]) == _HELLO and self._new_sessions.take(now):
            reason = (
                f"it {SPEAKS_VERSION} {PROTOCOL_VERSION} (NetStorm {__version__}), and this process in "
                f"version {error.version}: install the same release of NetStorm everywhere"
            )
            self.answers.append((hello.connection, m.Refused(reason=reason), error.version))
            self._sessions.released.append(hello.connection)

    def _admit(
        self, connection: Connection, hello: m.Hello, peer: Peer, now: float
    ) -> Refuse | NotYet | None:
        """Give an admitted process its session, or return why that is impossible, or too early."""
        if hello.receiver != self._process.rank and hello.receiver > UNKNOWN:
            return Refuse(f"this is rank {self._process.rank}, not rank {hello.receiver} (-1: the scheduler)")
        accepted = self._sessions.accepted
        ending = self._sessions.find_ending(hello)
        session = ending or self._present_session(hello, peer, now)
        if session is None:
            if hello.resuming:
                return Refuse("that session is not known here (any more)")
            if len(accepted) >= self._context.limits.sessions:
                return Refuse(f"this process has {len(accepted)} sessions already")
            if not self._new_sessions.take(now):
                return NotYet()
            counters = self._statistics.counters(peer, opened_here=False)
            session = AcceptedSession(
                self._context, peer, hello, counters=counters, ordered=self._ordered(peer)
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

    def _present_session(self, hello: m.Hello, peer: Peer, now: float) -> AcceptedSession | None:
        """Return the peer's session if the Hello goes on with it; otherwise end that session."""
        session = self._sessions.accepted.get(peer)
        if session is None or session.is_that_of(hello):
            return session
        name = self._process.name_of(peer)
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
