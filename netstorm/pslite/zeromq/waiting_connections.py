"""Connections that were accepted, and over which no message has come yet: few, young, and of few bytes.

ZeroMQ has bounds of its own: a time for the handshake (HANDSHAKE_IVL), and a size of messages (MAXMSGSIZE),
which has to be that of chunks. It knows no bound on the number of connections, and takes as much in a
handshake as in a message. So what strangers could open and send is bounded here: what is too much is shut
down, the oldest first. A process of the job says Hello as soon as it is connected, and is not concerned.
"""

from __future__ import annotations

from typing import Final

from netstorm.observe.drops import Drops
from netstorm.pslite.zeromq.tcp_info import bytes_received, shut_down

__all__ = ["WaitingConnections"]

_MOST: Final = 1024
"""Connections that wait at once: a whole large job connects when it starts. Each takes 20 kB in ZeroMQ."""

_MOST_BYTES: Final = 2**20
"""Of a connection before its first message, and of that: a Hello with all that it has received."""

_CHECK_S: Final = 0.25
_PAUSE_S: Final = 1.0


class WaitingConnections:
    """Connections to one port, by descriptor. All methods belong to the van's thread.

    Attributes:
        port: on which they were accepted.
    """

    def __init__(self, refusals: Drops, *, limit_s: float) -> None:
        """`limit_s`: how long a connection may wait for its first message."""
        self.port = 0
        self._refusals: Final = refusals
        self._limit_s: Final = limit_s
        self._waiting: Final[dict[int, tuple[float, str]]] = {}
        """When it was accepted, and from which address; the oldest first."""
        self._checked_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def accepted(self, descriptor: int, sender: str, now: float) -> None:
        """Record a connection that ZeroMQ has accepted. If there are too many, the oldest is shut down."""
        self._waiting.pop(descriptor, None)
        self._waiting[descriptor] = (now, sender)
        if len(self._waiting) > _MOST:
            self._refuse(next(iter(self._waiting)), "waiting", f"{_MOST} others wait, too", now)

    def heard(self, descriptor: int) -> None:
        """Record that a message has come over a connection."""
        self._waiting.pop(descriptor, None)

    def ended(self, descriptor: int) -> None:
        """Record that ZeroMQ has closed a connection."""
        self._waiting.pop(descriptor, None)

    def until_check(self, timeout_s: float) -> float:
        """Return how long to wait for events, at most `timeout_s`."""
        return min(timeout_s, _CHECK_S) if self._waiting else timeout_s

    def check(self, now: float) -> None:
        """Shut down what waits for too long, or has sent too much. All messages that came have been read."""
        if not self._waiting or now < self._checked_at + _CHECK_S:
            return
        before, self._checked_at = self._checked_at, now
        if now - before > _PAUSE_S:  # this thread has not read what may have come meanwhile
            for descriptor, (since, sender) in self._waiting.items():
                self._waiting[descriptor] = (max(since, now - self._limit_s / 2), sender)
        for descriptor, (since, _) in list(self._waiting.items()):
            if now - since > self._limit_s:
                self._refuse(descriptor, "silent", f"no message came for {self._limit_s:g} s", now)
            elif since < before and bytes_received(descriptor) > _MOST_BYTES:
                detail = f"it has sent more than {_MOST_BYTES} bytes before a message was complete"
                self._refuse(descriptor, "large", detail, now)

    def _refuse(self, descriptor: int, reason: str, detail: str, now: float) -> None:
        _, sender = self._waiting.pop(descriptor)
        self._refusals.note(reason, sender, detail, now)
        shut_down(descriptor, self.port)
