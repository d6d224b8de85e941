"""The barriers that this rank has come to and that not all others have. Pure."""

from __future__ import annotations

import math
from typing import Final

from netstorm.errors import NetStormError, ProtocolViolation
from netstorm.kvstore.operations.allreduce import Done
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.protocol.messages import Barrier

__all__ = ["Barriers"]


class Barriers:
    """Of one node. The n-th barrier of every rank is the same one."""

    def __init__(self, outbox: Outbox) -> None:
        """Begin before the first; `outbox` tells the scheduler, and those who wait."""
        self._outbox: Final = outbox
        self._next = 0
        self._waiting: Final[dict[int, tuple[float, Done]]] = {}
        """By number: since when, and who is to be called."""

    def come(self, done: Done, now: float) -> None:
        """Come to the next barrier; `done` is called when all have."""
        self._waiting[self._next] = (now, done)
        self._outbox.tell(Barrier(number=self._next))
        self._next += 1

    def reached(self, number: int) -> None:
        """All ranks have come to a barrier.

        Raises:
            ProtocolViolation: nobody here waits at it.
        """
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            raise ProtocolViolation(f"barrier {number} was not waited for")
        self._outbox.call(waiting[1], None)

    def numbers(self) -> tuple[int, ...]:
        """Return the barriers that somebody waits at, the oldest first."""
        return tuple(sorted(self._waiting))

    def oldest(self) -> float:
        """Return since when somebody has waited at one (inf: nobody does)."""
        return min((since for since, _ in self._waiting.values()), default=math.inf)

    def fail(self, error: NetStormError) -> None:
        """Have those who wait told that no barrier will be reached."""
        for _, done in self._waiting.values():
            self._outbox.call(done, error)
        self._waiting.clear()
