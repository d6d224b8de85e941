"""A study: all schemes on the networks of all seeds. Its results so far can be read at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from netstorm.cli.simulate.cases import (
    OPTIMUM,
    Answer,
    Case,
    Ended,
    Failed,
    Formed,
    Generated,
    RoundDone,
    Stored,
)
from netstorm.cli.simulate.worker_process import CaseTimeout
from netstorm.simulation.experiment import Engine, Experiment
from netstorm.simulation.summary import Summary, summarise
from netstorm.units import format_duration

__all__ = ["OPTIMUM_NODES", "CaseResult", "CaseRunner", "Study", "StudyOptions"]

OPTIMUM_NODES: Final = 32
"""Most nodes for which the optimum is computed: its linear program then takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """The arguments of a study."""

    family: str | None
    """None: a network file."""
    path: str | None
    nodes: int
    seeds: tuple[int, ...]
    changing: bool
    topologies: tuple[str, ...]
    experiment: Experiment
    """Its seed is replaced by each seed in turn."""
    engine: Engine
    engine_reason: str
    limit_s: float

    def case(self, seed: int, topology: str) -> Case:
        """Return the case of one scheme on one seed's network."""
        source: Generated | Stored
        if self.path is not None:
            source = Stored(path=self.path)
        else:
            assert self.family is not None
            source = Generated(family=self.family, nodes=self.nodes, seed=seed)
        return Case(
            network=source,
            topology=topology,
            tensors=self.experiment.tensors,
            chunk_bytes=self.experiment.chunk_bytes,
            rounds=self.experiment.rounds,
            seed=seed,
            engine=self.engine.value,
        )

    @property
    def optimum_reason(self) -> str:
        """Why there is no optimum; empty if there is one."""
        if self.nodes > OPTIMUM_NODES:
            return (
                f"no optimum: its linear program is for up to {OPTIMUM_NODES} nodes, there are {self.nodes}"
            )
        return "no optimum: it is a static network's, this one changes" if self.changing else ""

    @property
    def cases(self) -> int:
        """Number of cases."""
        return len(self.seeds) * (len(self.topologies) + (not self.optimum_reason))


@dataclass(slots=True, kw_only=True)
class CaseResult:
    """The result of one scheme on one seed's network."""

    rounds_s: list[float] = field(default_factory=list)
    formation_s: float | None = None
    reason: str = ""
    """How the policy was formed."""
    error: str = ""
    """Why rounds are missing; empty: none is."""
    skipped: bool = False
    """The error is no failure: the scheme does not apply to the network, or takes too long."""

    @property
    def seconds(self) -> float | None:
        """Mean of the rounds; None if some are missing."""
        return sum(self.rounds_s) / len(self.rounds_s) if self.rounds_s and not self.error else None


class CaseRunner(Protocol):
    """Runs cases: a `WorkerProcess`, or a test's substitute."""

    def run(self, case: Case, limit_s: float) -> Iterator[Answer]:
        """See `WorkerProcess.run`."""


class Study:
    """Cases and their results."""

    def __init__(self, options: StudyOptions) -> None:
        """Begin without results."""
        self.options: Final = options
        self.results: Final[dict[str, dict[int, CaseResult]]] = {name: {} for name in options.topologies}
        """By scheme, then seed."""
        self.optima: Final[dict[int, float]] = {}
        """Seconds, by seed."""
        self.notes: Final[list[str]] = [options.optimum_reason] if options.optimum_reason else []
        self.interrupted = False
        self._too_slow: Final[set[str]] = set()

    def run(self, worker: CaseRunner, on_case: Callable[[str], None]) -> None:
        """Run all cases; `on_case` is called with the name of each before it begins."""
        options = self.options
        for seed in options.seeds:
            if not options.optimum_reason:
                on_case(f"seed {seed}, the optimum")
                self._find_optimum(worker, seed)
            for topology in options.topologies:
                on_case(f"seed {seed}, {topology}")
                if topology not in self._too_slow:
                    self._simulate(worker, seed, topology)

    def _find_optimum(self, worker: CaseRunner, seed: int) -> None:
        if OPTIMUM in self._too_slow:
            return
        try:
            for answer in worker.run(self.options.case(seed, OPTIMUM), self.options.limit_s):
                if isinstance(answer, Ended) and answer.optimum_s is not None:
                    self.optima[seed] = answer.optimum_s
                elif isinstance(answer, Failed):
                    self.notes.append(f"no optimum for seed {seed}: {answer.message}")
        except CaseTimeout:
            self._too_slow.add(OPTIMUM)
            self.notes.append(f"no optimum from seed {seed} on: {self._limit_text()}")

    def _simulate(self, worker: CaseRunner, seed: int, topology: str) -> None:
        result = CaseResult(error="interrupted", skipped=True)
        self.results[topology][seed] = result
        try:
            for answer in worker.run(self.options.case(seed, topology), self.options.limit_s):
                if isinstance(answer, Formed):
                    result.formation_s, result.reason = answer.formation_s, answer.reason
                elif isinstance(answer, RoundDone):
                    result.rounds_s.append(answer.seconds)
                elif isinstance(answer, Failed):
                    result.error, result.skipped = answer.message, answer.unfit
                elif isinstance(answer, Ended):
                    result.error, result.skipped = "", False
        except CaseTimeout:
            self._too_slow.add(topology)
            what = "formed" if result.formation_s is None else "simulated"
            result.error = f"not {what} for seed {seed}: {self._limit_text()}"

    def _limit_text(self) -> str:
        return f"it took longer than the limit of {format_duration(self.options.limit_s)} (--limit)"

    # ------------------------------------------------------------------------------------------ results

    def summary(self, topology: str) -> Summary | None:
        """Return the summary of a scheme's times; None if there are none."""
        times = self.times(topology)
        return summarise(times, self.optima) if times else None

    def times(self, topology: str) -> dict[int, float]:
        """Return the mean round time, by seed, of the cases that are done."""
        found = {seed: result.seconds for seed, result in self.results[topology].items()}
        return {seed: seconds for seed, seconds in found.items() if seconds is not None}

    def problems(self, topology: str) -> list[str]:
        """Return the reasons why a scheme lacks seeds, each once."""
        return list(dict.fromkeys(result.error for result in self.results[topology].values() if result.error))

    @property
    def failed(self) -> bool:
        """Whether a case failed (skipped ones do not count), or there are no times at all."""
        broken = any(
            result.error and not result.skipped
            for by_seed in self.results.values()
            for result in by_seed.values()
        )
        return broken or not any(self.times(name) for name in self.results)

    def as_json(self) -> dict[str, object]:
        """Return all results, for JSON."""
        options, experiment = self.options, self.options.experiment
        return {
            "network": {"family": options.family, "file": options.path, "nodes": options.nodes},
            "bytes": experiment.bytes,
            "tensors": len(experiment.tensors),
            "chunk_bytes": experiment.chunk_bytes,
            "rounds": experiment.rounds,
            "engine": {"used": options.engine.value, "reason": options.engine_reason},
            "limit_s": options.limit_s,
            "seeds": [
                {
                    "seed": seed,
                    "optimum_s": self.optima.get(seed),
                    "schemes": {
                        name: self._result_json(by_seed[seed], self.optima.get(seed))
                        for name, by_seed in self.results.items()
                        if seed in by_seed
                    },
                }
                for seed in options.seeds
            ],
            "summary": {
                name: None if (summary := self.summary(name)) is None else summary.as_json()
                for name in options.topologies
            },
            "skipped": {name: self.problems(name) for name in options.topologies if self.problems(name)},
            "notes": self.notes,
            "interrupted": self.interrupted,
        }

    @staticmethod
    def _result_json(result: CaseResult, optimum_s: float | None) -> dict[str, object]:
        seconds = result.seconds
        return {
            "seconds": seconds,
            "rounds_s": result.rounds_s,
            "of_optimum": None if seconds is None or optimum_s is None else optimum_s / seconds,
            "formation_s": result.formation_s,
            "policy": result.reason,
            "error": result.error or None,
        }
