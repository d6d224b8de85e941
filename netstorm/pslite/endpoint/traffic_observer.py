"""What an endpoint tells whoever measures its links."""

from __future__ import annotations

from typing import Protocol

from netstorm.protocol.ids import Peer

__all__ = ["TrafficObserver"]


class TrafficObserver(Protocol):
    """Told by an endpoint of what comes and goes. Times in ns are of the cluster clock."""

    @property
    def may_crowd(self) -> bool:
        """Whether links out of this node may slow one another."""

    def arrived(
        self, peer: Peer, size: int, sent_at: int, arrived_at: int, *, resent: bool, crowded: bool
    ) -> None:
        """Take note of a data message.

        Args:
            peer: its sender.
            size: bytes.
            sent_at: when it was handed over.
            arrived_at: when it was here.
            resent: it was sent before, and measures nothing.
            crowded: other links out of its sender were busy.
        """

    def signalled(self, peer: Peer, sent_at: int, arrived_at: int) -> None:
        """Take note of an acknowledgement or another small message of a session."""

    def acknowledged(
        self, peer: Peer, size: int, sent: float, heard: float, stamped_at: int, *, resent: bool
    ) -> None:
        """Take note of the acknowledgement of a data message.

        Args:
            peer: its receiver.
            size: bytes.
            sent: when it was handed over, and `heard`: when the acknowledgement was, in s of the local clock.
            heard: see there.
            stamped_at: when the receiver sent the acknowledgement.
            resent: which of several transmissions it is about is not known.
        """
