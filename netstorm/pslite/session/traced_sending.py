"""The sending half of a session that records its deliveries in a trace. Pure: the trace has the clock."""

from __future__ import annotations

from typing import Final

from netstorm.observe.trace import Delivery, Trace
from netstorm.protocol.frames import Peer
from netstorm.pslite.session.queue import Outgoing
from netstorm.pslite.session.sending import OnAcknowledged, SendingHalf
from netstorm.pslite.session.window import Window

__all__ = ["TracedSendingHalf"]


class TracedSendingHalf(SendingHalf):
    """Records each message that is acknowledged.

    It is a class of its own so that tracing costs other sessions nothing.
    """

    __slots__ = ("_peer", "_queued_at", "_states", "_trace")

    def __init__(
        self, window: Window, peer: Peer, trace: Trace, on_acknowledged: OnAcknowledged | None = None
    ) -> None:
        super().__init__(window, on_acknowledged)
        self._peer: Final = peer
        self._trace: Final = trace
        self._queued_at: Final[dict[Outgoing, float]] = {}
        self._states: Final[dict[Outgoing, tuple[int, int, int]]] = {}
        """Bytes in flight, window and queue length at a message's last transmission."""

    def submit(self, message: Outgoing) -> None:
        """Queue a message."""
        self._queued_at[message] = self._trace.now()
        super().submit(message)

    def clear(self) -> None:
        """Drop everything."""
        super().clear()
        self._queued_at.clear()
        self._states.clear()

    def _transmitted(self, message: Outgoing, now: float) -> Outgoing:
        super()._transmitted(message, now)
        self._states[message] = (self.window.in_flight, self.window.size, len(self.queue))
        return message

    def _arrived(self, message: Outgoing, now: float) -> int:
        in_flight, window, waiting = self._states.pop(message)
        self._trace.add_delivery(
            Delivery(
                peer=self._peer,
                body=message.body,
                size=message.size,
                queued_at=self._queued_at.pop(message),
                sent_at=message.sent_at,
                acknowledged_at=now,
                transmissions=message.transmissions,
                in_flight=in_flight,
                window=window,
                waiting=waiting,
            )
        )
        return super()._arrived(message, now)
