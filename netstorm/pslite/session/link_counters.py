"""What went over one link, in both directions and in all its sessions."""

from __future__ import annotations

import math

__all__ = ["LinkCounters"]


class LinkCounters:
    """Numbers that only grow. Bytes are those of frames, without the headers of ZeroMQ and TCP."""

    __slots__ = (
        "bytes_received",
        "bytes_resent",
        "bytes_sent",
        "connections",
        "dropped",
        "duplicates",
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
        """Connections that the link has had."""
        self.dropped: dict[str, int] = {}
        """By reason."""
        self.heard_at = -math.inf
        """When the last message of any kind arrived, on the local clock."""

    def drop(self, reason: str) -> None:
        """Count a message that was dropped."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def snapshot(self) -> dict[str, int]:
        """Return all numbers by name; dropped messages as `dropped_REASON`."""
        others = ("dropped", "heard_at")
        numbers = {name: getattr(self, name) for name in self.__slots__ if name not in others}
        return numbers | {f"dropped_{reason}": number for reason, number in self.dropped.items()}
