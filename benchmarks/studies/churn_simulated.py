#!/usr/bin/env python3
"""What do faults cost a job whose machines cost nothing? `netstorm bench churn` on virtual time.

    python benchmarks/studies/churn_simulated.py 5 6 7
    python benchmarks/studies/churn_simulated.py 5 --faults kill,cut,scheduler --seconds 60 --verbose

The nodes and the scheduler are the real ones; the network, the clocks and the time that a process takes to
start are simulated. So what is lost here is lost by design, or by a mistake: no processor is busy. Each seed
draws the faults that `netstorm bench churn --seed` draws, and runs the same each time. Every element of every
sum is checked at every rank, and the states of all ranks are compared. Exit code 1: something is wrong, or a
rank hangs.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import number, seconds
from harness.faults import KINDS, LostTime, PlannedFault, Span, longest_gaps, lost_time, plan_faults
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.elastic import ElasticProgram, ExactValues, KeyUse, ProgramPlan, ResultChecks
from netstorm.lab.simulation.node import SimulatedNode
from netstorm.protocol.frames import SCHEDULER

_STEP_S: Final = 0.05
"""What a rank computes in a step."""
_START_S: Final = 0.5
"""From a process's start until it asks for its job."""
_LOOK_S: Final = 0.02
_HEALTHY: Final = 2
"""Ranks that a fault leaves: somebody has the state."""
_HANG_S: Final = 60.0
_QUIET_S: Final = 10.0


@dataclass(slots=True)
class _Fault:
    kind: str
    rank: int
    at: float
    step: int
    until: float = math.inf
    recovered: float = math.inf


@dataclass(slots=True, kw_only=True)
class Result:
    """What became of a job.

    Attributes:
        steps: that it made.
        goodput: those over the steps of as much time without faults.
        recovery: by kind of fault: in how many s all others had completed a step that began after it.
        lost: where the other time went.
        gaps: see `longest_gaps`.
    """

    steps: int
    goodput: float
    recovery: dict[str, list[float]]
    lost: LostTime
    gaps: list[dict[str, object]]


class _Checks(ResultChecks):
    """Notes when each step is first completed."""

    def __init__(
        self, values: ExactValues, places: int, is_member: Callable[[SimulatedNode], bool], nodes: int
    ) -> None:
        super().__init__(values, places, is_member)
        self.completed: Final[dict[int, float]] = {}
        self.now: Callable[[], float] = lambda: 0.0

    def same(self, node: SimulatedNode, what: tuple[object, ...], content: bytes) -> None:
        """See `ResultChecks`."""
        super().same(node, what, content)
        if what[0] == "state":
            step: Any = what[1]
            self.completed.setdefault(step, self.now())


@dataclass(slots=True)
class SimulatedChurn:
    """One job under faults.

    Attributes:
        nodes: its ranks.
        seed: of the faults, and of everything else.
        start_s: how long a process takes to start.
        settings: of all processes.
    """

    nodes: int
    seed: int
    start_s: float = _START_S
    settings: dict[str, Any] = field(default_factory=dict)
    faults: list[_Fault] = field(default_factory=list)
    _cluster: Any = None
    _checks: Any = None
    _programs: dict[int, Any] = field(default_factory=dict)
    _started_at: dict[int, float] = field(default_factory=dict)
    _comings: list[tuple[float, float]] = field(default_factory=list)
    _stopped: set[int] = field(default_factory=set)
    _plan: Any = None
    _scheduler_since: float = 0.0

    def run(self, planned: Sequence[PlannedFault], duration_s: float) -> Result:
        """Run the job, with these faults in so many s.

        Raises:
            WaitTimeout: it does not go on; the message describes all processes.
            WrongResult: a sum or a state is wrong.
        """
        cluster = self._cluster = SimulatedCluster(
            self.nodes,
            seed=self.seed,
            elastic=f"1:{self.nodes}",
            keep_log=True,
            delay_s=0.0005,
            **{
                "heartbeat_interval_s": 0.5,
                "heartbeat_timeout_s": 3.0,
                "link_timeout_s": 3.0,
                **self.settings,
            },
        )
        self._checks = _Checks(ExactValues(self.seed, self.nodes), self.nodes, self._is_member, self.nodes)
        self._checks.now = lambda: cluster.now
        self._plan = ProgramPlan(
            keys=(KeyUse(name="small", shape=(7,)), KeyUse(name="large", shape=(40,))),
            steps=1_000_000_000,
            places=self.nodes,
            pause_s=lambda _rank, _step: _STEP_S,
        )
        cluster.join()
        for rank in range(self.nodes):
            self._begin(rank)
        cluster.run_until(lambda: self.step >= 5, 20.0, "the first steps")
        usual = [self._undisturbed()]
        begin, first = cluster.now, len(self._checks.completed)
        cluster.at(begin, self._look)
        for fault, after in zip(planned, [*planned[1:], None], strict=True):
            until = begin + (duration_s if after is None else after.at)
            cluster.at(begin + fault.at, functools.partial(self._try, fault, until))
        cluster.run_for(duration_s)
        end, steps = cluster.now, len(self._checks.completed) - first
        spans = self._spans(end)
        cluster.run_until(self._all_run, _HANG_S, "everybody back")
        goal = self.step + 10
        cluster.run_until(lambda: self._all_run() and self.step >= goal, _HANG_S, "ten more steps")
        usual.append(self._undisturbed())
        completed = sorted(self._checks.completed.values())
        recovery: dict[str, list[float]] = {}
        for one in self.faults:
            recovery.setdefault(one.kind, []).append(one.recovered - one.at)
        usual_s = statistics.mean(usual)
        return Result(
            steps=steps,
            goodput=steps * usual_s / duration_s,
            recovery=recovery,
            lost=lost_time(completed, begin, end, usual_s, spans),
            gaps=longest_gaps(completed, begin, end, spans, 12),
        )

    @property
    def step(self) -> int:
        """The last step that any rank has completed."""
        return max(self._checks.completed, default=-1)

    def _undisturbed(self) -> float:
        first = self.step
        self._cluster.run_for(_QUIET_S)
        return _QUIET_S / (self.step - first)

    def _is_member(self, node: SimulatedNode) -> bool:
        return self._cluster.scheduler.alive and bool(self._cluster.is_member(node))

    # ------------------------------------------------------------------------------------------- processes

    def _begin(self, rank: int) -> None:
        cluster = self._cluster
        program = self._programs[rank] = ElasticProgram(
            cluster.started(rank),
            self._plan,
            self._checks,
            after=lambda seconds, action: cluster.at(cluster.now + seconds, action),
        )
        self._started_at.setdefault(rank, cluster.now)
        self._watch(rank, program)

    def _watch(self, rank: int, program: ElasticProgram) -> None:
        """Start another process once this one is out of the job, as a launcher does."""
        if self._programs[rank] is not program or not program.node.alive:
            return
        if program.error is not None or program.node.failure is not None:
            program.node.process.die()
            self._start(rank, 0.1)
            return
        self._cluster.at(self._cluster.now + 0.25, lambda: self._watch(rank, program))

    def _start(self, rank: int, after_s: float) -> None:
        cluster = self._cluster
        self._started_at[rank] = cluster.now + after_s

        def start() -> None:
            cluster.start(rank)
            self._begin(rank)

        cluster.at(cluster.now + after_s + self.start_s, start)

    def _runs(self, rank: int) -> bool:
        program = self._programs[rank]
        job = self._cluster.scheduler.machine.job
        return (
            program.running
            and program.has_state
            and program.node.failure is None
            and rank not in self._stopped
            and rank in job.members.present
            and rank not in job.silent
        )

    def _all_run(self) -> bool:
        return self._cluster.scheduler.alive and all(map(self._runs, range(self.nodes)))

    # ---------------------------------------------------------------------------------------------- faults

    def _try(self, planned: PlannedFault, until: float) -> None:
        if self._cluster.now < until and not self._fail(planned):
            self._cluster.at(self._cluster.now + _LOOK_S, lambda: self._try(planned, until))

    def _fail(self, planned: PlannedFault) -> bool:
        cluster, now = self._cluster, self._cluster.now
        if planned.kind == "scheduler":
            if any(one.kind == "scheduler" and math.inf in (one.until, one.recovered) for one in self.faults):
                return False
            fault = _Fault("scheduler", -1, now, self.step)
            cluster.faults.crash(SCHEDULER)

            def start() -> None:
                cluster.start(int(SCHEDULER))
                fault.until = cluster.now

            cluster.at(now + planned.lasts_s + self.start_s, start)
            self.faults.append(fault)
            return True
        healthy = [rank for rank in range(self.nodes) if self._runs(rank)]
        if len(healthy) <= (_HEALTHY if planned.kind != "cut" else 0):
            return False
        rank = healthy[int(planned.who * len(healthy))]
        fault = _Fault(planned.kind, rank, now, self.step)
        self.faults.append(fault)
        if planned.kind == "kill":
            cluster.faults.crash(rank)
            self._start(rank, planned.lasts_s)
        elif planned.kind == "cut":
            others = [int(SCHEDULER), *(other for other in range(self.nodes) if other != rank)]
            cluster.faults.reset(rank, others[int(planned.lasts_s * len(others)) % len(others)])
        else:
            cluster.faults.suspend(rank, planned.lasts_s)
            self._stopped.add(rank)

            def go_on() -> None:
                fault.until = cluster.now
                self._stopped.discard(rank)

            cluster.at(now + planned.lasts_s, go_on)
        return True

    def _look(self) -> None:
        now = self._cluster.now
        for rank, began in list(self._started_at.items()):
            if self._programs[rank].fetched is not None and self._runs(rank):
                self._comings.append((began, now))
                del self._started_at[rank]
        for fault in self.faults:
            others = [rank for rank in range(self.nodes) if rank != fault.rank and self._runs(rank)]
            if (
                fault.recovered == math.inf
                and others
                and all(self._programs[rank].step >= fault.step + 3 for rank in others)
            ):
                fault.recovered = now
        self._cluster.at(now + _LOOK_S, self._look)

    def _spans(self, end: float) -> list[Span]:
        spans = []
        for fault in self.faults:
            if fault.kind in ("kill", "cut"):
                spans.append(Span(fault.kind, fault.at, min(end, fault.recovered)))
                continue
            spans.append(Span(fault.kind, fault.at, min(end, fault.until)))
            if fault.until < min(end, fault.recovered):
                spans.append(Span(f"after a {fault.kind}", fault.until, min(end, fault.recovered)))
        spans += [Span("coming back", *times) for times in self._comings]
        return spans + [
            Span("coming back", began, end)
            for rank, began in self._started_at.items()
            if self._programs[rank].fetched is not None or not self._programs[rank].node.alive
        ]


def main() -> int:
    """Run the seeds, and return the exit code."""
    options = _options()
    logging.basicConfig(level=logging.INFO if options.verbose else logging.CRITICAL)
    console, code = Console(), 0
    for seed in options.seeds:
        settings: dict[str, Any] = {"heartbeat_timeout_s": options.heartbeat_timeout}
        if options.wait_timeout is not None:
            settings["wait_timeout_s"] = options.wait_timeout
        churn = SimulatedChurn(options.nodes, seed, settings=settings)
        faults = plan_faults(seed, options.faults, options.every, options.seconds)
        try:
            result = churn.run(faults, options.seconds)
        except Exception as error:
            console.print(f"seed {seed}: {type(error).__name__}: {error}", markup=False)
            code = 1
            if options.verbose:
                raise
            continue
        _print(console, seed, result, options.seconds)
        for gap in result.gaps if options.verbose else ():
            console.print(gap)
    return code


def _print(console: Console, seed: int, result: Result, duration_s: float) -> None:
    most = 1 - result.lost.held_s / duration_s
    console.print(f"seed {seed}: {result.steps} steps, goodput {result.goodput:.3f} (at most {most:.3f})")
    table = Table("fault", "times", "recovery: median", "worst")
    for kind, times in sorted(result.recovery.items()):
        table.add_row(kind, str(len(times)), f"{statistics.median(times):.2f} s", f"{max(times):.2f} s")
    console.print(table)
    table = Table("lost to", "seconds")
    for what, lost in result.lost.by.items():
        table.add_row(what, f"{lost:.2f}")
    console.print(table)


def _kinds(text: str) -> list[str]:
    found = text.split(",")
    if not set(found) <= set(KINDS):
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {', '.join(KINDS)}")
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("seeds", type=int, nargs="+", metavar="SEED")
    add("--nodes", type=number, default=8, metavar="N", help="default 8")
    add("--seconds", type=seconds, default=60.0, metavar="S", help="of faults; default 60")
    add("--every", type=seconds, default=1.0, metavar="S", help="mean time between faults; default 1")
    add("--faults", type=_kinds, default=list(KINDS), metavar="KIND,...", help="default: all")
    add("--heartbeat-timeout", type=seconds, default=3.0, metavar="S", help="default 3")
    add("--wait-timeout", type=seconds, metavar="S", help="go on without a rank that is stopped for so long")
    add("--verbose", action="store_true", help="the longest times without a step, and what processes log")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
