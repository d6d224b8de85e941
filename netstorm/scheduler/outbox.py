"""What the scheduler's state machines want done, in order."""

from __future__ import annotations

from collections.abc import Iterable

from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Message
from netstorm.pslite.machine import Instruction, Send

__all__ = ["Outbox"]


class Outbox:
    """Instructions on their way to the endpoint."""

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []

    def tell(self, peers: Iterable[Peer], message: Message) -> None:
        """Send the same message to each of `peers`."""
        self._instructions += [Send(peer=peer, message=message) for peer in peers]

    def add(self, instruction: Instruction) -> None:
        """Append one instruction."""
        self._instructions.append(instruction)

    def take(self) -> list[Instruction]:
        """Return all of them, and forget them."""
        taken, self._instructions = self._instructions, []
        return taken
