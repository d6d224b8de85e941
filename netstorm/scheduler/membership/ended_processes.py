"""Members whose processes have certainly ended: they need not be silent for long to be lost. Pure.

Two signs together are certain: the member's own connection to the scheduler is gone, and no process listens
at its address, as another member says who tried to connect.
"""

from __future__ import annotations

from typing import Final

__all__ = ["EndedProcesses"]


class EndedProcesses:
    """The signs that processes of one job have ended."""

    def __init__(self) -> None:
        self._refused: Final[dict[int, str]] = {}
        """By rank at whose address no process listens, as another rank says: what it says."""
        self._disconnected: Final[set[int]] = set()
        """Ranks whose connection to the scheduler is gone."""

    def heard(self, rank: int) -> None:
        """Record a sign of life, or that the rank is not watched any more."""
        if self._disconnected or self._refused:
            self._disconnected.discard(rank)
            self._refused.pop(rank, None)

    def refused(self, rank: int, text: str) -> str:
        """Record that no process listens at a rank's address. Returns that it has ended, or nothing."""
        self._refused[rank] = text
        return self._ended(rank)

    def disconnected(self, rank: int) -> str:
        """Record that a rank's connection to the scheduler is gone. Returns that it has ended, or nothing."""
        self._disconnected.add(rank)
        return self._ended(rank)

    def _ended(self, rank: int) -> str:
        """Return, for a person, that a rank's process has ended; empty: that is not certain."""
        if rank not in self._disconnected or rank not in self._refused:
            return ""
        return f"its connections have ended, and {self._refused[rank]}"
