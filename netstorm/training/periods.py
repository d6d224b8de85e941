"""After which of its own steps a rank averages, and over whom: numbers of steps, and nothing else."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Protocol

from netstorm.errors import UsageError

__all__ = [
    "Average",
    "FragmentSchedule",
    "Paced",
    "Pacer",
    "Periodic",
    "Periods",
    "StepSchedule",
    "SyncSteps",
]


class Average(enum.Enum):
    """What follows a step."""

    NONE = "none"
    SITE = "the site's average"
    ALL = "the average of all"


class SyncSteps(Protocol):
    """Knows from a step's number, from 1, what follows it."""

    def next_all(self, step: int) -> int:
        """Return the first step from `step` on that an average of all ranks follows."""

    def ends(self, step: int) -> bool:
        """Return whether a period ends with `step`: all ranks have the same values then. 0: before the first
        step.
        """


@dataclass(frozen=True, slots=True)
class Periods:
    """The site's average after every `k1` steps, and that of all ranks at every `k2`-th of these times.

    Raises:
        UsageError: a period below 1.
    """

    k1: int
    k2: int = 1

    def __post_init__(self) -> None:
        if self.k1 < 1 or self.k2 < 1:
            raise UsageError(f"k1={self.k1}, k2={self.k2}: both must be at least 1")

    @classmethod
    def every(cls, sync_every: int) -> Periods:
        """Return those of averages of all alone.

        Raises:
            UsageError: it is below 1.
        """
        if sync_every < 1:
            raise UsageError(f"sync_every={sync_every}: it must be at least 1 step")
        return cls(sync_every)

    def after(self, step: int) -> Average:
        """Return what follows a step."""
        if step % self.k1:
            return Average.NONE
        return Average.SITE if step % (self.k1 * self.k2) else Average.ALL

    def next_all(self, step: int) -> int:
        """Return the first step from `step` on that an average of all ranks follows."""
        period = self.k1 * self.k2
        return -(-step // period) * period

    def ends(self, step: int) -> bool:
        """Return whether an average of all ranks follows `step`."""
        return self.after(step) is Average.ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentSchedule:
    """Every fragment once in `sync_every` steps, spread as evenly as whole steps allow.

    Of n fragments the i-th (from 0) is applied at step `sync_every * (i + 1) / n`, rounded up, and every
    `sync_every` steps after it (Streaming DiLoCo, arXiv 2501.18512, section 2.2). Its sum begins `delay`
    steps before. A sum that would begin before the first step is left out.

    Raises:
        UsageError: a number is outside its range.
    """

    fragments: int
    sync_every: int
    delay: int = 0

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise UsageError(f"sync_every={self.sync_every}: it must be at least 1 step")
        if not 0 <= self.delay < self.sync_every:
            raise UsageError(
                f"fragment_sync_delay={self.delay}: it must be from 0 to sync_every - 1 ="
                f" {self.sync_every - 1}, because a fragment's sum ends before its next one begins"
            )

    def begin_at(self, step: int) -> list[int]:
        """Return the fragments whose sums begin after inner step `step`, counted from 1."""
        return self.apply_at(step + self.delay)

    def apply_at(self, step: int) -> list[int]:
        """Return the fragments whose sums are applied after inner step `step`."""
        return [
            fragment
            for fragment in range(self.fragments)
            if step > self.delay and (step - self._place(fragment)) % self.sync_every == 0
        ]

    def next_all(self, step: int) -> int:
        """Return the first step from `step` on at which a fragment is applied."""
        while not self.apply_at(step):
            step += 1
        return step

    def ends(self, step: int) -> bool:
        """Return whether the last fragment is applied at `step`: nothing is under way if `delay` is 0."""
        return step % self.sync_every == 0

    def _place(self, fragment: int) -> int:
        return -(-self.sync_every * (fragment + 1) // self.fragments)


class StepSchedule(Protocol):
    """Decides step by step. Of what ranks that take different numbers of steps do, too."""

    @property
    def fingerprint(self) -> str:
        """Names it, with what ranks must agree on."""

    @property
    def averages(self) -> int:
        """How many averages steps have been followed by, of a site or of all."""

    @property
    def taken(self) -> int:
        """How many steps there have been since the last one."""

    def next_step(self, *, hurries: bool = False) -> Average:
        """Begin a step of the optimizer, and return what follows it.

        Args:
            hurries: an average of all follows in any case. Those of the site that would have come before it
                are left out, and count as made.
        """

    def go_on_at(self, averages: int) -> None:
        """Go on behind so many averages, the last of which was one of all."""


class Periodic:
    """Counts steps, and averages by their number."""

    def __init__(self, name: str, periods: Periods) -> None:
        """Begin before the first step."""
        self.fingerprint: Final = f"{name} k1={periods.k1} k2={periods.k2}"
        self._periods: Final = periods
        self._steps = 0

    @property
    def averages(self) -> int:
        """How many averages steps have been followed by."""
        return self._steps // self._periods.k1

    @property
    def taken(self) -> int:
        """How many steps there have been since the last one."""
        return self._steps % self._periods.k1

    def next_step(self, *, hurries: bool = False) -> Average:
        """Begin a step of the optimizer, and return what follows it."""
        self._steps += 1
        if hurries:
            self._steps = self._periods.next_all(self._steps)
        return self._periods.after(self._steps)

    def go_on_at(self, averages: int) -> None:
        """Go on behind so many averages."""
        self._steps = averages * self._periods.k1


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
        self._averages = 0
        self._taken = 0

    @property
    def averages(self) -> int:
        """How many averages steps have been followed by."""
        return self._averages

    @property
    def taken(self) -> int:
        """How many steps there have been since the last one."""
        return self._taken

    def next_step(self, *, hurries: bool = False) -> Average:
        """Begin a step of the optimizer, and return what follows it. May wait for the pacer."""
        self._taken += 1
        if not hurries and self._taken < self._pacer.steps():
            return Average.NONE
        self._pacer.round_ends(self._taken)
        self._taken = 0
        self._averages += 1
        return Average.ALL

    def go_on_at(self, averages: int) -> None:
        """Go on behind so many averages."""
        self._averages, self._taken = averages, 0
