"""The interface by which an endpoint reports its traffic for passive measurement."""

from __future__ import annotations

from typing import Protocol

from netstorm.protocol.frames import Peer

__all__ = ["TrafficObserver"]


class TrafficObserver(Protocol):
    """Called by an endpoint for messages that arrive or are acknowledged. Times in ns are on the cluster
    clock.
    """

    @property
    def may_contend(self) -> bool:
        """Whether links out of this node may slow one another."""

    def resumed(self, missed_s: float) -> None:
        """Learn that this process did not run for a while, which its local clock does not count."""

    def arrived(
        self, peer: Peer, size: int, sent_at: int, arrived_at: int, *, resent: bool, contended: bool
    ) -> None:
        """Record a data message.

        Args:
            peer: its sender.
            size: bytes.
            sent_at: when the sender handed it over, in ns.
            arrived_at: when it arrived, in ns.
            resent: it was sent before, and measures nothing.
            contended: other links out of its sender were busy.
        """

    def control_arrived(self, peer: Peer, sent_at: int, arrived_at: int) -> None:
        """Record an acknowledgement or another small message of a session; times in ns."""

    def acknowledged(
        self, peer: Peer, size: int, sent: float, heard: float, stamped_at: int, *, resent: bool
    ) -> None:
        """Record the acknowledgement of a data message.

        Args:
            peer: its receiver.
            size: bytes.
            sent: when it was handed over, in s on the local clock.
            heard: when the acknowledgement arrived, in s on the local clock.
            stamped_at: when the receiver sent the acknowledgement, in ns on the cluster clock.
            resent: it was transmitted more than once; which transmission was acknowledged is unknown.
        """
