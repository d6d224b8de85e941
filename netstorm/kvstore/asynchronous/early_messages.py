"""Messages for keys that this rank's script has not initialised yet. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from netstorm.errors import ProtocolViolation
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import CopyMessage, Pull, PullRows, PullStates, Push

__all__ = ["EarlyMessage", "EarlyMessages", "ToOwner"]

_log = logging.getLogger(__name__)

_MOST: Final = 100_000
"""Some for each chunk of a large model."""

ToOwner: TypeAlias = Push | Pull | PullRows | PullStates | CopyMessage

EarlyMessage: TypeAlias = tuple[int, ToOwner, Buffer | None]
"""The sender's rank, the message, and its payload."""


class EarlyMessages:
    """The messages that wait, by key."""

    def __init__(self, counters: Counters, handle: Callable[[int, ToOwner, Buffer | None], None]) -> None:
        """Begin without any; `handle` handles one that need not wait any more."""
        self._counters: Final = counters
        self._handle: Final = handle
        self._waiting: Final[dict[int, list[EarlyMessage]]] = {}
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def keep(self, rank: int, message: ToOwner, payload: Buffer | None) -> None:
        """Keep a message until its key is served.

        Raises:
            ProtocolViolation: too many wait already.
        """
        if self._count >= _MOST:
            raise ProtocolViolation(
                f"rank {rank} asks for key {message.key}, which is not served yet, while {_MOST} messages "
                "wait for such keys"
            )
        self._count += 1
        self._waiting.setdefault(message.key, []).append((rank, message, payload))

    def release(self, key: int) -> None:
        """Handle the messages for a key, which is served now."""
        waiting = self._waiting.pop(key, [])
        self._count -= len(waiting)
        self.handle_all(waiting)

    def handle_all(self, messages: Iterable[EarlyMessage]) -> None:
        """Handle messages that have waited. What is wrong with one is its sender's fault, and no other's."""
        for rank, message, payload in messages:
            try:
                self._handle(rank, message, payload)
            except ProtocolViolation as error:
                self._counters.add("protocol_violations")
                _log.warning("dropped a message that rank %d sent early: %s", rank, error)

    def clear(self) -> None:
        """Drop all of them."""
        self._waiting.clear()
        self._count = 0
