"""The barriers that this rank has entered and that not all others have. Pure."""

from __future__ import annotations

import math
from typing import Final

from netstorm.errors import NetStormError, ProtocolViolation
from netstorm.kvstore.operations.allreduce import Done
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.protocol.messages import Barrier

__all__ = ["Barriers"]


class Barriers:
    """The open barriers of one node. The n-th barrier of every rank is the same one."""

    def __init__(self, outbox: Outbox) -> None:
        """Begin before the first barrier; `outbox` takes messages and completions."""
        self._outbox: Final = outbox
        self._next = 0
        self._waiting: Final[dict[int, tuple[float, Done]]] = {}
        """By number: when it was entered, and what to call."""

    def start(self, number: int) -> None:
        """Begin with barrier `number`: this rank has joined a job that has reached those before."""
        self._next = number

    @property
    def entered(self) -> int:
        """How many barriers this rank has entered."""
        return self._next

    def enter(self, done: Done, now: float) -> None:
        """Enter the next barrier; `done` is called when all ranks have."""
        self._waiting[self._next] = (now, done)
        self._outbox.send_to_scheduler(Barrier(number=self._next))
        self._next += 1

    def reached(self, number: int) -> None:
        """Complete a barrier that all ranks have entered.

        Raises:
            ProtocolViolation: this rank does not wait at it.
        """
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            raise ProtocolViolation(f"barrier {number} was not waited for")
        self._outbox.complete(waiting[1], None)

    def waiting_numbers(self) -> tuple[int, ...]:
        """Return the barriers that this rank waits at, the oldest first."""
        return tuple(sorted(self._waiting))

    def oldest(self) -> float:
        """Return when the oldest of them was entered (inf: there is none)."""
        return min((since for since, _ in self._waiting.values()), default=math.inf)

    def fail_all(self, error: NetStormError) -> None:
        """Fail all barriers that this rank waits at."""
        for _, done in self._waiting.values():
            self._outbox.complete(done, error)
        self._waiting.clear()
