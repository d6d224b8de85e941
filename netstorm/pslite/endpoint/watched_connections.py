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

    def refused(self, peer: Peer, reason: str, now: float) -> None:
        """Tell that no process listens at a peer's address."""
        if self._watcher is not None:
            self._watcher.connection_gone(peer, reason, now, refused=True)

    def flushed(self, session: Session, *, was_up: bool) -> None:
        """Note whether the connection of a session that the peer opened has ended."""
        if was_up and session.state is State.DISCONNECTED and not session.opened_here:
            self._gone.append((session.peer, session.reason))

    def tell(self, now: float) -> bool:
        """Tell which peers' connections were found to be gone; return whether there are any."""
        found, self._gone = self._gone, []
        if self._watcher is None:
            return False
        for peer, reason in found:
            self._watcher.connection_gone(peer, reason, now, refused=False)
        return bool(found)
