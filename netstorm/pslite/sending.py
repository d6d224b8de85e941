"""The sending half of a session: numbers messages, keeps them until they are acknowledged, retransmits lost
ones. Pure.

A connection keeps its order. So a message is lost if one that was transmitted after it on the same connection
has arrived. Nothing is ever retransmitted because time has passed: on a live but slow connection that would
double the load (docs/design.md, section 4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.pslite.machine import URGENT
from netstorm.pslite.session.link_state import LinkState
from netstorm.pslite.session.queue import Outgoing, OutgoingQueue
from netstorm.pslite.session.window import Window

__all__ = ["OnAcknowledged", "SendingHalf"]

_SPAN: Final = 8192
"""Numbers that may pass a message which the other side has no room for: it keeps the number of each
(`receiving`)."""

OnAcknowledged = Callable[[Outgoing, float], None]
"""Called with each message that is acknowledged, and the time."""


class SendingHalf:
    """Messages to one peer in one session."""

    __slots__ = (
        "_acknowledged",
        "_later",
        "_later_bytes",
        "_on_acknowledged",
        "_resend",
        "_sequence",
        "_transmissions",
        "queue",
        "unacknowledged",
        "window",
    )

    def __init__(self, window: Window, on_acknowledged: OnAcknowledged | None = None) -> None:
        """Send within a window."""
        self._on_acknowledged: Final = on_acknowledged
        self.window: Final = window
        self.queue: Final = OutgoingQueue()
        self.unacknowledged: Final[dict[int, Outgoing]] = {}
        """By sequence number."""
        self._resend: deque[Outgoing] = deque()
        """Those of `unacknowledged` that must be retransmitted, in sequence order."""
        self._later: Final[dict[int, Outgoing]] = {}
        """Those of `unacknowledged` that the other side will ask for; they are not in flight."""
        self._later_bytes = 0
        self._sequence = 0
        self._acknowledged = 0
        """Everything up to here has been acknowledged."""
        self._transmissions = 0

    def has_work(self) -> bool:
        """Return whether anything is queued or unacknowledged."""
        return bool(self.queue or self.unacknowledged)

    def state(self) -> LinkState:
        """Return the present state of the link."""
        window = self.window
        round_trip_s = min(window.min_rtt_s, window.smooth_rtt_s)  # infinite on a new connection, then 0
        rate = window.busy_rate
        sending_s = window.largest_message / rate if rate else 0.0
        return LinkState(
            messages=len(self.queue) + len(self.unacknowledged),
            bytes=self.queue.bytes + window.in_flight,
            window=window.size,
            rate=rate,
            latency_s=max(0.0, (round_trip_s - sending_s) / 2),
        )

    def submit(self, message: Outgoing) -> None:
        """Queue a message."""
        self.queue.push(message)

    def next(self, now: float) -> Outgoing | None:
        """Return the message to transmit now, numbered; None if there is none, or the window is full."""
        first = self.queue.first()
        urgent = first is not None and first.order == URGENT
        if self._resend:
            again = self._resend[0]
            if again.order == URGENT or self.window.allows(again.size):
                self._resend.popleft()
                again.resend = False
                return self._transmitted(again, now)
            if not urgent:
                return None
        if first is None or not (urgent or self.window.allows(first.size)):
            return None
        if self._later and not urgent and not self._may_pass():
            return None
        self.queue.pop()
        self._sequence += 1
        first.sequence = self._sequence
        self.unacknowledged[first.sequence] = first
        return self._transmitted(first, now)

    def _may_pass(self) -> bool:
        """Return whether a message may pass those for which the other side has no room.

        Once they would fill the window, one at a time: it is likely to have no room there, either.
        """
        full = self._later_bytes >= self.window.size and self.window.in_flight > 0
        return not full and self._sequence - min(self._later) < _SPAN

    def mark(self) -> int:
        """Return a position in the order of transmissions: everything transmitted so far is before it."""
        self._transmissions += 1
        return self._transmissions

    def acknowledge(self, received: int, beyond: tuple[int, ...], now: float, *, mark: int = 0) -> bool:
        """Forget what has arrived, and retransmit what is lost; return whether anything was newly
        acknowledged.

        Args:
            received: highest contiguous sequence number that the other side has.
            beyond: sequence numbers that it has beyond that.
            now: s on the local clock.
            mark: position in the order of transmissions; what was transmitted before it and has not arrived
                is lost.

        Raises:
            ProtocolViolation: numbers that were never used.
        """
        self.check(received, beyond)
        latest = mark
        news = False
        if received > self._acknowledged:
            for sequence in range(self._acknowledged + 1, received + 1):
                message = self.unacknowledged.pop(sequence, None)
                if message is not None:
                    news = True
                    latest = max(latest, self._arrived(message, now))
            self._acknowledged = received
        for sequence in beyond:
            message = self.unacknowledged.pop(sequence, None)
            if message is not None:
                news = True
                latest = max(latest, self._arrived(message, now))
        if self.unacknowledged and (beyond or mark):
            self._lose_before(latest)
        return news

    def check(self, received: int, beyond: tuple[int, ...]) -> None:
        """Check that an acknowledgement is possible.

        Raises:
            ProtocolViolation: it names numbers that were never used.
        """
        if received > self._sequence or any(not 0 < sequence <= self._sequence for sequence in beyond):
            raise ProtocolViolation(
                f"acknowledges up to {max((received, *beyond))}, and {self._sequence} messages were sent"
            )

    def resend(self, sequence: int) -> bool:
        """Retransmit a message; False if it has been acknowledged, or is waiting for that already."""
        message = self.unacknowledged.get(sequence)
        kept = self._no_longer_later(sequence)
        if message is None or (message.resend and kept is None):
            return False
        if kept is None:
            self._lose([message])
        else:
            self._resend = deque(sorted((*self._resend, kept), key=lambda message: message.sequence))
        return True

    def keep(self, sequence: int) -> None:
        """Keep a message that has arrived where there is no room for it, until `resend`."""
        message = self.unacknowledged.get(sequence)
        if message is not None and not message.resend:
            self.window.returned(message)
            message.resend = True
            self._later[sequence] = message
            self._later_bytes += message.size

    def _no_longer_later(self, sequence: int) -> Outgoing | None:
        message = self._later.pop(sequence, None)
        if message is not None:
            self._later_bytes -= message.size
        return message

    def disconnected(self) -> None:
        """Note that everything in flight is lost; what the next Welcome does not acknowledge is
        retransmitted.
        """
        self.window.restart()
        self._later.clear()
        self._later_bytes = 0
        for message in self.unacknowledged.values():
            message.resend = True
        self._resend = deque(self.unacknowledged[sequence] for sequence in sorted(self.unacknowledged))

    def take_back(self, wanted: Callable[[Hashable], bool]) -> list[Outgoing]:
        """Remove and return what is wanted, by its tag, and was not transmitted yet.

        The payloads of transmitted messages are copied, since these may have to be sent again.
        """
        for message in self.unacknowledged.values():
            if message.payload is not None and message.tag is not None and wanted(message.tag):
                message.copy_payload()
        return self.queue.take_out(wanted)

    def take_all(self) -> list[Outgoing]:
        """Return what has not been acknowledged, in order, and drop it."""
        left = [self.unacknowledged[sequence] for sequence in sorted(self.unacknowledged)]
        while self.queue:
            left.append(self.queue.pop())
        self.clear()
        return left

    def clear(self) -> None:
        """Drop everything."""
        self.queue.clear()
        self.unacknowledged.clear()
        self._resend.clear()
        self._later.clear()
        self._later_bytes = 0
        self.window.restart()

    def _transmitted(self, message: Outgoing, now: float) -> Outgoing:
        self._transmissions += 1
        message.transmission = self._transmissions
        message.transmissions += 1
        self.window.sent(message, now)
        return message

    def _arrived(self, message: Outgoing, now: float) -> int:
        """Record an acknowledged message; return its position in the order of transmissions."""
        if message.resend:  # it was taken for lost: a nack and an acknowledgement have crossed
            if self._no_longer_later(message.sequence) is None:
                self._resend.remove(message)
            return 0
        self.window.acknowledged(message, now)
        if self._on_acknowledged is not None:
            self._on_acknowledged(message, now)
        return message.transmission

    def _lose_before(self, transmission: int) -> None:
        lost = [
            message
            for message in self.unacknowledged.values()
            if message.transmission < transmission and not message.resend
        ]
        if lost:
            self._lose(lost)

    def _lose(self, lost: list[Outgoing]) -> None:
        for message in lost:
            message.resend = True
            self.window.returned(message)
        self._resend = deque(sorted((*self._resend, *lost), key=lambda message: message.sequence))
