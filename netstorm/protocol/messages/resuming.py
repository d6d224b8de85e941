"""A scheduler that comes back, and nodes that tell it what they had asked."""

from __future__ import annotations

from netstorm.protocol.messages.kinds import Message
from netstorm.protocol.messages.rounds import KeySpec, Moved, RoundBegun

__all__ = ["Resume", "Resumed"]


class Resume(Message, frozen=True, tag=98):
    """A node to a scheduler that has forgotten their session: all that may not have been answered."""

    keys: tuple[KeySpec, ...]
    """Asked for and not granted."""
    begun: tuple[RoundBegun, ...]
    """The last rounds that have begun here."""
    barriers: tuple[int, ...]
    """Numbers of those that this node waits at."""
    last_rounds: dict[int, int] | None = None
    """Of `Finished`, if the node has."""
    suspected: tuple[int, ...] = ()
    """Ranks that cannot be reached from here."""
    moved: tuple[Moved, ...] = ()
    """Chunks of open rounds that this node, their root, has given to a later policy."""


class Resumed(Message, frozen=True, tag=99):
    """The scheduler's answer to `Resume`; policies, and the answers to what was asked, come behind it."""
