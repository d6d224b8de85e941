"""Hellos that the machine cannot decide on yet, or for which there are too many. Pure."""

from __future__ import annotations

import math
from typing import Final

from netstorm.protocol.messages import Hello
from netstorm.pslite.van.interface import Connection

__all__ = ["NewSessions", "PendingHellos"]

_RETRY_S: Final = 0.05
"""How often the machine is asked again: it is about to learn who its peers are."""

_MOST_NUMBERS: Final = 100_000
"""Sequence numbers, and characters of jobs' names, in all pending Hellos together: of strangers nobody knows
how much they say."""

_AT_ONCE: Final = 1024
"""Sessions that may begin at once: a whole large job connects when it starts."""

_A_SECOND: Final = 256.0
"""Sessions that may begin in each second after that. Whoever begins one after the other, which without a key
everybody can, takes no more than 2 % of a core with it."""


class NewSessions:
    """How many sessions may begin now (a token bucket). Those that go on are not counted."""

    def __init__(self) -> None:
        self._left = float(_AT_ONCE)
        self._at = -math.inf

    def take(self, now: float) -> bool:
        """Return whether one more may begin; if so, it counts."""
        if self._at > -math.inf:
            self._left = min(float(_AT_ONCE), self._left + max(0.0, now - self._at) * _A_SECOND)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class PendingHellos:
    """A bounded number of connections, each with its Hello.

    Attributes:
        retry_at: when to ask the machine again; infinite if nothing is pending.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity: Final = capacity
        self._pending: dict[Connection, tuple[Hello, str]] = {}
        self.retry_at = math.inf

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, connection: Connection, hello: Hello, now: float, user: str = "") -> None:
        """Keep a Hello, and whose key its sender has. It replaces an older one of the same session, and the
        oldest of all if there is no room.
        """
        for other, (pending, _) in list(self._pending.items()):
            if (pending.incarnation, pending.session) == (hello.incarnation, hello.session):
                del self._pending[other]
        self._pending.pop(connection, None)
        numbers = _size(hello) + sum(_size(pending) for pending, _ in self._pending.values())
        while self._pending and (len(self._pending) >= self._capacity or numbers > _MOST_NUMBERS):
            numbers -= _size(self._pending.pop(next(iter(self._pending)))[0])
        self._pending[connection] = (hello, user)
        self.retry_at = min(self.retry_at, now + _RETRY_S)

    def take_all(self) -> list[tuple[Connection, Hello, str]]:
        """Return all pending Hellos in order, and forget them; what is still undecided is added again."""
        taken = [(connection, *pending) for connection, pending in self._pending.items()]
        self._pending.clear()
        self.retry_at = math.inf
        return taken


def _size(hello: Hello) -> int:
    return len(hello.beyond) + len(hello.job)
