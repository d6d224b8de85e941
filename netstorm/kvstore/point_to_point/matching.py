"""Which receive takes which message. Pure.

As in MPI: of the receives that take a message, the one that was submitted first; of the messages that a
receive takes, the one that arrived first. Messages of one sender arrive here in the order in which it sent
them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from netstorm.kvstore.operations.point_to_point import ReceiveOperation
from netstorm.protocol.frames import Buffer

__all__ = ["Arrived", "Matching"]

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True, eq=False)
class Arrived:
    """A message of a program that has arrived, or has been offered."""

    sender: int
    number: int
    channel: str
    tag: int
    what: str
    nbytes: int
    payload: Buffer | None = None
    """Of a small message; None if it has no bytes."""
    is_offer: bool = False


class Matching:
    """Receives that wait for messages, and messages that wait for receives."""

    def __init__(self) -> None:
        self._posted: Final[dict[tuple[str, int], list[ReceiveOperation]]] = {}
        self._waiting: Final[dict[tuple[str, int], list[Arrived]]] = {}

    def post(self, receive: ReceiveOperation) -> Arrived | None:
        """Return the message that a new receive takes; if there is none, keep the receive."""
        key = receive.channel, receive.tag
        found = _take(self._waiting, key, lambda arrived: receive.takes(arrived.sender))
        if found is None:
            self._posted.setdefault(key, []).append(receive)
        return found

    def arrive(self, arrived: Arrived, *, keep: bool = True) -> ReceiveOperation | None:
        """Return the receive that takes a new message; if there is none, keep the message if `keep`."""
        key = arrived.channel, arrived.tag
        found = _take(self._posted, key, lambda receive: receive.takes(arrived.sender))
        if found is None and keep:
            self._waiting.setdefault(key, []).append(arrived)
        return found

    def posted(self) -> Iterator[ReceiveOperation]:
        """Yield the receives that wait."""
        for queue in self._posted.values():
            yield from queue

    def waiting(self) -> Iterator[Arrived]:
        """Yield the messages that wait."""
        for queue in self._waiting.values():
            yield from queue

    def take_posted(self, wanted: Callable[[ReceiveOperation], bool]) -> list[ReceiveOperation]:
        """Remove the receives that are `wanted`, and return them."""
        found = [receive for receive in self.posted() if wanted(receive)]
        for receive in found:
            _take(self._posted, (receive.channel, receive.tag), partial(operator.is_, receive))
        return found

    def take_waiting(self) -> list[Arrived]:
        """Remove all messages that wait, and return them."""
        found = list(self.waiting())
        self._waiting.clear()
        return found

    def drop(self, sender: int) -> None:
        """Drop the messages of a rank that wait."""
        for waiting in self._waiting.values():
            waiting[:] = [arrived for arrived in waiting if arrived.sender != sender]

    def clear(self) -> None:
        """Drop everything."""
        self._posted.clear()
        self._waiting.clear()


def _take(
    queues: dict[tuple[str, int], list[_T]], key: tuple[str, int], wanted: Callable[[_T], bool]
) -> _T | None:
    """Remove the first element of a queue that is wanted, and return it; None: there is none."""
    queue = queues.get(key, [])
    for index, element in enumerate(queue):
        if wanted(element):
            del queue[index]
            if not queue:
                del queues[key]
            return element
    return None
