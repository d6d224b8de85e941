"""What every scheme returns: trees with their shares."""

from __future__ import annotations

from dataclasses import dataclass

from netstorm.topology.policy import Policy, Tree
from netstorm.topology.schedule import quantise

__all__ = ["Forest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Trees over the same ranks, and which share of the bytes each gets."""

    trees: tuple[Tree, ...]
    shares: tuple[float, ...]
    """Positive, by tree; what counts is their proportion."""
    reason: str
    """How it came about, for a person."""
    whole: bool = False
    """Shares are whole numbers of chunks, and all of them together are what is sent at once."""
    leads: tuple[int, ...] = ()
    """Of whole shares; see `Policy`."""
    look_ahead: int = 0
    """Bytes; see `Policy`."""
    look_ahead_s: float = 0.0

    def policy(self, version: int) -> Policy:
        """Return the numbered policy, its shares in whole weights."""
        weights = tuple(map(int, self.shares)) if self.whole else quantise(self.shares)
        return Policy(
            version=version,
            trees=self.trees,
            weights=weights,
            reason=self.reason,
            look_ahead=self.look_ahead,
            look_ahead_s=self.look_ahead_s,
            leads=self.leads,
        )
