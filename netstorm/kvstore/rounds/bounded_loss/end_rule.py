"""When a root may end chunks without some contributions: what is missing is a small share of all. Pure.

What counts are a step's own gradients: those of earlier steps, which a contribution may contain, were counted
as late before. How large a gradient is that has not come is not known. It is taken to be as large as those of
the same chunk that have come, on average; and if those are zeros, as those of the whole step for as many
elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Ended", "OpenChunk", "all_ended"]


@dataclass(frozen=True, slots=True)
class OpenChunk:
    """A chunk whose sum is not complete."""

    elements: int
    arrived: int
    """How many ranks are in the sum."""
    gradients: int
    """How many gradients their contributions consist of, those of earlier steps included."""
    missing: int
    """How many ranks are not in it."""
    mass: float
    """How large the contributions in the sum are: the sum of their absolute values."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Chunks that have been ended, or could be."""

    mass: float = 0.0
    """Of the step's gradients in them, those that are missing included."""
    lost: float = 0.0
    """Of those that are missing."""

    def __add__(self, other: Ended) -> Ended:
        """Return both together."""
        return Ended(self.mass + other.mass, self.lost + other.lost)

    @property
    def share(self) -> float:
        """The share that is missing; NaN: it is not known, which is within no bound."""
        return self.lost / self.mass if self.mass > 0 and math.isfinite(self.mass) else math.nan


def all_ended(chunks: Iterable[OpenChunk]) -> list[Ended]:
    """Return what each of some chunks would count, if it ended now."""
    chunks = list(chunks)
    weight = sum(chunk.gradients * chunk.elements for chunk in chunks)
    usual = sum(chunk.mass for chunk in chunks) / weight if weight else math.nan
    ended = []
    for chunk in chunks:
        known = chunk.gradients and chunk.mass
        mean = chunk.mass / chunk.gradients if known else chunk.elements * usual
        lost = chunk.missing * mean if chunk.missing else 0.0
        ended.append(Ended((chunk.arrived * mean if known else chunk.mass) + lost, lost))
    return ended
