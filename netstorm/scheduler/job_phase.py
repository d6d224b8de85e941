"""The phases of a job, and its outcome."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from netstorm.protocol.messages import PeerGone

__all__ = ["Outcome", "Phase"]


class Phase(enum.Enum):
    """Where a job is in its life, as its scheduler sees it."""

    GATHERING = "gathering"
    """Some nodes have not joined yet."""
    RUNNING = "running"
    """All nodes have joined, and some will push more."""
    FINISHED = "finished"
    """No node will push any more; nodes are leaving."""
    FAILED = "failed"
    """Nodes are told why, and are leaving."""
    OVER = "over"
    """The scheduler's process may end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job went."""

    exit_code: int
    text: str
    rank: int = -1
    """The rank whose end made the job fail; -1: none."""

    @classmethod
    def of(cls, job: str, failure: PeerGone | None, *, nodes: int, keys: int) -> Outcome:
        """Return the outcome of a job. `failure`: why it failed; None if it did not."""
        if failure is None:
            return cls(0, f"job {job!r} has ended well: {nodes} nodes, {keys} keys")
        return cls(1, f"job {job!r} has failed: {failure.reason}", failure.rank)
