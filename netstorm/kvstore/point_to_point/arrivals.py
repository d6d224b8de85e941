"""The messages of one sender, as they arrive: each once, in order, and not more than was agreed. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.point_to_point.limits import (
    MOST_TEXT,
    MOST_WAITING,
    PIECE_BYTES,
    WAITING_BYTES,
    charge,
)
from netstorm.kvstore.point_to_point.matching import Arrived

__all__ = ["Arrivals"]


class Arrivals:
    """Small messages and offers of one sender. Around failed links they may come twice, or out of order."""

    __slots__ = ("_delivered", "_early", "_end", "_sender", "_waiting", "waiting_bytes")

    def __init__(self, sender: int) -> None:
        self._sender: Final = sender
        self._delivered = 0
        """All messages with smaller numbers have been delivered."""
        self._early: Final[dict[int, Arrived]] = {}
        self._end: int | None = None
        """How many messages there are in all; None: that is not known."""
        self._waiting = 0
        """Number of messages that no receive has taken."""
        self.waiting_bytes = 0
        """Charge of the small ones among them: what is stored here."""

    @property
    def has_begun(self) -> bool:
        """Whether anything has come."""
        return self._delivered > 0 or bool(self._early)

    @property
    def has_count(self) -> bool:
        """Whether it is known how many messages there are in all."""
        return self._end is not None

    @property
    def has_ended(self) -> bool:
        """Whether the sender has finished, and all that it sent has been delivered."""
        return self._delivered == self._end

    def was_delivered(self, number: int) -> bool:
        """Return whether a message has come, and all before it."""
        return 0 <= number < self._delivered

    def add(self, arrived: Arrived) -> bool:
        """Add a message; return False if it had come before.

        Raises:
            ProtocolViolation: no correct node sends it.
        """
        if self.was_delivered(arrived.number) or arrived.number in self._early:
            return False
        self._check(arrived)
        self._early[arrived.number] = arrived
        self._waiting += 1
        self.waiting_bytes += _charge(arrived)
        return True

    def take_ready(self) -> Iterator[Arrived]:
        """Yield the messages that are next in order; they count as delivered."""
        while self._delivered in self._early:
            self._delivered += 1
            yield self._early.pop(self._delivered - 1)

    def matched(self, arrived: Arrived) -> None:
        """Record that a delivered message waits no more."""
        self._waiting -= 1
        self.waiting_bytes -= _charge(arrived)

    def end_after(self, count: int) -> None:
        """Record that the sender has finished, after so many messages.

        Raises:
            ProtocolViolation: more have come.
        """
        if count < max([self._delivered, *(number + 1 for number in self._early)]):
            raise ProtocolViolation(f"rank {self._sender} has sent more than the {count} messages it counts")
        self._end = count

    def _check(self, arrived: Arrived) -> None:
        problem = ""
        if arrived.number < 0 or (self._end is not None and arrived.number >= self._end):
            problem = "has no legal number"
        elif len(arrived.channel) > MOST_TEXT or not 0 < len(arrived.what) <= MOST_TEXT:
            problem = f"has texts of other than 1 to {MOST_TEXT} characters"
        elif arrived.nbytes < 0 or (not arrived.is_offer and arrived.nbytes > PIECE_BYTES):
            problem = f"has {arrived.nbytes} bytes"
        elif self._waiting >= MOST_WAITING or self.waiting_bytes + _charge(arrived) > WAITING_BYTES:
            problem = f"comes while {self._waiting} with {self.waiting_bytes} bytes wait here"
        if problem:
            raise ProtocolViolation(f"message {arrived.number} from rank {self._sender} {problem}")


def _charge(arrived: Arrived) -> int:
    return 0 if arrived.is_offer else charge(arrived.nbytes)
