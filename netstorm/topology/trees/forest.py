"""A forest: trees with their shares, which every scheme returns."""

from __future__ import annotations

from dataclasses import dataclass

from netstorm.topology.policy import Policy
from netstorm.topology.schedule import quantise
from netstorm.topology.tree import Tree

__all__ = ["Forest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Trees over the same ranks, and the share of the bytes of each."""

    trees: tuple[Tree, ...]
    shares: tuple[float, ...]
    """Positive, by tree; only their proportion counts."""
    reason: str
    """How it was formed, as text."""
    whole: bool = False
    """Shares are numbers of chunks, whose sum is the whole tensor."""
    leads: tuple[int, ...] = ()
    """Of whole shares; see `Policy.leads`."""
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
