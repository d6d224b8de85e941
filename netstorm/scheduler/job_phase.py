"""The phases of a job, and its outcome."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from netstorm.protocol.messages import PeerGone

__all__ = ["NOBODY_JOINED", "Outcome", "Phase"]

NOBODY_JOINED: Final = 78
"""Exit code of a job that no process has joined: sysexits.h calls it EX_CONFIG."""

_NOBODY_JOINED: Final = (
    "no process has joined the job: the script makes no NetStorm group or store. Write "
    'init_process_group("netstorm") (PyTorch) or mx.kv.create("netstorm") (MXNet), or start it unedited with '
    "python -m netstorm.run"
)


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
            nothing = "" if keys else ", so nobody has summed anything over NetStorm"
            return cls(0, f"job {job!r} has ended well: {nodes} nodes, {keys} keys{nothing}")
        return cls(1, f"job {job!r} has failed: {failure.reason}", failure.rank)

    @classmethod
    def nobody_joined(cls, job: str) -> Outcome:
        """Return the outcome of a job whose processes have all ended, and none had asked to join."""
        return cls(NOBODY_JOINED, f"job {job!r} has failed: {_NOBODY_JOINED}")
