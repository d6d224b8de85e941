"""A link's outgoing messages, the most urgent first.

A heap by (order, arrival): the chunks that fill the pipeline must go first. With first-in-first-out queues,
packed trees reached up to 25 percentage points less of the optimum (docs/design.md, section 4).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable

from netstorm.protocol.frames import Buffer, Checksum, checksum
from netstorm.pslite.machine import URGENT, Order

__all__ = ["Outgoing", "OutgoingQueue"]


class Outgoing:
    """An outgoing message: queued, then kept until it is acknowledged."""

    __slots__ = (
        "_crc",
        "body",
        "delivered_at",
        "delivered_by",
        "flight_began_at",
        "order",
        "payload",
        "resend",
        "sent_at",
        "sequence",
        "size",
        "tag",
        "transmission",
        "transmissions",
    )

    def __init__(
        self,
        body: bytes,
        payload: Buffer | None = None,
        order: Order = URGENT,
        payload_crc: int | Checksum | None = None,
        tag: Hashable | None = None,
    ) -> None:
        self.body = body
        self.tag = tag
        """Identifies the message to the machine that sent it; see `TakeBack`."""
        self.payload = payload
        self.order = order
        self._crc = payload_crc
        self.size = len(body) + (0 if payload is None else memoryview(payload).nbytes)
        """Bytes that count in the window."""
        self.sequence = 0
        self.transmission = 0
        """Position in the order of all transmissions on the link."""
        self.transmissions = 0
        """Number of its transmissions."""
        self.resend = False
        """It waits to be retransmitted."""
        self.sent_at = 0.0
        """When it was last transmitted."""
        self.delivered_by = 0
        """Bytes that had been acknowledged when it was transmitted."""
        self.delivered_at = 0.0
        """When the last of those was acknowledged."""
        self.flight_began_at = 0.0
        """When the last of those was sent."""

    def crc(self) -> int | None:
        """Return the payload's checksum, computed at most once; None if there is no payload."""
        crc = self._crc
        if isinstance(crc, Checksum):
            crc = self._crc = crc.value()
        elif crc is None and self.payload is not None:
            crc = self._crc = checksum(self.payload)
        return crc

    def copy_payload(self) -> None:
        """Keep a copy of the payload, whose memory may change from now on."""
        if self.payload is not None:
            self.payload = bytes(memoryview(self.payload))
            if not isinstance(self._crc, int):
                self._crc = None  # that of the memory is computed no more


class OutgoingQueue:
    """Messages that have not been transmitted yet."""

    __slots__ = ("_arrivals", "_heap", "bytes")

    def __init__(self) -> None:
        self._heap: list[tuple[Order, int, Outgoing]] = []
        self._arrivals = 0
        self.bytes = 0
        """Size of all messages in the queue."""

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, message: Outgoing) -> None:
        """Add a message; among those of equal order it is the last."""
        self._arrivals += 1
        self.bytes += message.size
        heapq.heappush(self._heap, (message.order, self._arrivals, message))

    def first(self) -> Outgoing | None:
        """Return the message that goes next, and keep it."""
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Outgoing:
        """Remove and return the message that goes next."""
        message = heapq.heappop(self._heap)[2]
        self.bytes -= message.size
        return message

    def take_out(self, wanted: Callable[[Hashable], bool]) -> list[Outgoing]:
        """Remove and return all messages whose tags are wanted, in order."""
        taken: list[tuple[Order, int, Outgoing]] = []
        left: list[tuple[Order, int, Outgoing]] = []
        for item in self._heap:
            tag = item[2].tag
            (taken if tag is not None and wanted(tag) else left).append(item)
        if taken:
            heapq.heapify(left)
            self._heap = left
            self.bytes -= sum(message.size for _, _, message in taken)
        return [message for _, _, message in sorted(taken, key=lambda item: item[:2])]

    def clear(self) -> None:
        """Remove all messages."""
        self._heap.clear()
        self.bytes = 0
