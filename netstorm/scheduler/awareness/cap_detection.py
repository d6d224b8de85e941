"""Whether the links at an access line share a cap, and which: from what they carried together. Pure.

Behind a shared line the total keeps to a ceiling while the links trade throughput: TCP's flows are never
equally fast for long, and what one loses the others gain. So a line has a cap if its total is often near its
highest, and what each link carried at these times still differs clearly.

The difference has a median of 1 to 3 % of the total where nothing is shared, also while links change, and of
4 to 14 % behind most lines that were the limit. All thresholds: docs/measurements/awareness.md, "Access caps
by what all links carry".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["CONTENDED", "UNCONTENDED", "CapRule", "LineTotal", "ceiling_of"]

_PERCENTILE: Final = 0.9
"""Of the totals: the ceiling. Higher totals were delivered earlier and acknowledged late."""

_NEAR: Final = 0.05
"""Totals within that part of the ceiling are at it."""

_LEAST: Final = 6
"""Least number of half seconds at the ceiling, and of pairs of them."""

_MOST: Final = 40
"""Half seconds at the ceiling that are compared, the newest ones: bounds the cost of O(N²) pairs."""

_SOON_S: Final = 8.0
"""Half seconds further apart are not compared, since links change."""


class CapRule(NamedTuple):
    """When a ceiling is a cap."""

    often: float
    """Least part of the half seconds that are at the ceiling."""
    traded: float
    """Least part of the total that links have won or lost between two of them, in the median."""


UNCONTENDED: Final = CapRule(0.25, 0.04)
"""In a network that is not known to be contended: named no cap in four jobs on links that change."""

CONTENDED: Final = CapRule(0.15, 0.03)
"""In a contended network: named seven of twelve lines in one recorded job."""


class LineTotal(NamedTuple):
    """What a line carried in a half second in which some of its links had more to send."""

    at: float
    total: float
    """Bit/s."""
    rates: dict[int, float]
    """Bit/s of those links, by the rank at the other end."""


def ceiling_of(totals: Iterable[LineTotal], rule: CapRule) -> float:
    """Return the cap of a line, in bit/s; 0: it has none, or too little is known."""
    shared = [sample for sample in totals if len(sample.rates) > 1]
    if len(shared) < _LEAST:
        return 0.0
    ceiling = sorted(sample.total for sample in shared)[int(_PERCENTILE * (len(shared) - 1))]
    near = [sample for sample in shared if abs(sample.total - ceiling) <= _NEAR * ceiling]
    if len(near) < max(_LEAST, rule.often * len(shared)):
        return 0.0
    traded = _traded(near[-_MOST:])
    if len(traded) < _LEAST or float(np.median(traded)) < rule.traded * ceiling:
        return 0.0
    return math.fsum(sample.total for sample in near) / len(near)


def _traded(near: list[LineTotal]) -> npt.NDArray[np.float64]:
    """Return how much links have won or lost between two half seconds, in bit/s, for all pairs of them."""
    others = sorted({other for sample in near for other in sample.rates})
    rates = np.array([[sample.rates.get(other, np.nan) for other in others] for sample in near])
    at = np.array([sample.at for sample in near])
    first, second = np.triu_indices(len(near), 1)
    soon = at[second] - at[first] <= _SOON_S
    differences = np.abs(rates[first[soon]] - rates[second[soon]])
    known = np.isfinite(differences)
    traded: npt.NDArray[np.float64] = np.nansum(differences, axis=1)[known.sum(axis=1) > 1] / 2
    return traded
