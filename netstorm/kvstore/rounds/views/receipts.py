"""Up to which round silent members have all results: until then the others keep them. Pure.

A silent member contributes nothing, so that nothing waits for it. But nothing that others send up the trees
says what it has, either. So it tells them. What it has said counts until it is among the contributors of
results, which then say so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

__all__ = ["Receipts"]


class Receipts:
    """What the silent members of one job have."""

    def __init__(self) -> None:
        self._of: Final[dict[int, dict[int, int]]] = {}
        """By rank that is or was silent, and key: the round up to which it has all results."""

    def set_members(self, members: Collection[int], silent: Iterable[int]) -> None:
        """Record who is in the job, and which of them are silent."""
        for rank in self._of.keys() - set(members):
            del self._of[rank]
        for rank in silent:
            self._of.setdefault(rank, {})

    def record(self, rank: int, rounds: Mapping[int, int]) -> None:
        """Record what a silent member says that it has; of other ranks, nothing is recorded."""
        known = self._of.get(rank)
        if known is not None:
            known.update(rounds)

    def forget(self, rank: int) -> None:
        """Record that a rank has nothing: it is another process now."""
        if rank in self._of:
            self._of[rank] = {}

    def limit(self, key: int, contributors: int) -> float:
        """Return the round of a key up to which all have all results that are or were silent, but those among
        the contributors (a bit set); inf: there are none.
        """
        return min(
            (rounds.get(key, -1) for rank, rounds in self._of.items() if not contributors >> rank & 1),
            default=math.inf,
        )
