"""What a machine may know of the links that leave it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from netstorm.protocol.ids import Peer

__all__ = ["Dispatcher", "LinkState", "Links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """A link as its sender sees it now."""

    messages: int = 0
    """Handed to the endpoint and not acknowledged: queued or in flight."""
    bytes: int = 0
    """Of those messages."""
    window: int = 0
    """Bytes that may be in flight."""
    rate: float = 0.0
    """Bytes/s that it delivers of late while it is busy; 0: not known."""
    latency_s: float = 0.0
    """One way, as far as the shortest round trip tells; 0 while not known."""


Links: TypeAlias = Callable[[Peer], LinkState]
"""Looks at the link to a peer."""


@runtime_checkable
class Dispatcher(Protocol):
    """A machine that decides as late as it can which link a message takes."""

    def dispatch(self, links: Links, now: float) -> bool:
        """Look at links and decide; return whether `take_instructions` may have something. Called whenever
        something has come, acknowledgements too, and all instructions so far are carried out.
        """
