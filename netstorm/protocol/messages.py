"""The kinds of messages. Fields are append-only: a new field is the last one and has a default.

Messages of a *session* (Hello … Query) carry no sequence number. *Datagrams* are sent once and may be lost
with a connection. All others are *sequenced*: the session delivers each exactly once.
"""

from __future__ import annotations

import msgspec

__all__ = ["DataMessage", "Datagram", "Message", "SessionMessage"]


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """Base class of all messages."""


class SessionMessage(Message, frozen=True):
    """For the session itself; never delivered to the machine."""


class Datagram(Message, frozen=True):
    """Sent once, without acknowledgement; may be lost."""


class DataMessage(Message, frozen=True):
    """Carries a payload in a frame of its own."""
