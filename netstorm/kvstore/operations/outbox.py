"""What a node wants done, in order, until its driver takes it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from netstorm.kvstore.operations.allreduce import Done
from netstorm.protocol import messages as m
from netstorm.protocol.ids import SCHEDULER
from netstorm.pslite.machine import Call, Instruction, Send

__all__ = ["Outbox"]


class Outbox:
    """Instructions of one node."""

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []

    def add(self, *instructions: Instruction) -> None:
        """Have these done."""
        self._instructions += instructions

    def add_all(self, instructions: Iterable[Instruction]) -> None:
        """Have these done."""
        self._instructions += instructions

    def tell(self, message: m.Message) -> None:
        """Send the scheduler a message."""
        self._instructions.append(Send(peer=SCHEDULER, message=message))

    def call(self, done: Done, error: Exception | None) -> None:
        """Have an operation's owner called."""
        self._instructions.append(Call(function=lambda: done(error)))

    def call_all(self, waiting: list[Done], error: Exception | None) -> None:
        """Have everybody who waits called, and forget them."""
        for done in waiting:
            self.call(done, error)
        waiting.clear()

    def take(self) -> list[Instruction]:
        """Return what there is, and begin anew."""
        taken, self._instructions = self._instructions, []
        return taken
