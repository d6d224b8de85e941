"""Which chunks matter: DGT's ranking (Zhou et al., FGCS 121, 2021), by results. Pure.

DGT ranks the blocks of each sender by a moving mean of their absolute values. Trees add blocks of all ranks,
so all ranks must send the same chunks first: they are ranked by their sums, which are the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["Importance"]

_NEWEST: Final = 0.3
"""Weight of the newest result in the mean. GeoMX's default (DGT_CONTRIBUTION_ALPHA)."""


class Importance:
    """The means of all chunks of all keys of one node."""

    def __init__(self) -> None:
        self._means: Final[dict[int, npt.NDArray[np.float64]]] = {}
        """By key; NaN: not known."""

    def record(self, key: int, chunk: int, chunks: int, mean: float) -> None:
        """Record the mean absolute value of a chunk's result, of a key with so many chunks."""
        means = self._means.get(key)
        if means is None or len(means) != chunks:
            means = self._means[key] = np.full(chunks, np.nan)
        known = means[chunk]
        means[chunk] = mean if math.isnan(known) else (1 - _NEWEST) * known + _NEWEST * mean

    def order(self, key: int, chunks: int) -> list[int] | None:
        """Return the places of a key's chunks, the most important first; None: not all are known."""
        means = self._means.get(key)
        if means is None or len(means) != chunks or not np.isfinite(means).all():
            return None
        places = np.empty(chunks, np.int64)
        places[np.argsort(-means, kind="stable")] = np.arange(chunks)
        found: list[int] = places.tolist()
        return found

    def chosen(self, keys: Iterable[int], fraction: float) -> set[tuple[int, int]] | None:
        """Return which chunks of a step are the most important ones, as (key, chunk); None: all are, since
        not all means are known. Of equal chunks, the first ones are.

        Args:
            keys: of the step.
            fraction: of their chunks that are important.
        """
        if not fraction:
            return set()
        places: list[tuple[int, int]] = []
        known = []
        for key in keys:
            means = self._means.get(key)
            if means is None or not np.isfinite(means).all():
                return None
            known.append(means)
            places.extend((key, chunk) for chunk in range(len(means)))
        order = np.argsort(-np.concatenate(known), kind="stable") if known else np.empty(0, np.int64)
        return {places[place] for place in order[: math.ceil(fraction * len(places))]}

    def clear(self) -> None:
        """Forget everything."""
        self._means.clear()
