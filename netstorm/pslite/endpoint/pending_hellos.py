"""Those who said Hello before this process could tell whether they are welcome. Pure."""

from __future__ import annotations

import math
from typing import Final

from netstorm.protocol.messages import Hello
from netstorm.pslite.van.interface import Connection

__all__ = ["PendingHellos"]

_ASK_AGAIN_S: Final = 0.05
"""How often the machine is asked again: it is about to learn who its peers are."""


class PendingHellos:
    """A bounded number of connections, each with its Hello."""

    def __init__(self, seats: int) -> None:
        self._seats: Final = seats
        self._waiting: dict[Connection, Hello] = {}
        self.ask_again_at = math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    def sit(self, connection: Connection, hello: Hello, now: float) -> None:
        """Let somebody wait; an older connection of the same session leaves, and the oldest of all if it is
        full.
        """
        for other, waiting in list(self._waiting.items()):
            if (waiting.incarnation, waiting.session) == (hello.incarnation, hello.session):
                del self._waiting[other]
        if len(self._waiting) >= self._seats:
            del self._waiting[next(iter(self._waiting))]
        self._waiting[connection] = hello
        self.ask_again_at = min(self.ask_again_at, now + _ASK_AGAIN_S)

    def call(self) -> list[tuple[Connection, Hello]]:
        """Take all who wait, in order; whoever must go on waiting sits down again."""
        called = list(self._waiting.items())
        self._waiting.clear()
        self.ask_again_at = math.inf
        return called
