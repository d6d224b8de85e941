"""A message from one rank's program to another's: the send and the receive. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.kvstore.operations.allreduce import Done

__all__ = ["ANY_PEER", "Bytes", "PointToPointOperation", "ReceiveOperation", "SendOperation"]

ANY_PEER: Final = -1
"""As the peer of a receive: whichever rank's message comes first."""

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(slots=True, kw_only=True, eq=False)
class SendOperation:
    """Send `source` to rank `peer`.

    The messages of one sender with one channel and tag match receives in the order in which both were
    submitted. `source` is flat and contiguous. It must stay valid and unchanged until `done` is called. For a
    small message (256 KiB) that is at once: it is copied. For a large one, the receiver has it then.
    """

    peer: int
    """Rank in the job."""
    channel: str
    """Name of the process group."""
    tag: int
    source: Bytes
    what: str
    """Describes the values, for error messages: type and shape."""
    done: Done
    refused: Done | None = None
    """Called, after `done`, with the error if the receiver turns out to expect another size, or to have
    finished. Only for small messages: a large one's `done` says so. None: the error is logged.
    """
    begun_at: float = 0.0

    @property
    def name(self) -> str:
        """What the trace shows."""
        return f"send to rank {self.peer}"

    @property
    def round(self) -> int:
        """Its tag, which the trace shows."""
        return self.tag

    def __str__(self) -> str:
        """Return what it waits for, as error messages say it."""
        return f"rank {self.peer} to receive a message (tag {self.tag}, {self.what})"


@dataclass(slots=True, kw_only=True, eq=False)
class ReceiveOperation:
    """Receive a message of exactly the size of `destination`, flat and contiguous, from rank `peer`.

    Only the node may use `destination` until `done` is called.
    """

    peer: int
    """Rank in the job, or `ANY_PEER`."""
    channel: str
    tag: int
    destination: Bytes
    what: str
    done: Done
    peers: tuple[int, ...] = ()
    """For `ANY_PEER`: the ranks whose messages it takes; empty: all."""
    source: int = -1
    """The rank that the message came from, once it has come."""
    begun_at: float = 0.0

    def takes(self, rank: int) -> bool:
        """Return whether it takes messages of a rank."""
        return rank == self.peer or (self.peer == ANY_PEER and (not self.peers or rank in self.peers))

    @property
    def name(self) -> str:
        """What the trace shows."""
        return f"receive from {self._origin}"

    @property
    def round(self) -> int:
        """Its tag, which the trace shows."""
        return self.tag

    def __str__(self) -> str:
        """Return what it waits for, as error messages say it."""
        return f"a message from {self._origin} (tag {self.tag}, {self.what})"

    @property
    def _origin(self) -> str:
        if self.peer != ANY_PEER:
            return f"rank {self.peer}"
        return f"any of ranks {list(self.peers)}" if self.peers else "any rank"


PointToPointOperation: TypeAlias = SendOperation | ReceiveOperation
