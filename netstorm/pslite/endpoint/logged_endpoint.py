"""An endpoint that logs its connections and messages (PS_VERBOSE). Pure apart from the log."""

from __future__ import annotations

import logging
from typing import Final

from netstorm.addresses import host_port
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer, Header, Peer
from netstorm.pslite.endpoint.endpoint import Endpoint
from netstorm.pslite.machine import Connect, Disconnect, Send
from netstorm.pslite.session.session import Session
from netstorm.pslite.van.interface import Connection

__all__ = ["LoggedEndpoint"]

_log = logging.getLogger(__name__)

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
