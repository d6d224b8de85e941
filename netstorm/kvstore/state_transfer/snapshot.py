"""The state of a rank's program before one of its steps, as bytes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from netstorm.protocol.frames import Buffer

__all__ = ["PIECE_BYTES", "Snapshot", "pieces_in"]

PIECE_BYTES = 262_144
"""Bytes of a piece: as those of a chunk, so that rounds wait for no more than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a newcomer needs to go on from a step as this rank does. It must not change any more."""

    step: int
    """Counts the steps of the program: the same at all ranks."""
    content: Buffer
    crc: int
    """CRC-32C of the content."""
    rounds: Mapping[int, int] = field(default_factory=dict)
    """By key: the first round of the step."""
    barriers: int = 0
    """How many barriers come before the step."""
    requests: frozenset[int] | None = None
    """Numbers of the requests that it answers (`Providing.requests`): those that there were before it was
    made. None: it is the last one, at the end of the program, and answers all, also those that come later."""

    def piece(self, number: int) -> Buffer:
        """Return a piece of the content."""
        return memoryview(self.content)[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]

    @property
    def nbytes(self) -> int:
        """Size of the content."""
        return memoryview(self.content).nbytes


def pieces_in(nbytes: int) -> int:
    """Return the number of pieces of so many bytes."""
    return -(-nbytes // PIECE_BYTES)
