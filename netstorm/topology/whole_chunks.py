"""Shares in whole chunks: a slow link that should carry 3.4 chunks carries 3 or 4, and all else waits."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.topology.resources import Floats

__all__ = ["whole_chunks"]

_SHARPNESS: Final = 80.0
"""How much more the most loaded resource counts than the next."""

_PASSES: Final = 6

_WORK: Final = 20_000_000
"""Trees x trees x resources that passes may take in all: some tenths of a second."""


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
    counts = np.floor(shares * chunks + 1e-9).astype(np.intp)
    total = counts @ each
    for _ in range(chunks - int(counts.sum())):
        best = int(_costs(total, each, delays, chunks).argmin())
        counts[best] += 1
        total = total + each[best]
    for _ in range(min(_PASSES, _WORK // (len(loads) * loads.size))):
        moved = False
        for tree in np.flatnonzero(counts):
            without = total - each[tree]
            best = int(_costs(without, each, delays, chunks).argmin())
            if best != tree:
                counts[tree] -= 1
                counts[best] += 1
                total = without + each[best]
                moved = True
        if not moved:
            break
    return np.asarray(counts, np.intp)


def _costs(total: Floats, each: Floats, delays: Floats, chunks: int) -> Floats:
    """Return (T,) the seconds that one more chunk on a tree leads to."""
    after = total + each
    most = after.max()
    soft = np.log(np.exp(_SHARPNESS * (after / most - 1)).sum(axis=1)) / _SHARPNESS
    costs: Floats = most * (1 + soft) + delays / chunks
    return costs
