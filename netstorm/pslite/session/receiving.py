"""The receiving half of a session: delivers each message once and, if the session is ordered, in order.
Pure.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from netstorm.errors import NoRoom, ProtocolViolation
from netstorm.protocol.frames import Buffer, Peer
from netstorm.protocol.messages import Message
from netstorm.pslite.waiting_bytes import Charge, WaitingBytes

__all__ = ["Arrival", "ReceivingHalf", "new_held_bytes"]

Arrival: TypeAlias = tuple[Message, "Buffer | None", "int | None"]
"""A message, its payload, the payload's checksum, if it has one."""

_BEYOND: Final = 16_384
"""Most messages that may arrive before a missing one. A correct sender has fewer in flight, and beside one
that it was asked to keep (`sending`)."""

_HELD_OF_ONE: Final = 16 * 2**20
_HELD_OF_ALL: Final = 128 * 2**20
"""Bytes of messages of ordered sessions which wait for a missing one: a bound on memory. These are control
messages, and only a frame that was damaged on the way lets others wait for it: seconds of the largest job's
fit."""


def new_held_bytes() -> WaitingBytes:
    """Return what all ordered sessions of a process count together."""
    return WaitingBytes(of_one=_HELD_OF_ONE, of_all=_HELD_OF_ALL)


class ReceivingHalf:
    """Messages from one peer in one session."""

    __slots__ = ("_held", "_held_bytes", "_peer", "beyond", "ordered", "received")

    def __init__(
        self, *, ordered: bool, held_bytes: WaitingBytes | None = None, peer: Peer | None = None
    ) -> None:
        """`held_bytes`: counts what is held of all peers, of this `peer` among others."""
        self.ordered: Final = ordered
        self.received = 0
        """Highest contiguous sequence number received."""
        self.beyond: Final[set[int]] = set()
        """Sequence numbers received beyond it."""
        self._peer: Final = peer
        self._held_bytes: Final = held_bytes or new_held_bytes()
        self._held: Final[dict[int, tuple[Arrival, Charge]]] = {}

    def has(self, sequence: int) -> bool:
        """Return whether a message has been received already."""
        return sequence <= self.received or sequence in self.beyond

    def check(self, sequence: int) -> None:
        """Check that a message that was not received yet may come now.

        Raises:
            ProtocolViolation: too many wait for one that is missing.
        """
        if len(self.beyond) >= _BEYOND and sequence != self.received + 1:
            raise ProtocolViolation(
                f"message {sequence} arrived, {self.received + 1} is missing, and {_BEYOND} wait for it"
            )

    def receive(self, sequence: int, arrival: Arrival, nbytes: int = 0) -> list[Arrival]:
        """Add a message of `nbytes` that was not received yet; return the messages to deliver now.

        Raises:
            ProtocolViolation: too many messages, or bytes, wait for one that is missing.
        """
        if sequence == self.received + 1 and not self.beyond:
            self.received = sequence
            return [arrival]
        self.check(sequence)
        ready = []
        if not self.ordered:
            ready.append(arrival)
        else:
            self._held_bytes.begin(self._peer, again=sequence == self.received + 1)
            try:
                charge = self._held_bytes.take(nbytes, None, f"message {self.received + 1}")
            except NoRoom as error:
                raise ProtocolViolation(f"message {sequence} is too early: {error}") from None
            self._held[sequence] = arrival, charge
        self.beyond.add(sequence)
        while self.received + 1 in self.beyond:
            self.received += 1
            self.beyond.remove(self.received)
            if self.ordered:
                following, charge = self._held.pop(self.received)
                self._held_bytes.give_back(charge)
                ready.append(following)
        return ready

    def drop_held(self) -> None:
        """Drop what waits: the session is over."""
        while self._held:
            self._held_bytes.give_back(self._held.popitem()[1][1])

    def received_numbers(self) -> tuple[int, tuple[int, ...]]:
        """Return what an acknowledgement names: the highest contiguous number, and those beyond it."""
        return self.received, tuple(sorted(self.beyond)) if self.beyond else ()
