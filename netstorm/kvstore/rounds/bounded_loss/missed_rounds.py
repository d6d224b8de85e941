"""How often in a row ranks were missing from the results of each chunk. Pure.

What was not counted is added to a rank's next contribution, which is the larger the longer that goes on, and
the older. All nodes see all results, so whoever becomes a chunk's root knows.
"""

from __future__ import annotations

from typing import Final

from netstorm.protocol.ids import ranks_in

__all__ = ["MOST_MISSED", "MissedRounds"]

MOST_MISSED: Final = 4
"""Results in a row that a rank may be missing from. Its gradients are at most so many steps old, its program
is behind by a few steps more at most, and others keep results for it for as long."""


class MissedRounds:
    """The ranks that were missing from the last results, as one node has seen them."""

    def __init__(self) -> None:
        self._missed: Final[dict[tuple[int, int], dict[int, int]]] = {}
        """By key and chunk: results in a row without a rank. Most chunks have no entry."""

    def record(self, key: int, chunk: int, missing: int) -> None:
        """Record a result, in which some ranks (a bit set) are missing."""
        if not missing:
            self._missed.pop((key, chunk), None)
        else:
            known = self._missed.get((key, chunk), {})
            self._missed[key, chunk] = {rank: known.get(rank, 0) + 1 for rank in ranks_in(missing)}

    def may_miss(self, key: int, chunk: int, missing: int) -> bool:
        """Return whether all of some ranks (a bit set) may be missing from the next result."""
        known = self._missed.get((key, chunk))
        return known is None or all(known.get(rank, 0) < MOST_MISSED for rank in ranks_in(missing))

    def gradients(self, key: int, chunk: int, ranks: int) -> int:
        """Return how many gradients the next contributions of some ranks (a bit set) consist of."""
        known = self._missed.get((key, chunk))
        extra = 0 if known is None else sum(known.get(rank, 0) for rank in ranks_in(ranks))
        return ranks.bit_count() + extra

    def clear(self) -> None:
        """Forget everything."""
        self._missed.clear()
