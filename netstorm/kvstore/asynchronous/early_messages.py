"""Messages for keys that this rank's script has not initialised yet. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from netstorm.errors import ProtocolViolation
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import CopyMessage, Pull, PullRows, PullStates, Push
from netstorm.pslite.waiting_bytes import Charge, WaitingBytes

__all__ = ["EarlyMessage", "EarlyMessages", "ToOwner"]

_log = logging.getLogger(__name__)

ToOwner: TypeAlias = Push | Pull | PullRows | PullStates | CopyMessage


@dataclass(frozen=True, slots=True)
class EarlyMessage:
    """A message that waits."""

    rank: int
    """Its sender."""
    message: ToOwner
    payload: Buffer | None
    charge: Charge


class EarlyMessages:
    """The messages that wait, by key. Their bytes are bounded (`pslite.waiting_bytes`)."""

    def __init__(
        self,
        counters: Counters,
        handle: Callable[[int, ToOwner, Buffer | None], None],
        waiting: WaitingBytes,
    ) -> None:
        """Begin without any.

        Args:
            counters: of the process.
            handle: handles one that need not wait any more.
            waiting: counts what waits.
        """
        self._counters: Final = counters
        self._handle: Final = handle
        self._bytes: Final = waiting
        self._waiting: Final[dict[int, list[EarlyMessage]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def charged(self, rank: int, message: ToOwner, payload: Buffer | None) -> EarlyMessage:
        """Return a message that is to wait, for this object or for a block.

        Raises:
            NoRoom: too much waits already.
        """
        size = 0 if payload is None else memoryview(payload).nbytes
        charge = self._bytes.take(size, _place(message.key), f"key {message.key}, which is not served yet")
        return EarlyMessage(rank, message, payload, charge)

    def keep(self, rank: int, message: ToOwner, payload: Buffer | None) -> None:
        """Keep a message until its key is served.

        Raises:
            NoRoom: too much waits already.
        """
        early = self.charged(rank, message, payload)
        self._waiting.setdefault(message.key, []).append(early)

    def release(self, key: int) -> None:
        """Handle the messages for a key, which is served now."""
        self.handle_all(key, self._waiting.pop(key, []))

    def handle_all(self, key: int, messages: Collection[EarlyMessage]) -> None:
        """Handle messages that have waited. What is wrong with one is its sender's fault, and no other's."""
        self.drop(key, messages)
        for early in messages:
            self._bytes.begin(early.charge.peer, again=True)
            try:
                self._handle(early.rank, early.message, early.payload)
            except ProtocolViolation as error:
                self._counters.add("protocol_violations")
                _log.warning("dropped a message that rank %d sent early: %s", early.rank, error)

    def drop(self, key: int, messages: Iterable[EarlyMessage]) -> None:
        """Drop messages for a key that have waited."""
        self._bytes.ready(_place(key))
        for early in messages:
            self._bytes.give_back(early.charge)

    def clear(self) -> None:
        """Drop all of them."""
        for key, messages in self._waiting.items():
            self.drop(key, messages)
        self._waiting.clear()
        self._bytes.all_ready()


def _place(key: int) -> tuple[str, int]:
    """Return the name of what messages for a key wait for."""
    return "owner", key
