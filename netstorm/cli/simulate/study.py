"""A study: all schemes on all seeds' networks, one after the other; its results are there at any moment."""

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
from netstorm.cli.simulate.helper import TimeIsUp
from netstorm.simulation.experiment import Engine, Experiment
from netstorm.simulation.summary import Summary, summarise
from netstorm.units import format_duration

__all__ = ["OPTIMUM_NODES", "Asked", "Asker", "Finding", "Study"]

OPTIMUM_NODES: Final = 32
"""The linear program takes seconds up to here, and soon minutes beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line says."""

    family: str | None
    """None: a network file."""
    path: str | None
    nodes: int
    seeds: tuple[int, ...]
    changing: bool
    topologies: tuple[str, ...]
    experiment: Experiment
    """Its seed is each seed in turn."""
    engine: Engine
    engine_reason: str
    limit_s: float

    def case(self, seed: int, topology: str) -> Case:
        """Return what the worker is asked."""
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
        """How many there are."""
        return len(self.seeds) * (len(self.topologies) + (not self.optimum_reason))


@dataclass(slots=True, kw_only=True)
class Finding:
    """One scheme on one seed's network."""

    rounds_s: list[float] = field(default_factory=list)
    formation_s: float | None = None
    reason: str = ""
    """How the policy came about."""
    error: str = ""
    """Why there are no rounds, or not all."""
    skipped: bool = False
    """The error is nobody's fault: the scheme does not suit the network, or takes too long."""

    @property
    def seconds(self) -> float | None:
        """Mean of the rounds; None if they are not all there."""
        return sum(self.rounds_s) / len(self.rounds_s) if self.rounds_s and not self.error else None


class Asker(Protocol):
    """Who does cases: a `Helper`."""

    def ask(self, case: Case, limit_s: float) -> Iterator[Answer]:
        """See `Helper.ask`."""


class Study:
    """The cases and what has come of them."""

    def __init__(self, asked: Asked) -> None:
        """Nothing is done yet."""
        self.asked: Final = asked
        self.findings: Final[dict[str, dict[int, Finding]]] = {name: {} for name in asked.topologies}
        """By scheme, then seed."""
        self.optima: Final[dict[int, float]] = {}
        """Seconds, by seed."""
        self.notes: Final[list[str]] = [asked.optimum_reason] if asked.optimum_reason else []
        self.interrupted = False
        self._too_slow: Final[set[str]] = set()

    def run(self, helper: Asker, on_case: Callable[[str], None]) -> None:
        """Do all cases; `on_case` is told of each before it begins, as text."""
        asked = self.asked
        for seed in asked.seeds:
            if not asked.optimum_reason:
                on_case(f"seed {seed}, the optimum")
                self._find_optimum(helper, seed)
            for topology in asked.topologies:
                on_case(f"seed {seed}, {topology}")
                if topology not in self._too_slow:
                    self._simulate(helper, seed, topology)

    def _find_optimum(self, helper: Asker, seed: int) -> None:
        if OPTIMUM in self._too_slow:
            return
        try:
            for found in helper.ask(self.asked.case(seed, OPTIMUM), self.asked.limit_s):
                if isinstance(found, Ended) and found.optimum_s is not None:
                    self.optima[seed] = found.optimum_s
                elif isinstance(found, Failed):
                    self.notes.append(f"no optimum for seed {seed}: {found.message}")
        except TimeIsUp:
            self._too_slow.add(OPTIMUM)
            self.notes.append(f"no optimum from seed {seed} on: {self._limit_text()}")

    def _simulate(self, helper: Asker, seed: int, topology: str) -> None:
        finding = Finding(error="interrupted", skipped=True)
        self.findings[topology][seed] = finding
        try:
            for found in helper.ask(self.asked.case(seed, topology), self.asked.limit_s):
                if isinstance(found, Formed):
                    finding.formation_s, finding.reason = found.formation_s, found.reason
                elif isinstance(found, RoundDone):
                    finding.rounds_s.append(found.seconds)
                elif isinstance(found, Failed):
                    finding.error, finding.skipped = found.message, found.unfit
                elif isinstance(found, Ended):
                    finding.error, finding.skipped = "", False
        except TimeIsUp:
            self._too_slow.add(topology)
            what = "formed" if finding.formation_s is None else "simulated"
            finding.error = f"not {what} for seed {seed}: {self._limit_text()}"

    def _limit_text(self) -> str:
        return f"it took longer than the limit of {format_duration(self.asked.limit_s)} (--limit)"

    # ------------------------------------------------------------------------------------------ what is known

    def summary(self, topology: str) -> Summary | None:
        """Return a scheme's times in a few numbers; None if there are none."""
        times = self.times(topology)
        return summarise(times, self.optima) if times else None

    def times(self, topology: str) -> dict[int, float]:
        """Return the mean round time of each seed that is done."""
        found = {seed: finding.seconds for seed, finding in self.findings[topology].items()}
        return {seed: seconds for seed, seconds in found.items() if seconds is not None}

    def problems(self, topology: str) -> list[str]:
        """Return, once each, why a scheme lacks seeds."""
        return list(dict.fromkeys(one.error for one in self.findings[topology].values() if one.error))

    @property
    def failed(self) -> bool:
        """Whether something went wrong (not: does not suit, takes too long), or nothing came out."""
        broken = any(
            one.error and not one.skipped for found in self.findings.values() for one in found.values()
        )
        return broken or not any(self.times(name) for name in self.findings)

    def as_json(self) -> dict[str, object]:
        """Return all that is known."""
        asked, experiment = self.asked, self.asked.experiment
        return {
            "network": {"family": asked.family, "file": asked.path, "nodes": asked.nodes},
            "bytes": experiment.bytes,
            "tensors": len(experiment.tensors),
            "chunk_bytes": experiment.chunk_bytes,
            "rounds": experiment.rounds,
            "engine": {"used": asked.engine.value, "reason": asked.engine_reason},
            "limit_s": asked.limit_s,
            "seeds": [
                {
                    "seed": seed,
                    "optimum_s": self.optima.get(seed),
                    "schemes": {
                        name: self._finding_json(found[seed], self.optima.get(seed))
                        for name, found in self.findings.items()
                        if seed in found
                    },
                }
                for seed in asked.seeds
            ],
            "summary": {
                name: None if (summary := self.summary(name)) is None else summary.as_json()
                for name in asked.topologies
            },
            "skipped": {name: self.problems(name) for name in asked.topologies if self.problems(name)},
            "notes": self.notes,
            "interrupted": self.interrupted,
        }

    @staticmethod
    def _finding_json(finding: Finding, optimum_s: float | None) -> dict[str, object]:
        seconds = finding.seconds
        return {
            "seconds": seconds,
            "rounds_s": finding.rounds_s,
            "of_optimum": None if seconds is None or optimum_s is None else optimum_s / seconds,
            "formation_s": finding.formation_s,
            "policy": finding.reason,
            "error": finding.error or None,
        }
