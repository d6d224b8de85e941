"""The instructions of a node, in order, until its driver takes them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from netstorm.kvstore.operations.allreduce import Done
from netstorm.protocol import messages as m
from netstorm.protocol.ids import SCHEDULER
from netstorm.pslite.machine import Call, Instruction, Send

__all__ = ["Outbox"]


class Outbox:
    """The instructions of one node."""

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []

    def add(self, *instructions: Instruction) -> None:
        """Queue instructions."""
        self._instructions += instructions

    def add_all(self, instructions: Iterable[Instruction]) -> None:
        """Queue instructions."""
        self._instructions += instructions

    def send_to_scheduler(self, message: m.Message) -> None:
        """Send a message to the scheduler."""
        self._instructions.append(Send(peer=SCHEDULER, message=message))

    def complete(self, done: Done, error: Exception | None) -> None:
        """Have `done` called, with the error if there is one."""
        self._instructions.append(Call(function=lambda: done(error)))

    def complete_all(self, waiting: list[Done], error: Exception | None) -> None:
        """Have each of `waiting` called, and clear the list."""
        for done in waiting:
            self.complete(done, error)
        waiting.clear()

    def take(self) -> list[Instruction]:
        """Return all instructions, and begin with an empty list."""
        taken, self._instructions = self._instructions, []
        return taken
