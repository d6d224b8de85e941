"""What this process tells its peers about itself, and how it names them in messages for people. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from netstorm.protocol.frames import SCHEDULER, UNKNOWN, Peer

__all__ = ["LocalProcess"]


@dataclass(slots=True, kw_only=True)
class LocalProcess:
    """The process that an endpoint belongs to."""

    job: str
    """Name of the job."""
    incarnation: int
    """Random number of this process."""
    rank: int = -1
    """-1: the scheduler, or a node that has no rank yet."""
    boot: int = 0
    """Number of the boot of its machine: processes of one boot are on one machine, and payloads between them
    need no checksums. 0: payloads are always checked."""

    def name_of(self, peer: Peer) -> str:
        """Return how messages for people call a peer. The scheduler numbers its peers as they arrive."""
        if peer == SCHEDULER:
            return "the scheduler"
        if peer <= UNKNOWN:
            return f"peer {UNKNOWN - peer}" if self.rank < 0 else "a scheduler that takes over"
        return f"process {peer}" if self.rank < 0 else f"rank {peer}"
