"""Rounds shares to whole chunks: a slow link that gets 4 chunks instead of 3.4 delays all others."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.topology.trees.resources import Floats

__all__ = ["whole_chunks"]

_SHARPNESS: Final = 80.0
"""Sharpness of the soft maximum: how much more the most loaded resource counts than the next."""

_PASSES: Final = 6

_WORK: Final = 20_000_000
"""Trees x trees x resources of all passes: some tenths of a second."""


def whole_chunks(loads: Floats, delays: Floats, shares: Floats, chunks: int) -> npt.NDArray[np.intp]:
    """Return (T,) how many chunks each tree gets, near its share, so that no resource gets one too many.

    Begins with what the shares give in whole numbers, adds the rest one by one where they cost least, then
    moves single chunks while that helps. The cost is the load of the most loaded resource, softened so that
    the next ones count as well, plus the mean delay of the trees. O(T² · R).

    Args:
        loads: (T, R) seconds that the whole tensor takes on a resource when a tree carries all of it.
        delays: (T,) s, of a chunk in a tree.
        shares: (T,) adding up to 1.
        chunks: how many the tensor has.
    """
    each = loads / chunks
    softness = max(float((shares @ loads).max()), float(each.max())) / _SHARPNESS
    # The soft maximum of total + each, by tree, is a product of what each and what total contribute.
    steps = np.exp((each - each.max()) / softness)

    def cheapest(total: Floats) -> int:
        """Return the tree on which one more chunk costs least."""
        highest = np.log(steps @ np.exp((total - total.max()) / softness))
        return int((softness * highest + delays / chunks).argmin())

    counts = np.floor(shares * chunks + 1e-9).astype(np.intp)
    total = counts @ each
    for _ in range(chunks - int(counts.sum())):
        best = cheapest(total)
        counts[best] += 1
        total = total + each[best]
    for _ in range(min(_PASSES, _WORK // (len(loads) * loads.size))):
        moved = False
        for tree in np.flatnonzero(counts):
            without = total - each[tree]
            best = cheapest(without)
            if best != tree:
                counts[tree] -= 1
                counts[best] += 1
                total = without + each[best]
                moved = True
        if not moved:
            break
    return np.asarray(counts, np.intp)
