"""Members whose processes have certainly ended: they need not be silent for long to be lost. Pure.

Two signs together are certain: the member's own connection to the scheduler is gone, and no process listens
at its address, as another member says who tried to connect, or the scheduler itself found.
"""

from __future__ import annotations

import math
from typing import Final

__all__ = ["EndedProcesses"]


class EndedProcesses:
    """The signs that processes of one job have ended."""

    def __init__(self, last_word_s: float) -> None:
        """Begin without any. `last_word_s`: how long a process that has ended is not lost yet, since somebody
        may still say why.
        """
        self._last_word_s: Final = last_word_s
        self._refused: Final[dict[int, str]] = {}
        """By rank at whose address no process listens: who says so."""
        self._disconnected: Final[set[int]] = set()
        """Ranks whose connection to the scheduler is gone."""
        self._lost_at: Final[dict[int, float]] = {}
        """By rank of which there are both signs."""

    def heard(self, rank: int) -> None:
        """Record a sign of life, or that the rank is not watched any more."""
        if self._disconnected or self._refused:
            self._disconnected.discard(rank)
            self._refused.pop(rank, None)
            self._lost_at.pop(rank, None)

    def refused(self, rank: int, text: str, now: float) -> None:
        """Record that no process listens at a rank's address, and who says so."""
        self._refused[rank] = text
        self._judge(rank, now)

    def disconnected(self, rank: int, now: float) -> None:
        """Record that a rank's connection to the scheduler is gone."""
        self._disconnected.add(rank)
        self._judge(rank, now)

    def next_due(self) -> float:
        """Return when `take` has something to return."""
        return min(self._lost_at.values(), default=math.inf)

    def take(self, now: float) -> tuple[int, str] | None:
        """Return a rank that has ended, and why that is certain, for a person. It is forgotten."""
        for rank, lost_at in self._lost_at.items():
            if now >= lost_at:
                text = f"its process has ended: its connections have ended, and {self._refused[rank]}"
                self.heard(rank)
                return rank, text
        return None

    def _judge(self, rank: int, now: float) -> None:
        if rank in self._disconnected and rank in self._refused:
            self._lost_at.setdefault(rank, now + self._last_word_s)
