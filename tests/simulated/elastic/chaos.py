"""Random elastic jobs: nodes die, stop, come back and join, links fail, policies change; all results are
checked. Everything follows from the seed:

    python -m tests.simulated.elastic.chaos SEED [LAST_SEED] [--long] [--verbose]
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.elastic import (
    ElasticProgram,
    ExactValues,
    KeyKind,
    KeyUse,
    ProgramPlan,
    ResultChecks,
)
from netstorm.protocol.frames import SCHEDULER
from tests.simulated.jobs import random_detours, random_policy


def joined_nodes(chaos):
    """Return the nodes whose processes run and are in the job, by rank."""
    for rank, program in sorted(chaos.programs.items()):
        joined = program.node.machine.joined
        if program.running and joined is not None and chaos.cluster.is_member(program.node):
            yield rank, program, joined


def check_memory(chaos) -> None:
    """Check that what nodes keep for others is bounded: in a job without newcomers, results of few rounds."""
    job = chaos.job
    before, chaos.version_seen = chaos.version_seen, job.policy.version
    changed = chaos.version_seen != before
    if changed or job.silent or job.changing or any(chaos.at_risk.values()):
        chaos.quiet_from = 15 + max((program.step for program in chaos.programs.values()), default=0)
    quiet = all(program.step >= chaos.quiet_from for _, program, _ in joined_nodes(chaos))
    for rank, _, joined in joined_nodes(chaos):
        kept: dict[int, int] = {}
        for key, _, _ in joined.aggregation.views.kept:
            kept[key] = kept.get(key, 0) + 1
        for key, rounds in kept.items():
            known = joined.aggregation.keys[key]
            use = chaos.uses.get(known.name)
            # A result says what was complete when ranks contributed: as many rounds before as may be under
            # way, and as many may have come after it.
            most = 2 * known.rounds_under_way + 1 if use is None or use.rounds > 1 else 2
            if quiet:
                chaos.report.most_kept = max(chaos.report.most_kept, rounds)
                assert rounds <= most, (rank, known.name, rounds, most)


def check_leftovers(chaos) -> None:
    """Check that nothing is left of rounds once all programs have ended."""
    for rank, _, joined in joined_nodes(chaos):
        aggregation = joined.aggregation
        assert not aggregation.rounds, (rank, list(aggregation.rounds))
        assert not list(aggregation.outstanding()), rank
        early = aggregation.early.by_key
        assert not any(early.values()), (rank, early)
        assert not aggregation.views._expected, rank
        assert aggregation.look_ahead.next_tick() == math.inf, rank
        assert aggregation.takeover.all_announcements() == (), rank
        assert not any(aggregation.moved.values()), rank
        assert not joined.state.providing.requests, rank
    tables = chaos.job._consistency.tables
    assert all(len(table.open) <= table.under_way for table in tables.values())
    assert not chaos.job.changing


KINDS: Final = (
    "crash",
    "crash",
    "crash silently",
    "crash several",
    "stop",
    "cut",
    "partition",
    "reset",
    "breaks",
    "delay",
    "policy",
    "policy",
    "join",
)

FORMS: Final = (
    (KeyKind.DENSE, "float32"),
    (KeyKind.DENSE, "float64"),
    (KeyKind.DENSE, "float16"),
    (KeyKind.DENSE, "int32"),
    (KeyKind.QUANTISED, "float32"),
    (KeyKind.ROWS, "float32"),
)

LONG: Final = {"steps": 70, "faults": 16}
"""Jobs of 200 rounds and more."""

AWARE: Final = 0.3
"""Part of the jobs whose policies follow what is measured."""

HEARTBEAT_S: Final = 3.0

LINK_S: Final = 2.0

DETECT_S: Final = 1.0


@dataclass
class Report:
    """What a run has done."""

    seed: int
    checked: int = 0
    partial: int = 0
    mixed: int = 0
    views: int = 0
    rounds: int = 0
    processes: int = 0
    virtual_s: float = 0.0
    most_kept: int = 0
    """Rounds of a key whose results a node has kept in a job without newcomers."""
    happened: dict[str, int] = field(default_factory=dict)


def random_group(seed: int, nodes: int) -> tuple[int, ...]:
    """Return some of the ranks, or none."""
    chance = random.Random(f"group {seed}")
    if nodes < 3 or chance.random() < 0.6:
        return ()
    return tuple(sorted(chance.sample(range(nodes), chance.randint(2, nodes - 1))))


class Chaos:
    """One random job."""

    def __init__(
        self, seed: int, *, steps: int = 30, faults: int = 8, kinds: tuple[str, ...] = KINDS
    ) -> None:
        self.seed: Final = seed
        self.chance: Final = random.Random(f"chaos {seed}")
        chance = self.chance
        self.nodes: Final = chance.randint(2, 5)
        self.places: Final = self.nodes + chance.randint(0, 2)
        self.kinds: Final = kinds
        self.faults: Final = faults
        self.report: Final = Report(seed)
        keys = [KeyUse(name="initial", shape=(6,), kind=KeyKind.INITIAL)]
        for number in range(3):
            kind, dtype = chance.choice(FORMS)
            shape = (chance.randint(1, 12), 3) if kind is KeyKind.ROWS else (chance.choice((1, 7, 20, 33)),)
            keys.append(
                KeyUse(
                    name=f"key{number}", shape=shape, dtype=dtype, kind=kind, rounds=chance.choice((1, 1, 2))
                )
            )
        pause = chance.choice((0.05, 0.2, 0.6))
        offers = random.Random(f"offers {seed}")
        slowness = offers.choice((0.0, 0.0, 0.5, 4.0))
        self.plan: Final = ProgramPlan(
            keys=tuple(keys),
            steps=steps,
            places=self.places,
            calls=chance.random() < 0.4,
            group=random_group(seed, self.nodes),
            barrier_every=chance.choice((0, 0, 1, 5)),
            pause_s=lambda rank, step: pause * random.Random(f"{seed} {rank} {step}").random(),
            offer_s=lambda rank, step: slowness * random.Random(f"offer {seed} {rank} {step}").random(),
            states_differ=offers.random() < 0.4,
        )
        self.spread_s: Final = steps * pause * 0.7
        self.detours: Final = chance.random() < 0.4
        self.version = itertools.count(1000, 1000)
        self.cluster = SimulatedCluster(
            self.nodes,
            seed=seed,
            elastic=f"1:{self.places}",
            delay_s=chance.choice((0.001, 0.01, 0.05)),
            jitter_s=chance.choice((0.0, 0.01, 0.1)),
            detect_s=DETECT_S,
            chunk_size=chance.choice((5, 10, 50)),
            awareness=random.Random(f"awareness {seed}").random() < AWARE,
            update_time_s=1.0,
            heartbeat_interval_s=0.5,
            heartbeat_timeout_s=HEARTBEAT_S,
            link_timeout_s=LINK_S,
        )
        self.checks: Final = ResultChecks(ExactValues(seed, self.places), self.places, self.cluster.is_member)
        self.programs: Final[dict[int, Any]] = {}
        """By rank: what its newest process runs."""
        self.at_risk: Final[Counter[int]] = Counter()
        """Ranks that are stopped, or cannot reach others, and those that the job may not miss yet."""
        self.busy_until = 0.0
        self.uses: Final = {key.name: key for key in keys}
        self.version_seen = -1
        self.quiet_from = 0
        """Step from which on nothing has happened for a while."""

    # ------------------------------------------------------------------------------------------ the run

    def run(self) -> Report:
        """Run the job to its end."""
        cluster = self.cluster.join()
        if self.chance.random() < 0.5:
            self.install()
        for rank in range(self.nodes):
            self.begin(rank)
        at = cluster.now
        for _ in range(self.faults):
            at += self.chance.random() * 2 * self.spread_s / self.faults
            cluster.at(at, self.fault)
        self.busy_until = at
        watch = functools.partial(check_memory, self)
        for moment in range(1, 60):
            cluster.at(cluster.now + moment * self.spread_s / 20, watch)
        limit = self.spread_s * 3 + 30 * (self.faults + 2) + 100
        cluster.run_until(self.over, limit, "the end of all programs")
        self.heal_all()
        cluster.run_for(HEARTBEAT_S + 5)
        cluster.run_until(self.over, 100, "the end of all programs once more")
        self.fill_report()
        cluster.finish(100.0)
        check_leftovers(self)
        outcome = cluster.scheduler.machine.outcome
        assert outcome is not None
        assert outcome.exit_code == 0, outcome
        return self.report

    def over(self) -> bool:
        """Return whether nothing more will happen, and all programs have ended."""
        if self.cluster.now <= self.busy_until:
            return False
        running = [program for program in self.programs.values() if program.running]
        return bool(running) and all(program.done for program in running)

    def fill_report(self) -> None:
        report, job = self.report, self.job
        report.checked, report.partial, report.mixed = (
            self.checks.checked,
            self.checks.partial,
            self.checks.mixed,
        )
        report.views = job.view
        report.rounds = sum(key.rounds_before(self.plan.steps) for key in self.plan.keys)
        report.virtual_s = self.cluster.now

    @property
    def job(self):
        return self.cluster.scheduler.machine.job

    # ----------------------------------------------------------------------------------------- processes

    def begin(self, rank: int) -> None:
        self.report.processes += 1
        cluster = self.cluster
        program = self.programs[rank] = ElasticProgram(
            cluster.started(rank),
            self.plan,
            self.checks,
            after=lambda seconds, action: cluster.at(cluster.now + seconds, action),
        )
        self.watch(rank, program)

    def watch(self, rank: int, program: Any) -> None:
        """Start another process once this one's job has ended for it, as a launcher does."""
        if self.programs[rank] is not program or not program.node.alive:
            return
        if program.error is not None or program.node.failure is not None:
            if program.error is None:
                program.error = program.node.failure
            self.note(f"out: {type(program.error).__name__}")
            self.stay_busy(1.0)
            program.node.process.die()
            self.cluster.at(self.cluster.now + 0.5, lambda: self.start(rank))
            return
        self.cluster.at(self.cluster.now + 0.25, lambda: self.watch(rank, program))

    def start(self, rank: int) -> None:
        known = self.programs.get(rank)
        if known is not None and known.node.alive:
            return
        self.stay_busy(1.0)
        self.cluster.start(rank)
        self.begin(rank)

    def stay_busy(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.cluster.now + seconds)

    def holders(self) -> set[int]:
        """Return the ranks that have the job's state, contributing or not, and that nothing ails."""
        return {
            rank
            for rank, program in self.programs.items()
            if program.running
            and program.has_state
            and program.node.failure is None
            and rank in self.job.members.present
            and not self.at_risk[rank]
        }

    def living(self) -> list[int]:
        return [rank for rank, program in self.programs.items() if program.node.alive]

    # -------------------------------------------------------------------------------------------- faults

    def note(self, what: str) -> None:
        self.report.happened[what] = self.report.happened.get(what, 0) + 1

    def fault(self) -> None:
        """Let one thing happen, of which the job must survive whatever it is."""
        kind = self.chance.choice(self.kinds)
        getattr(self, "fault_" + kind.replace(" ", "_"))()

    def victims(self, most: int) -> list[int]:
        """Return ranks without which some rank with the job's state is left."""
        living = self.living()
        chosen = self.chance.sample(living, min(len(living), self.chance.randint(1, most)))
        while chosen and not self.holders() - set(chosen):
            chosen.pop()
        return chosen

    def crash(self, ranks: list[int], *, silent: bool) -> None:
        for rank in ranks:
            self.note("silent crash" if silent else "crash")
            self.cluster.faults.crash(rank, silent=silent)
            after = self.chance.choice((0.01, 0.3, 2.0, 6.0, 1e9))
            if after < 1e9:
                self.stay_busy(after + 1.0)
                self.cluster.at(self.cluster.now + after, functools.partial(self.start, rank))

    def risk(self, ranks: list[int], seconds: float) -> None:
        """Count on ranks no more for a while, and until the job is certain to have missed them."""
        until = seconds + HEARTBEAT_S + 2.0
        self.at_risk.update(ranks)
        self.stay_busy(until)
        self.cluster.at(self.cluster.now + until, lambda: self.at_risk.subtract(ranks))

    def fault_crash(self) -> None:
        self.crash(self.victims(1), silent=False)

    def fault_crash_silently(self) -> None:
        self.crash(self.victims(1), silent=True)

    def fault_crash_several(self) -> None:
        self.crash(self.victims(3), silent=self.chance.random() < 0.3)

    def fault_stop(self) -> None:
        seconds = self.chance.choice((0.2, 1.5, 5.0, 9.0))
        for rank in self.victims(1):
            if self.cluster.started(rank).process.suspended:
                continue
            self.note("stop")
            self.risk([rank], seconds)
            self.cluster.faults.suspend(rank, seconds)

    def fault_cut(self) -> None:
        ends = sorted(self.programs)
        if len(ends) < 2:
            return
        one, other = self.chance.sample(ends, 2)
        self.note("cut")
        seconds = self.chance.choice((0.1, 1.5, 3.0, 8.0))
        self.risk([one, other], seconds)
        self.cluster.faults.cut(one, other, one_way=self.chance.random() < 0.3)
        self.cluster.at(self.cluster.now + seconds, lambda: self.cluster.faults.heal(one, other))

    def fault_partition(self) -> None:
        side = self.victims(3)
        others = [int(SCHEDULER), *(rank for rank in range(self.places) if rank not in side)]
        seconds = self.chance.choice((0.5, 2.0, 6.0))
        self.note("partition")
        self.risk(side, seconds)
        for one, other in itertools.product(side, others):
            self.cluster.faults.cut(one, other)

        def heal() -> None:
            for one, other in itertools.product(side, others):
                self.cluster.faults.heal(one, other)

        self.cluster.at(self.cluster.now + seconds, heal)

    def fault_reset(self) -> None:
        ends = [int(SCHEDULER), *sorted(self.programs)]
        one, other = self.chance.sample(ends, 2)
        self.note("reset")
        self.cluster.faults.reset(one, other)

    def fault_breaks(self) -> None:
        self.note("breaks")
        self.cluster.faults.set_breaks(self.chance.random() * 0.02)
        self.cluster.at(self.cluster.now + 1.0, lambda: self.cluster.faults.set_breaks(0.0))

    def fault_delay(self) -> None:
        ends = [int(SCHEDULER), *sorted(self.programs)]
        one, other = self.chance.sample(ends, 2)
        self.note("delay")
        self.cluster.faults.delay(one, other, self.chance.random() * 0.5)
        self.cluster.at(self.cluster.now + 2.0, lambda: self.cluster.faults.delay(one, other, 0.0))

    def fault_policy(self) -> None:
        self.note("policy")
        self.install()

    def install(self) -> None:
        version = self.job.policy.version + 1
        policy = random_policy(self.chance, self.places, version)
        self.cluster.install_policy(random_detours(self.chance, policy) if self.detours else policy)

    def fault_join(self) -> None:
        free = [rank for rank in range(self.places) if rank not in self.living()]
        if free:
            self.note("join")
            self.start(self.chance.choice(free))

    def heal_all(self) -> None:
        for one, other in itertools.combinations((int(SCHEDULER), *range(self.places)), 2):
            self.cluster.faults.heal(one, other)

    def describe(self) -> str:
        """Return where all programs are, for a failure."""
        lines = [f"seed {self.seed}: {self.nodes} nodes of {self.places}; {self.report.happened}"]
        for rank, program in sorted(self.programs.items()):
            joined = program.node.machine.joined
            lines.append(
                f"  rank {rank}: step {program.step} done={program.done} alive={program.node.alive} "
                f"state={program.has_state} error={program.error!r} failure={program.node.failure!r}"
            )
            if joined is not None and program.node.alive:
                aggregation, policy = joined.aggregation, joined.state.policy
                rounds = [
                    (*owner, one.version, one.waiting_text(), one.operation is not None)
                    for owner, one in aggregation.rounds.items()
                ]
                lines.append(
                    f"    changing={aggregation.views.changing} version={aggregation.views.version} "
                    f"silent={policy.silent} members={policy.members} "
                    f"waiting={[str(one) for one in aggregation.outstanding()]} rounds={rounds}"
                )
        return "\n".join(lines)


def run(seed: int, **more) -> Report:
    """Run the job of a seed; a failure says which it was, and where all programs were."""
    chaos = Chaos(seed, **more)
    try:
        return chaos.run()
    except BaseException as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(chaos.describe())
        raise


def main() -> None:
    numbers = [int(one) for one in sys.argv[1:] if one.isdigit()]
    logging.basicConfig(level=logging.INFO if "--verbose" in sys.argv else logging.CRITICAL)
    failed = []
    for seed in range(numbers[0], numbers[-1] + 1):
        began = time.perf_counter()
        try:
            report = run(seed, **(LONG if "--long" in sys.argv else {}))
            print(f"{time.perf_counter() - began:.2f} s", report, flush=True)
        except (Exception, AssertionError) as error:
            failed.append(seed)
            text = f"{type(error).__name__}: {error}" + "\n".join(getattr(error, "__notes__", []))
            print(f"seed {seed} FAILED: {text if len(numbers) == 1 else text[:300]}", flush=True)
            if len(numbers) == 1:
                raise
    print("failed:", failed)


if __name__ == "__main__":
    main()
