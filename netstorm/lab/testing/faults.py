"""Fault plans as values: which faults are injected, when and where. A failing run can be repeated from its
plan.

    plan = [Reset(at=0.2, source=0, target=1), Corrupt(probability=0.01)]
    cluster = SimulatedCluster(nodes=4, seed=7, faults=plan)

Times are in s since the cluster's start. Ends are ranks, or `SCHEDULER`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from netstorm.protocol.frames import SCHEDULER

__all__ = [
    "Breaks",
    "Busy",
    "Corrupt",
    "Crash",
    "Cut",
    "Delay",
    "Fault",
    "FaultyCluster",
    "Partition",
    "Reset",
    "random_plan",
]


class FaultyCluster(Protocol):
    """What a fault needs of a cluster; `SimulatedCluster` has it."""

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call `action` (no arguments) at `time`."""

    def reset(self, source: int, target: int) -> None:
        """Break all connections between two processes; they may connect again at once."""

    def cut(self, source: int, target: int, *, one_way: bool = False) -> None:
        """Drop everything between two processes."""

    def heal(self, source: int, target: int) -> None:
        """End a cut."""

    def crash(self, rank: int, *, silent: bool = False) -> None:
        """End a process without warning."""

    def suspend(self, rank: int, seconds: float) -> None:
        """Stop a process for a while; its host's kernel acknowledges what comes."""

    def set_corruption(self, probability: float) -> None:
        """Change a bit of each payload with this probability."""

    def set_breaks(self, probability: float) -> None:
        """Break a connection instead of delivering a message, with this probability."""

    def delay(self, source: int, target: int, seconds: float) -> None:
        """Delay everything from one process to another by this much more."""


class Fault(Protocol):
    """One injected fault."""

    def schedule(self, cluster: FaultyCluster) -> None:
        """Have it happen in `cluster`, at its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """All connections between two processes break; what is in flight is lost; they may connect again."""

    at: float
    source: int
    target: int

    def schedule(self, cluster: FaultyCluster) -> None:
        """See `Fault`."""
        cluster.at(self.at, lambda: cluster.reset(self.source, self.target))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Everything between two processes is dropped until `heal_at` (None: for ever)."""

    at: float
    source: int
    target: int
    heal_at: float | None = None
    one_way: bool = False
    """Only from `source` to `target`."""

    def schedule(self, cluster: FaultyCluster) -> None:
        """See `Fault`."""
        cluster.at(self.at, lambda: cluster.cut(self.source, self.target, one_way=self.one_way))
        if self.heal_at is not None:
            cluster.at(self.heal_at, lambda: cluster.heal(self.source, self.target))


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Everything between processes of different groups is dropped; processes in no group reach all others."""

    at: float
    groups: tuple[tuple[int, ...], ...]
    heal_at: float | None = None

    def schedule(self, cluster: FaultyCluster) -> None:
        """See `Fault`."""
        for number, group in enumerate(self.groups):
            for other in self.groups[number + 1 :]:
                for source in group:
                    for target in other:
                        Cut(at=self.at, source=source, target=target, heal_at=self.heal_at).schedule(cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A process ends without warning."""

    at: float
    rank: int
    silent: bool = False
    """Its host loses power: connections are not reset."""

    def schedule(self, cluster: FaultyCluster) -> None:
        """See `Fault`."""
        cluster.at(self.at, lambda: cluster.crash(self.rank, silent=self.silent))


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A process does not run for a while: it is stopped, or other code keeps its interpreter lock."""

    at: float
    rank: int
    seconds: float

    def schedule(self, cluster: FaultyCluster) -> None:
        """See `Fault`."""
        cluster.at(self.at, lambda: cluster.suspend(self.rank, self.seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupt:
    """A bit of each payload changes with this probability."""

    probability: float
    at: float = 0.0
    until: float | None = None

    def schedule(self, cluster: FaultyCluster) -> None:
        """See `Fault`."""
        cluster.at(self.at, lambda: cluster.set_corruption(self.probability))
        if self.until is not None:
            cluster.at(self.until, lambda: cluster.set_corruption(0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaks:
    """A connection breaks instead of delivering a message, with this probability."""

    probability: float
    at: float = 0.0
    until: float | None = None

    def schedule(self, cluster: FaultyCluster) -> None:
        """See `Fault`."""
        cluster.at(self.at, lambda: cluster.set_breaks(self.probability))
        if self.until is not None:
            cluster.at(self.until, lambda: cluster.set_breaks(0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Everything from `source` to `target` takes `seconds` longer for a while."""

    at: float
    source: int
    target: int
    seconds: float
    until: float | None = None

    def schedule(self, cluster: FaultyCluster) -> None:
        """See `Fault`."""
        cluster.at(self.at, lambda: cluster.delay(self.source, self.target, self.seconds))
        if self.until is not None:
            cluster.at(self.until, lambda: cluster.delay(self.source, self.target, 0.0))


def random_plan(
    nodes: int, seed: int, *, duration_s: float = 1.0, faults: int = 4, longest_cut_s: float = 5.0
) -> tuple[Fault, ...]:
    """Return faults that a job must survive: resets, healed cuts, delays and corruption, but no crash.

    Args:
        nodes: number of ranks of the job; the scheduler's links fail, too.
        seed: the same seed gives the same plan.
        duration_s: faults begin in this time.
        faults: number of faults.
        longest_cut_s: longest time until a cut is healed; less than the job's time-outs if the job is to
            survive.
    """
    chance = random.Random(f"fault plan {seed}")
    return tuple(_random_fault(chance, nodes, duration_s, longest_cut_s) for _ in range(faults))


def _random_fault(chance: random.Random, nodes: int, duration_s: float, longest_cut_s: float) -> Fault:
    at = chance.random() * duration_s
    ends = [int(SCHEDULER), *range(nodes)]
    source, target = chance.sample(ends, 2)
    length = chance.random() * longest_cut_s
    kind = chance.choice(("reset", "reset", "cut", "partition", "corrupt", "breaks", "delay"))
    if kind == "reset":
        return Reset(at=at, source=source, target=target)
    if kind == "cut":
        return Cut(at=at, source=source, target=target, heal_at=at + length, one_way=chance.random() < 0.3)
    if kind == "partition":
        chance.shuffle(ends)
        middle = chance.randrange(1, len(ends))
        return Partition(at=at, groups=(tuple(ends[:middle]), tuple(ends[middle:])), heal_at=at + length)
    if kind == "corrupt":
        return Corrupt(probability=chance.random() * 0.1, at=at, until=at + length)
    if kind == "breaks":
        return Breaks(probability=chance.random() * 0.02, at=at, until=at + length)
    return Delay(at=at, source=source, target=target, seconds=chance.random() * 0.3, until=at + length)
