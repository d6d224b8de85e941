"""What one node knows of a round that may end without some contributions. Pure.

A sum that has gone up without some of its subtree is followed by what comes later, in parts of their own. All
that is counted here belongs to a policy: if a chunk moves to another one, its sum begins anew.
"""

from __future__ import annotations

from typing import Final

import msgspec

from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import LossTerms

__all__ = ["RoundLoss"]


class RoundLoss:
    """The state of one round at one node.

    Attributes:
        terms: what may be missing, and from when on.
        passes_on: an inner node passes on what comes from now on, complete or not.
        overdue: the deadline is over: the root may end the round.
        early: results that came before this rank's operation, by chunk, with their contributors.
        offsets: by chunk: its place on links, if that is not the place of its elements.
    """

    __slots__ = ("_masses", "_passed", "early", "offsets", "overdue", "passes_on", "terms")

    def __init__(self, terms: LossTerms) -> None:
        self.terms: Final = terms
        self.passes_on = False
        self.overdue = False
        self.early: Final[dict[int, tuple[Buffer | None, int]]] = {}
        self.offsets: list[int] | None = None
        self._passed: Final[dict[int, tuple[int, int]]] = {}
        self._masses: Final[dict[int, tuple[int, float]]] = {}

    def passed(self, chunk: int, version: int) -> int:
        """Return the bit set of the ranks whose contributions have gone up by a policy, without the others of
        this subtree.
        """
        known, contributors = self._passed.get(chunk, (version, 0))
        return contributors if known == version else 0

    def record_passed(self, chunk: int, version: int, contributors: int) -> None:
        """Record that an incomplete sum has gone up; what comes next is another part."""
        self._passed[chunk] = version, self.passed(chunk, version) | contributors
        self._masses.pop(chunk, None)

    def add_mass(self, chunk: int, version: int, mass: float) -> None:
        """Record how large a contribution, or several, is that is added to a sum by a policy."""
        self._masses[chunk] = version, self.mass(chunk, version) + mass

    def mass(self, chunk: int, version: int) -> float:
        """Return how large the contributions in a sum are together."""
        known, mass = self._masses.get(chunk, (version, 0.0))
        return mass if known == version else 0.0

    def terms_of(self, chunk: int, version: int) -> LossTerms:
        """Return the terms as the part with the sum of a chunk carries them."""
        return msgspec.structs.replace(self.terms, mass=self.mass(chunk, version))
