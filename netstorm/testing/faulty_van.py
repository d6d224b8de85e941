"""A van that injects faults: it breaks connections and flips bits."""

from __future__ import annotations

import random

from netstorm.protocol.frames import Buffer
from netstorm.pslite.rates import Progress
from netstorm.pslite.van import Broken, Connection, Received, Van, VanEvent

__all__ = ["FaultyVan"]


class FaultyVan:
    """Wraps another van; breaks its connections, and flips bits in received messages.

    Attributes:
        broken_probability: that a connection opened here breaks when a message is handed over.
        header_probability: that a bit of a frame 0 changes.
        payload_probability: that a bit of a payload changes.
    """

    def __init__(self, van: Van, rng: random.Random) -> None:
        self.broken_probability = 0.0
        self.header_probability = 0.0
        self.payload_probability = 0.0
        self._van = van
        self._random = rng
        self._events: list[VanEvent] = []

    def bind(self, host: str, port: int) -> int:
        """See `Van`."""
        return self._van.bind(host, port)

    def open(self, connection: Connection, host: str, port: int) -> None:
        """See `Van`."""
        self._van.open(connection, host, port)

    def transmit(self, connection: Connection, header: bytes, payload: Buffer | None) -> bool:
        """See `Van`."""
        if connection > 0 and self._random.random() < self.broken_probability:
            self._van.close(connection)
            self._events.append(Broken(connection, "the test broke it"))
            return bool(self._random.getrandbits(1))
        return self._van.transmit(connection, header, payload)

    def close(self, connection: Connection) -> None:
        """See `Van`."""
        self._van.close(connection)

    def admit(self, connection: Connection) -> None:
        """See `Transmitter`."""
        self._van.admit(connection)

    def refuse(self, connection: Connection, reason: str) -> None:
        """See `Transmitter`."""
        self._van.refuse(connection, reason)

    def progress(self, connection: Connection) -> Progress | None:
        """See `Van`."""
        return self._van.progress(connection)

    def acknowledges(self, connection: Connection) -> bool:
        """See `Van`."""
        return self._van.acknowledges(connection)

    def poll(self, timeout_s: float) -> list[VanEvent]:
        """See `Van`."""
        events, self._events = self._events, []
        for event in self._van.poll(0.0 if events else timeout_s):
            events.append(self._changed(event) if isinstance(event, Received) else event)
        return events

    def wake(self) -> None:
        """See `Van`."""
        self._van.wake()

    def shut(self, linger_s: float) -> None:
        """See `Van`."""
        self._van.shut(linger_s)

    def _changed(self, event: Received) -> Received:
        header, *payload = event.frames
        if self._random.random() < self.header_probability:
            header = self._flipped(bytearray(header))
        if payload and len(payload[0]) and self._random.random() < self.payload_probability:
            payload = [self._flipped(bytearray(payload[0]))]
        return Received(event.connection, (header, *payload))

    def _flipped(self, data: bytearray) -> bytearray:
        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return data
