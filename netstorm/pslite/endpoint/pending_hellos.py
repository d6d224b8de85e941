"""Hellos that the machine cannot decide on yet. Pure."""

from __future__ import annotations

import math
from typing import Final

from netstorm.protocol.messages import Hello
from netstorm.pslite.van.interface import Connection

__all__ = ["PendingHellos"]

_RETRY_S: Final = 0.05
"""How often the machine is asked again: it is about to learn who its peers are."""


class PendingHellos:
    """A bounded number of connections, each with its Hello.

    Attributes:
        retry_at: when to ask the machine again; infinite if nothing is pending.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity: Final = capacity
        self._pending: dict[Connection, Hello] = {}
        self.retry_at = math.inf

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, connection: Connection, hello: Hello, now: float) -> None:
        """Keep a Hello. It replaces an older one of the same session, and the oldest of all if there is no
        room.
        """
        for other, pending in list(self._pending.items()):
            if (pending.incarnation, pending.session) == (hello.incarnation, hello.session):
                del self._pending[other]
        if len(self._pending) >= self._capacity:
            del self._pending[next(iter(self._pending))]
        self._pending[connection] = hello
        self.retry_at = min(self.retry_at, now + _RETRY_S)

    def take_all(self) -> list[tuple[Connection, Hello]]:
        """Return all pending Hellos in order, and forget them; what is still undecided is added again."""
        taken = list(self._pending.items())
        self._pending.clear()
        self.retry_at = math.inf
        return taken
