"""What a machine may know about its outgoing links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from netstorm.protocol.frames import Peer

__all__ = ["Dispatcher", "LinkState", "Links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """The present state of a link, as its sender sees it."""

    messages: int = 0
    """Messages that are queued or in flight."""
    bytes: int = 0
    """Their size."""
    window: int = 0
    """Bytes that may be in flight."""
    rate: float = 0.0
    """Bytes/s that it has delivered lately while it was busy; 0: unknown."""
    latency_s: float = 0.0
    """One way, by the shortest round trip; 0: unknown."""


Links: TypeAlias = Callable[[Peer], LinkState]
"""Returns the state of the link to a peer."""


@runtime_checkable
class Dispatcher(Protocol):
    """A machine that decides as late as possible which link a message takes."""

    def dispatch(self, links: Links, now: float) -> bool:
        """Decide, given the links; return whether `take_instructions` may return something.

        Called after anything has arrived, also acknowledgements, once all earlier instructions are carried
        out.
        """
