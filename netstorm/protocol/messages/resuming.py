"""How nodes continue with a restarted scheduler: they repeat what it may not have answered."""

from __future__ import annotations

from netstorm.protocol.messages.kinds import Message
from netstorm.protocol.messages.rounds import KeySpec, Moved, RoundBegun

__all__ = ["Resume", "Resumed"]


class Resume(Message, frozen=True, tag=98):
    """A node to a scheduler that no longer knows its session: everything that may not have been answered."""

    keys: tuple[KeySpec, ...]
    """Requested and not granted."""
    begun: tuple[RoundBegun, ...]
    """The newest rounds that have begun here."""
    barriers: tuple[int, ...]
    """Numbers of the barriers that this node waits at."""
    last_rounds: dict[int, int] | None = None
    """As in `Finished`; None: the node has not finished."""
    suspected: tuple[int, ...] = ()
    """Ranks that this node cannot reach."""
    moved: tuple[Moved, ...] = ()
    """Chunks of open rounds that this node, their root, has given to a later policy."""


class Resumed(Message, frozen=True, tag=99):
    """The scheduler's answer to `Resume`; policies and the answers to the requests follow."""
