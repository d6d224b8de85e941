"""The states of a session, and what leads from one to another: a table, from which docs draw their figure.
Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["TRANSITIONS", "Event", "State"]


class State(enum.Enum):
    """Where a session is in its life."""

    IDLE = "idle"
    """Opened here, and nothing has been sent yet: no connection."""
    GREETING = "greeting"
    """A connection has been asked for and Hello handed over; no answer yet."""
    UP = "up"
    """Messages flow."""
    AWAY = "away"
    """Between two connections."""
    PARTING = "parting"
    """Goodbye has been said here; the other side's is awaited, but not for long."""
    OVER = "over"
    """Ended on purpose."""
    LOST = "lost"
    """Could not be re-established in time, or was refused."""


class Event(enum.Enum):
    """What can happen to a session."""

    WANTED = "first message"
    RETRY = "time for another attempt"
    HELLO = "Hello on a new connection"
    WELCOME = "Welcome"
    BROKEN = "connection broken or silent"
    REFUSED = "Refused, or another process answers"
    TOO_LATE = "nobody there within the link time-out"
    DRAINED = "everything acknowledged, and the end is wanted"
    GOODBYE = "Goodbye"
    DROPPED = "the end is wanted at once, and there is no connection"
    ENOUGH = "no Goodbye in time"


_S, _E = State, Event
TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = MappingProxyType(
    {
        _S.IDLE: {_E.WANTED: _S.GREETING, _E.DROPPED: _S.OVER},
        _S.GREETING: {
            _E.WELCOME: _S.UP,
            _E.BROKEN: _S.AWAY,
            _E.REFUSED: _S.LOST,
            _E.TOO_LATE: _S.LOST,
            _E.DROPPED: _S.OVER,
            _E.GOODBYE: _S.OVER,
        },
        _S.UP: {
            _E.HELLO: _S.UP,
            _E.BROKEN: _S.AWAY,
            _E.REFUSED: _S.LOST,
            _E.TOO_LATE: _S.LOST,
            _E.DRAINED: _S.PARTING,
            _E.GOODBYE: _S.PARTING,
        },
        _S.AWAY: {
            _E.RETRY: _S.GREETING,
            _E.HELLO: _S.UP,
            _E.TOO_LATE: _S.LOST,
            _E.DROPPED: _S.OVER,
        },
        _S.PARTING: {_E.GOODBYE: _S.OVER, _E.BROKEN: _S.OVER, _E.ENOUGH: _S.OVER},
        _S.OVER: {},
        _S.LOST: {},
    }
)
