"""The states of a session and its transitions, as a table. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["TRANSITIONS", "Event", "State"]


class State(enum.Enum):
    """The state of a session."""

    IDLE = "idle"
    """Opened here, and nothing has been sent yet: no connection."""
    CONNECTING = "connecting"
    """A connection was opened and Hello handed over; no answer yet."""
    UP = "up"
    """Messages flow."""
    DISCONNECTED = "disconnected"
    """Between two connections."""
    CLOSING = "closing"
    """Goodbye was sent; the session waits for the other side's, but not for long."""
    CLOSED = "closed"
    """Ended on purpose."""
    LOST = "lost"
    """Could not be re-established in time, or was refused."""


class Event(enum.Enum):
    """What can happen to a session."""

    CONNECT = "first message"
    RETRY = "time for another attempt"
    HELLO = "Hello on a new connection"
    WELCOME = "Welcome"
    BROKEN = "connection broken or silent"
    REFUSED = "Refused, or another process answers"
    TIMED_OUT = "no connection within the link time-out"
    DRAINED = "everything is acknowledged, and the session is to end"
    GOODBYE = "Goodbye"
    ABORTED = "the session is to end, has nothing to send, and is not up"
    CLOSE_TIMED_OUT = "no Goodbye in time"


_S, _E = State, Event
TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = MappingProxyType(
    {
        _S.IDLE: {_E.CONNECT: _S.CONNECTING, _E.ABORTED: _S.CLOSED},
        _S.CONNECTING: {
            _E.WELCOME: _S.UP,
            _E.BROKEN: _S.DISCONNECTED,
            _E.REFUSED: _S.LOST,
            _E.TIMED_OUT: _S.LOST,
            _E.ABORTED: _S.CLOSED,
            _E.GOODBYE: _S.CLOSED,
        },
        _S.UP: {
            _E.HELLO: _S.UP,
            _E.BROKEN: _S.DISCONNECTED,
            _E.REFUSED: _S.LOST,
            _E.TIMED_OUT: _S.LOST,
            _E.DRAINED: _S.CLOSING,
            _E.GOODBYE: _S.CLOSING,
        },
        _S.DISCONNECTED: {
            _E.RETRY: _S.CONNECTING,
            _E.HELLO: _S.UP,
            _E.TIMED_OUT: _S.LOST,
            _E.ABORTED: _S.CLOSED,
        },
        _S.CLOSING: {_E.GOODBYE: _S.CLOSED, _E.BROKEN: _S.CLOSED, _E.CLOSE_TIMED_OUT: _S.CLOSED},
        _S.CLOSED: {},
        _S.LOST: {},
    }
)
