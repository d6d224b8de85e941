"""After which of its own steps a rank averages, and over whom: numbers of steps, and nothing else."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from netstorm.errors import UsageError

__all__ = [
    "Average",
    "FragmentSchedule",
    "Paced",
    "Pacer",
    "Periodic",
    "Periods",
    "StepPlan",
    "StepSchedule",
]


class Average(enum.Enum):
    """What follows a step."""

    NONE = "none"
    SITE = "the site's average"
    ALL = "the average of all"


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

    @property
    def interval(self) -> int:
        """Steps from one average, of a site or of all, to the next."""
        return self.k1

    @property
    def text(self) -> str:
        """What ranks must agree on."""
        return f"k1={self.k1} k2={self.k2}"

    def after(self, step: int) -> Average:
        """Return what follows a step. 0: before the first one all ranks have the same values, too."""
        if step % self.k1:
            return Average.NONE
        return Average.SITE if step % (self.k1 * self.k2) else Average.ALL

    def next_all(self, step: int) -> int:
        """Return the first step from `step` on that an average of all ranks follows."""
        period = self.k1 * self.k2
        return -(-step // period) * period


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

    @property
    def interval(self) -> int:
        """Steps of a period."""
        return self.sync_every

    @property
    def text(self) -> str:
        """What ranks must agree on."""
        return f"fragments={self.fragments} sync_every={self.sync_every} delay={self.delay}"

    def after(self, step: int) -> Average:
        """Return `ALL` where a period ends: the last fragment is applied, and if `delay` is 0 no sum is under
        way.
        """
        return Average.NONE if step % self.sync_every else Average.ALL

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
        """Return the first step from `step` on after which a sum begins, or is applied."""
        while not (self.begin_at(step) or self.apply_at(step)):
            step += 1
        return step

    def _place(self, fragment: int) -> int:
        return -(-self.sync_every * (fragment + 1) // self.fragments)


StepPlan: TypeAlias = Periods | FragmentSchedule
"""Knows from a step's number, from 1, what follows it."""


class Periodic:
    """Counts steps, and averages by their number.

    Attributes:
        fingerprint: names it, with what ranks must agree on.
    """

    def __init__(self, name: str, plan: StepPlan) -> None:
        """Begin before the first step."""
        self.fingerprint: Final = f"{name} {plan.text}"
        self._plan: Final = plan
        self._steps = 0

    @property
    def steps(self) -> int:
        """How many steps this rank has taken, with those that it has skipped in a hurry."""
        return self._steps

    @property
    def averages(self) -> int:
        """How many averages steps have been followed by, of a site or of all."""
        return self._steps // self._plan.interval

    @property
    def taken(self) -> int:
        """How many steps there have been since the last one."""
        return self._steps % self._plan.interval

    @property
    def is_averaged(self) -> bool:
        """Whether an average of all has followed the last step, or there has been none."""
        return self._plan.after(self._steps) is Average.ALL

    def next_step(self, *, hurries: bool = False) -> Average:
        """Begin a step of the optimizer, and return what follows it. May wait for a pacer.

        Args:
            hurries: values of all are averaged in any case. Averages of the site that would have come before
                are left out, and count as made.
        """
        self._steps += 1
        if hurries:
            self._steps = self._plan.next_all(self._steps)
        return self._plan.after(self._steps)

    def go_on_at(self, averages: int, steps: int | None = None) -> None:
        """Go on behind so many averages, the last of which was one of all, and steps; None: as many as that
        takes.
        """
        self._steps = averages * self._plan.interval if steps is None else steps


class Pacer(Protocol):
    """Says how many steps a round has."""

    def steps(self) -> int:
        """Return the number of steps of the present round."""

    def round_ends(self, taken: int) -> None:
        """Hear that the last step of the round has begun, and how many it has."""


class Paced:
    """Averages over all ranks after as many steps as a pacer says; ranks take different numbers of them. It
    has what `Periodic` has.
    """

    def __init__(self, name: str, pacer: Pacer) -> None:
        """Begin before the first step."""
        self.fingerprint: Final = name
        self.steps = 0
        self.averages = 0
        self.taken = 0
        self._pacer: Final = pacer

    @property
    def is_averaged(self) -> bool:
        """Whether an average has followed the last step."""
        return self.taken == 0

    def next_step(self, *, hurries: bool = False) -> Average:
        """Begin a step, and return what follows it."""
        self.steps += 1
        self.taken += 1
        if not hurries and self.taken < self._pacer.steps():
            return Average.NONE
        self._pacer.round_ends(self.taken)
        self.taken = 0
        self.averages += 1
        return Average.ALL

    def go_on_at(self, averages: int, steps: int | None = None) -> None:
        """Go on behind so many averages, and steps if they are known."""
        self.averages, self.taken, self.steps = averages, 0, steps or 0


StepSchedule: TypeAlias = Periodic | Paced
"""Decides step by step."""
