"""What the scheduler's state machines want done, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Message
from netstorm.pslite.machine import Instruction, Send
from netstorm.scheduler.log.records import Record

__all__ = ["Outbox"]


class Outbox:
    """Instructions on their way to the endpoint, and what must be written down before they may leave."""

    def __init__(self, write: Callable[[list[Record]], None] | None = None) -> None:
        """Begin empty; `write` gets the records, before the instructions that follow from them are taken."""
        self._instructions: list[Instruction] = []
        self._records: list[Record] = []
        self._write: Final = write

    @property
    def keeps_log(self) -> bool:
        """Whether anything is written down."""
        return self._write is not None

    def note(self, record: Record | None) -> None:
        """Have something written down."""
        if self._write is not None and record is not None:
            self._records.append(record)

    def tell(self, peers: Iterable[Peer], message: Message) -> None:
        """Send the same message to each of `peers`."""
        self._instructions += [Send(peer=peer, message=message) for peer in peers]

    def add(self, instruction: Instruction) -> None:
        """Append one instruction."""
        self._instructions.append(instruction)

    def take(self) -> list[Instruction]:
        """Return all of them, and forget them."""
        if self._records and self._write is not None:
            records, self._records = self._records, []
            self._write(records)
        taken, self._instructions = self._instructions, []
        return taken
