"""Connections that ended, for a machine that wants to know before their sessions are lost. Pure."""

from __future__ import annotations

from typing import Final

from netstorm.protocol.frames import Peer
from netstorm.pslite.endpoint.endpoint_context import EndpointContext
from netstorm.pslite.endpoint.session_table import SessionTable
from netstorm.pslite.machine import ConnectionWatcher, Inquire
from netstorm.pslite.session.session import Session
from netstorm.pslite.session.states import State
from netstorm.pslite.van.interface import Broken, Connection, Transmitter

__all__ = ["Inquiries", "WatchedConnections"]


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
        if was_up and session.state is State.DISCONNECTED and not session.opened_here:
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
        if session is not None and session.state is State.UP and session.connection is not None:
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
        return session is not None and session.state is not State.UP
