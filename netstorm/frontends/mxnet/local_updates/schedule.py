"""After which steps values are averaged, and over which ranks. Pure but for what paces it."""

from __future__ import annotations

import enum
from typing import Final, Protocol

from netstorm.errors import UsageError

__all__ = ["Average", "Paced", "Pacer", "Periodic", "Schedule"]


class Average(enum.Enum):
    """What follows a step."""

    NONE = "none"
    SITE = "the site's average"
    ALL = "the average of all"


class Schedule(Protocol):
    """Decides step by step."""

    @property
    def fingerprint(self) -> str:
        """Names it, with what ranks must agree on."""

    @property
    def averages(self) -> int:
        """How many averages steps have been followed by, of a site or of all."""

    def next_step(self, *, hurries: bool = False) -> Average:
        """Begin a step of the optimizer, and return what follows it.

        Args:
            hurries: an average of all follows in any case. Those of the site that would have come before it
                are left out, and count as made.
        """

    def go_on_at(self, averages: int) -> None:
        """Go on behind so many averages, the last of which was one of all."""


class Periodic:
    """Averages within the site after every `k1` steps, and over all ranks at every `k2`-th of these times."""

    def __init__(self, name: str, *, k1: int, k2: int) -> None:
        """Begin before the first step; `name` is for messages.

        Raises:
            UsageError: a period below 1.
        """
        if k1 < 1 or k2 < 1:
            raise UsageError(f"{name}: k1={k1}, k2={k2}: expected periods of at least 1")
        self.fingerprint: Final = f"{name} k1={k1} k2={k2}"
        self._k1, self._k2 = k1, k2
        self._steps = 0

    @property
    def averages(self) -> int:
        """How many averages steps have been followed by."""
        return self._steps // self._k1

    def next_step(self, *, hurries: bool = False) -> Average:
        """Begin a step of the optimizer, and return what follows it."""
        period = self._k1 * self._k2
        self._steps += period - self._steps % period if hurries else 1
        if self._steps % self._k1:
            return Average.NONE
        return Average.SITE if self._steps % period else Average.ALL

    def go_on_at(self, averages: int) -> None:
        """Go on behind so many averages."""
        self._steps = averages * self._k1


class Pacer(Protocol):
    """Says how many steps a round has."""

    def steps(self) -> int:
        """Return the number of steps of the present round."""

    def round_ends(self, taken: int) -> None:
        """Hear that the last step of the round has begun, and how many it has."""


class Paced:
    """Averages over all ranks after as many steps as a pacer says."""

    def __init__(self, name: str, pacer: Pacer) -> None:
        """Begin before the first step."""
        self.fingerprint: Final = name
        self._pacer: Final = pacer
        self._done = 0
        self._averages = 0

    @property
    def averages(self) -> int:
        """How many averages steps have been followed by."""
        return self._averages

    def next_step(self, *, hurries: bool = False) -> Average:
        """Begin a step of the optimizer, and return what follows it. May wait for the pacer."""
        self._done += 1
        if not hurries and self._done < self._pacer.steps():
            return Average.NONE
        self._pacer.round_ends(self._done)
        self._done = 0
        self._averages += 1
        return Average.ALL

    def go_on_at(self, averages: int) -> None:
        """Go on behind so many averages."""
        self._averages, self._done = averages, 0
