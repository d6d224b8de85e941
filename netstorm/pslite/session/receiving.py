"""The receiving half of a session: delivers each message once and, if the session is ordered, in order.
Pure.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from netstorm.errors import ProtocolViolation
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import Message

__all__ = ["Arrival", "ReceivingHalf"]

Arrival: TypeAlias = tuple[Message, "Buffer | None", "int | None"]
"""A message, its payload, the payload's checksum, if it has one."""

_BEYOND: Final = 16_384
"""Most messages that may arrive before a missing one: a bound on memory. A correct sender has fewer in
flight."""


class ReceivingHalf:
    """Messages from one peer in one session."""

    __slots__ = ("_held", "beyond", "ordered", "received")

    def __init__(self, *, ordered: bool) -> None:
        self.ordered: Final = ordered
        self.received = 0
        """Highest contiguous sequence number received."""
        self.beyond: Final[set[int]] = set()
        """Sequence numbers received beyond it."""
        self._held: Final[dict[int, Arrival]] = {}

    def has(self, sequence: int) -> bool:
        """Return whether a message has been received already."""
        return sequence <= self.received or sequence in self.beyond

    def receive(self, sequence: int, arrival: Arrival) -> list[Arrival]:
        """Add a message that was not received yet; return the messages to deliver now.

        Raises:
            ProtocolViolation: too many messages are missing before it.
        """
        if sequence == self.received + 1 and not self.beyond:
            self.received = sequence
            return [arrival]
        if len(self.beyond) >= _BEYOND and sequence != self.received + 1:
            raise ProtocolViolation(
                f"message {sequence} arrived, {self.received + 1} is missing, and {_BEYOND} wait for it"
            )
        self.beyond.add(sequence)
        if self.ordered:
            self._held[sequence] = arrival
        ready = [] if self.ordered else [arrival]
        while self.received + 1 in self.beyond:
            self.received += 1
            self.beyond.remove(self.received)
            if self.ordered:
                ready.append(self._held.pop(self.received))
        return ready

    def received_numbers(self) -> tuple[int, tuple[int, ...]]:
        """Return what an acknowledgement names: the highest contiguous number, and those beyond it."""
        return self.received, tuple(sorted(self.beyond)) if self.beyond else ()
