"""Connections that ended, for a machine that wants to know before their sessions are lost. Pure."""

from __future__ import annotations

from typing import Final

from netstorm.protocol.ids import Peer
from netstorm.pslite.machine import ConnectionWatcher
from netstorm.pslite.session.session import Session
from netstorm.pslite.session.states import State

__all__ = ["WatchedConnections"]


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
