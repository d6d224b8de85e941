"""Where a job is in its life, and how it came out."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from netstorm.protocol.messages import PeerGone

__all__ = ["FAREWELL_S", "Outcome", "Phase"]

FAREWELL_S: Final = 5.0
"""How long the scheduler of a failed job stays, so that every node hears why."""


class Phase(enum.Enum):
    """Where a job is in its life, as its scheduler sees it."""

    GATHERING = "gathering"
    """Not all nodes are here."""
    RUNNING = "running"
    """All are, and some will push more."""
    FINISHED = "finished"
    """Nobody will push any more; nodes are leaving."""
    FAILED = "failed"
    """Nodes are told why, and are leaving."""
    OVER = "over"
    """The scheduler's process may end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it went."""

    exit_code: int
    text: str
    rank: int = -1
    """Whose end was the first, if the job has failed for that; -1: nobody's."""

    @classmethod
    def of(cls, job: str, failure: PeerGone | None, *, nodes: int, keys: int) -> Outcome:
        """Say how a job went; `failure`: why it could not go on, if so."""
        if failure is None:
            return cls(0, f"job {job!r} has ended well: {nodes} nodes, {keys} keys")
        return cls(1, f"job {job!r} has failed: {failure.reason}", failure.rank)
