"""What the scheduler's state machines want done, in order, and what has to be logged before that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import Message
from netstorm.pslite.machine import Instruction, Send
from netstorm.scheduler.replay_log.records import Record

__all__ = ["Outbox"]


class Outbox:
    """Instructions for the endpoint, and the log records that must be written before these may leave."""

    def __init__(self, write: Callable[[list[Record]], None] | None = None) -> None:
        """Begin empty.

        Args:
            write: writes records to the replay log, before the instructions that follow from them are taken.
                None: the job has no log.
        """
        self._instructions: list[Instruction] = []
        self._records: list[Record] = []
        self._write: Final = write

    @property
    def keeps_log(self) -> bool:
        """Whether records are written."""
        return self._write is not None

    def record(self, record: Record | None) -> None:
        """Add a record to the replay log, if there is one."""
        if self._write is not None and record is not None:
            self._records.append(record)

    def send(self, peers: Iterable[Peer], message: Message) -> None:
        """Send the same message to each of `peers`."""
        self._instructions += [Send(peer=peer, message=message) for peer in peers]

    def add(self, instruction: Instruction) -> None:
        """Append one instruction."""
        self._instructions.append(instruction)

    def take(self) -> list[Instruction]:
        """Write the records; then return all instructions, and forget them."""
        if self._records and self._write is not None:
            records, self._records = self._records, []
            self._write(records)
        taken, self._instructions = self._instructions, []
        return taken
