"""What went over one link, both ways, in all its sessions."""

from __future__ import annotations

import math

from netstorm.protocol.messages import Message

__all__ = ["LinkCounters"]


class LinkCounters:
    """Numbers that only grow. Bytes are those of frames, without ZeroMQ's and TCP's own."""

    __slots__ = (
        "bytes_received",
        "bytes_resent",
        "bytes_sent",
        "connections",
        "dropped",
        "duplicates",
        "heard",
        "heard_at",
        "messages_received",
        "messages_resent",
        "messages_sent",
    )

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.messages_sent = 0
        self.bytes_resent = 0
        """Part of `bytes_sent`."""
        self.messages_resent = 0
        self.bytes_received = 0
        self.messages_received = 0
        self.duplicates = 0
        self.connections = 0
        """Connections that it has had."""
        self.dropped: dict[str, int] = {}
        """By reason."""
        self.heard: Message | None = None
        """The last message that came, of any kind."""
        self.heard_at = -math.inf
        """When it came."""

    def drop(self, reason: str) -> None:
        """Count a message that was dropped."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def snapshot(self) -> dict[str, int]:
        """Return all numbers by name; those dropped as `dropped_REASON`."""
        others = ("dropped", "heard", "heard_at")
        numbers = {name: getattr(self, name) for name in self.__slots__ if name not in others}
        return numbers | {f"dropped_{reason}": number for reason, number in self.dropped.items()}
