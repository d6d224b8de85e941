"""`netstorm simulate`: how long a round takes under each scheme, over many networks."""

from __future__ import annotations

import contextlib
import enum
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from netstorm import clock
from netstorm.cli.support import exit_on_usage_error
from netstorm.errors import UsageError
from netstorm.lab.commands.simulate_worker import (
    OPTIMUM,
    Answer,
    Case,
    CaseBegun,
    CaseEnded,
    CaseFailed,
    Formed,
    Generated,
    RoundDone,
    Stored,
)
from netstorm.lab.simulation.experiment import Engine, Experiment, Summary, quartiles, summarise
from netstorm.units import format_bytes, format_duration

__all__ = [
    "OPTIMUM_NODES",
    "CaseResult",
    "CaseRunner",
    "CaseTimeout",
    "Study",
    "StudyOptions",
    "check_plot",
    "draw_plot",
    "simulate",
]


_NODES: Final = 9
_FAMILY: Final = "mesh"
_SEEDS: Final = 10
_MOST_NODES: Final = 1024
"""A full mesh of more has over a million links."""

_STDOUT: Final = "-"
_INTERRUPTED: Final = 130


class EngineName(enum.Enum):
    """Values of --engine."""

    AUTO = "auto"
    CLUSTER = "cluster"
    PREDICTOR = "predictor"


def simulate(
    *,
    nodes: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--nodes",
            metavar="N",
            help=f"Nodes of a generated network. Default: {_NODES}.",
            show_default=False,
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Generated networks: mesh, internet2, cloud or asymmetric. Default: {_FAMILY}.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help=f"How many networks, of seeds 0 to N-1. Default: {_SEEDS}; with --network 1.",
            show_default=False,
        ),
    ] = None,
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Network file, instead of generated networks.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="Tensors of a round: a size, alexnet, resnet50, or a model.json."),
    ] = "244MB",
    topology: Annotated[
        str, typer.Option(metavar="NAMES", help="Schemes, separated by commas; all: each that needs no file.")
    ] = "all",
    degree: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most children of a node in balanced and k-ary trees.")
    ] = 2,
    chunk: Annotated[str, typer.Option(metavar="SIZE", help="Size of the largest chunk.")] = "1MB",
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of rounds, one after the other.")
    ] = 1,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="cluster: real nodes and the real scheduler on virtual time; predictor: for sizes beyond it."
        ),
    ] = EngineName.AUTO,
    limit: Annotated[
        str, typer.Option(metavar="TIME", help="Time limit of a scheme for one network.")
    ] = "120s",
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write JSON to this file; -: print JSON only."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the times: .png, .svg or .pdf (needs matplotlib)."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Record the job for netstorm dashboard --file; of one scheme and one seed.",
        ),
    ] = None,
) -> None:
    """Simulate or predict how long a round takes under each scheme, over many networks.

    \b
      netstorm simulate --nodes 9 --family internet2 --seeds 10
      netstorm simulate --nodes 512 --family cloud --topology fapt,star --json out.json
      netstorm simulate --network wan.yaml --model alexnet --rounds 20 --plot out.png
      netstorm simulate --seeds 1 --topology auto --model 20MB --rounds 50 --record job.jsonl

    Policies are formed for the network as it is at its start, and do not change. A scheme that exceeds the
    limit for one network is left out from then on; the output says so.

    The exit code is 1 if a scheme failed or there are no times, 2 if the arguments are wrong, 130 after
    Ctrl-C, which prints the results so far.
    """
    with exit_on_usage_error():
        options = _study_options(
            nodes=nodes, family=family, seeds=seeds, network=network, model=model, topology=topology,
            degree=degree, chunk=chunk, rounds=rounds, engine=engine, limit=limit, record=record,
        )  # fmt: skip
        if plot is not None:
            check_plot(plot)
        if json_file not in (None, _STDOUT) and not Path(str(json_file)).parent.is_dir():
            raise UsageError(f"--json {json_file}: there is no folder {Path(str(json_file)).parent}")
        study = _run(options)
        _report(study, json_file, plot)
    raise typer.Exit(_INTERRUPTED if study.interrupted else int(study.failed))


def _run(options: StudyOptions) -> Study:

    study = Study(options)
    try:
        with closing(WorkerProcess()) as worker, progress(options.cases) as on_case:
            study.run(worker, on_case)
    except KeyboardInterrupt:
        study.interrupted = True
    return study


def _report(study: Study, json_file: str | None, plot: Path | None) -> None:
    import json

    from rich.console import Console

    text = json.dumps(study.as_json(), indent=2)
    if json_file == _STDOUT:
        typer.echo(text)
    else:
        show(study, Console())
    if json_file not in (None, _STDOUT):
        try:
            Path(str(json_file)).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--json {json_file}: cannot be written: {error.strerror}") from None
    if plot is not None and any(study.times(name) for name in study.options.topologies):
        draw_plot(study, plot)


def _study_options(
    *,
    nodes: int | None,
    family: str | None,
    seeds: int | None,
    network: Path | None,
    model: str,
    topology: str,
    degree: int,
    chunk: str,
    rounds: int,
    engine: EngineName,
    limit: str,
    record: Path | None,
) -> StudyOptions:
    from netstorm.lab.simulation.experiment import Engine, Experiment, choose_engine
    from netstorm.topology.files import load_network, tensors_of
    from netstorm.topology.network import FAMILIES
    from netstorm.units import parse_bytes, parse_duration

    changing = False
    if network is not None:
        for name, value in (("--nodes", nodes), ("--family", family)):
            if value is not None:
                raise UsageError(f"{name} {value} with --network {network}: expected one or the other")
        stored = load_network(network)
        size, changing = stored.size, bool(stored.changes)
    else:
        family, size = family or _FAMILY, _NODES if nodes is None else nodes
        if family not in FAMILIES:
            raise UsageError(f"--family {family!r}: expected one of {', '.join(FAMILIES)}")
        if not 2 <= size <= _MOST_NODES:
            raise UsageError(f"--nodes {size}: expected 2 to {_MOST_NODES}")
    limit_s = parse_duration(limit)
    if limit_s <= 0:
        raise UsageError(f"--limit {limit}: expected more than 0")
    experiment = Experiment(tensors=tensors_of(model), chunk_bytes=parse_bytes(chunk), rounds=rounds)
    used, reason = choose_engine(size, experiment)
    if engine is not EngineName.AUTO:
        used, reason = Engine(engine.value), "asked for"
    if used is Engine.CLUSTER:
        _check_memory(size, experiment.bytes)
    topologies = _topologies(topology)
    drawn = tuple(range(seeds or (1 if network is not None else _SEEDS)))
    if record is not None:
        if used is not Engine.CLUSTER:
            raise UsageError(f"--record {record}: the predictor has no job to record: {reason}")
        if len(topologies) != 1 or len(drawn) != 1:
            raise UsageError(
                f"--record {record}: {len(topologies)} schemes and {len(drawn)} seeds: expected one of each, "
                "such as --topology auto --seeds 1"
            )
    return StudyOptions(
        family=family,
        path=None if network is None else str(network),
        nodes=size,
        seeds=drawn,
        changing=changing,
        topologies=topologies,
        degree=degree,
        experiment=experiment,
        engine=used,
        engine_reason=reason,
        limit_s=limit_s,
        record=None if record is None else str(record.absolute()),
    )


def _check_memory(nodes: int, nbytes: int) -> None:
    import psutil

    from netstorm.units import format_bytes

    needed, free = 3 * nodes * nbytes, psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"--engine cluster: {nodes} nodes that sum {format_bytes(nbytes)} of real numbers need about "
            f"{needed / 1e9:.3g}GB of memory, of which {free / 1e9:.3g}GB is free: "
            "expected --engine predictor, fewer nodes or a smaller --model"
        )


def _topologies(text: str) -> tuple[str, ...]:
    from netstorm.topology.form import SCHEMES

    fit = [name for name in SCHEMES if name != "custom"]  # it needs a file of its own
    if text == "all":
        return tuple(fit)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in fit:
            raise UsageError(f"--topology {name!r}: expected all, or some of {', '.join(fit)}")
    return names


# A study: all schemes on the networks of all seeds. Its results so far can be read at any time.

OPTIMUM_NODES: Final = 64
"""Most nodes for which the optimum is computed: its linear program then takes up to 8 s of a processor."""


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
    degree: int = 2
    experiment: Experiment
    """Its seed is replaced by each seed in turn."""
    engine: Engine
    engine_reason: str
    limit_s: float
    record: str | None = None

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
            degree=self.degree,
            tensors=self.experiment.tensors,
            chunk_bytes=self.experiment.chunk_bytes,
            rounds=self.experiment.rounds,
            seed=seed,
            engine=self.engine.value,
            record=self.record or "" if topology != OPTIMUM else "",
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
        self.bounds: Final[dict[int, float]] = {}
        """Seconds that no round takes less than, by seed."""
        self.certificates: Final[dict[int, str]] = {}
        """That, and why, in words."""
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
                if isinstance(answer, CaseEnded) and answer.optimum_s is not None:
                    self.optima[seed], self.certificates[seed] = answer.optimum_s, answer.certificate
                    self.bounds[seed] = answer.bound_s or 0.0
                elif isinstance(answer, CaseFailed):
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
                elif isinstance(answer, CaseFailed):
                    result.error, result.skipped = answer.message, answer.unfit
                elif isinstance(answer, CaseEnded):
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
                    "bound_s": self.bounds.get(seed),
                    "certificate": self.certificates.get(seed, "").replace("\n", " ") or None,
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


# The output of `netstorm simulate`: a table of times, and the reasons why some are missing.

_LINE_EVERY_S: Final = 10.0
"""Time between two progress lines, where standard error is no terminal."""


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call before each case: it shows a bar on a terminal, else a line at times."""
    console = Console(stderr=True)
    if not console.file.isatty():
        yield _lines(console, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = iter(range(total))
        yield lambda text: bar.update(task, description=text, completed=next(begun, total))


def _lines(console: Console, total: int) -> Callable[[str], None]:
    last = clock.monotonic()
    begun = 0

    def report(text: str) -> None:
        nonlocal last, begun
        if clock.monotonic() - last >= _LINE_EVERY_S:
            last = clock.monotonic()
            console.print(f"{begun} of {total} done; {text}", highlight=False)
        begun += 1

    return report


def show(study: Study, console: Console) -> None:
    """Print the results, the fastest scheme first."""
    options, experiment = study.options, study.options.experiment
    where = options.path or f"{options.family}, {options.nodes} nodes, {_count(len(options.seeds), 'seed')}"
    tensors = f"{format_bytes(experiment.bytes)} in {_count(len(experiment.tensors), 'tensor')}"
    chunks = f"chunks of {format_bytes(experiment.chunk_bytes)}"
    lines = (
        f"{where}: {tensors}, {chunks}, {_count(experiment.rounds, 'round')}",
        f"engine: {options.engine.value} ({options.engine_reason})",
    )
    console.print(*lines, sep="\n", highlight=False, markup=False)
    console.print(_table(study))
    for name in options.topologies:
        for problem in study.problems(name):
            console.print(f"{name}: {problem}", highlight=False, markup=False)
    for seed, certificate in list(study.certificates.items())[:1]:
        if certificate:
            console.print(f"seed {seed}: {certificate}", highlight=False, markup=False)
    for note in study.notes:
        console.print(note, highlight=False, markup=False)
    if study.interrupted:
        console.print("interrupted: this is what was done until then", highlight=False)


def _table(study: Study) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("scheme", no_wrap=True)
    for heading in ("round, s", "quartiles", "of optimum", "x over star", "formed in", "seeds"):
        table.add_column(heading, justify="right", overflow="fold")
    summaries = {name: study.summary(name) for name in study.options.topologies}
    star = summaries.get("star")
    for name, summary in sorted(summaries.items(), key=lambda item: item[1].median_s if item[1] else 1e300):
        if summary is None:
            table.add_row(name, *["-"] * 5, "0")
            continue
        formations = [
            result.formation_s for result in study.results[name].values() if result.formation_s is not None
        ]
        table.add_row(
            name,
            f"{summary.median_s:.4g}",
            f"{summary.q1_s:.4g} - {summary.q3_s:.4g}",
            "-" if summary.of_optimum is None else f"{summary.of_optimum:.2f}",
            "-" if star is None else f"{star.median_s / summary.median_s:.2f}",
            format_duration(max(formations)),
            str(summary.seeds),
        )
    for name, found in (("(bound)", study.bounds), ("(optimum)", study.optima)):
        if found:
            q1, median, q3 = quartiles(list(found.values()))
            of = statistics.median(study.optima[seed] / max(found[seed], 1e-9) for seed in found)
            times = "-" if star is None else f"{star.median_s / max(median, 1e-9):.2f}"
            cells = (f"{median:.4g}", f"{q1:.4g} - {q3:.4g}", f"{of:.2f}", times, "-", str(len(found)))
            table.add_row(name, *cells, style="dim")
    return table


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# The plot of `netstorm simulate`: each scheme's round times as a box, beside the optimum.

_SUFFIXES: Final = (".png", ".svg", ".pdf")
_BOX: Final = "#4878a8"
_OPTIMUM: Final = "#2a7f3f"
_LOGARITHMIC_FROM: Final = 8.0
"""Slowest over fastest median, beyond which a linear axis would hide the fast ones."""


def check_plot(path: Path) -> None:
    """Check, before hours of work, that a plot can be written.

    Raises:
        UsageError: it cannot; says why.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--plot {path}: expected a file name that ends in {', '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install 'netstorm[plot]'")


def draw_plot(study: Study, path: Path) -> None:
    """Write the plot, of all schemes with times.

    Raises:
        UsageError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    times = {name: list(study.times(name).values()) for name in study.options.topologies}
    shown = sorted((name for name in times if times[name]), key=lambda name: -quartiles(times[name])[1])
    options, experiment = study.options, study.options.experiment
    figure = Figure(figsize=(8.0, 1.6 + 0.45 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    places = range(1, len(shown) + 1)
    for place, name in zip(places, shown, strict=True):
        q1, median, q3 = quartiles(times[name])
        axes.hlines(place, min(times[name]), max(times[name]), color=_BOX, linewidth=1)
        axes.barh(place, q3 - q1, left=q1, height=0.6, facecolor=_BOX, alpha=0.35, edgecolor=_BOX)
        axes.vlines(median, place - 0.3, place + 0.3, color=_BOX, linewidth=2)
        axes.plot(times[name], [place] * len(times[name]), ".", color=_BOX, markersize=4)
        summary = study.summary(name)
        if summary is not None and summary.of_optimum is not None:
            text = f" {summary.of_optimum:.0%} of the optimum"
            axes.annotate(text, (max(times[name]), place), va="center", fontsize=8, xytext=(4, 0),
                          textcoords="offset points")  # fmt: skip
    if study.optima:
        q1, median, q3 = quartiles(list(study.optima.values()))
        axes.axvspan(q1, q3, color=_OPTIMUM, alpha=0.15)
        axes.axvline(median, color=_OPTIMUM, linewidth=2, label="optimum: median and quartiles")
        axes.legend(loc="upper right", fontsize=8)
    medians = [quartiles(times[name])[1] for name in shown]
    if medians and max(medians) > _LOGARITHMIC_FROM * min(medians):
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0.0)
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * 1.25)  # room for the text beside the boxes
    axes.set_yticks(list(places), shown)
    axes.set_xlabel("time of a round, s")
    generated = f"{options.family} networks of {options.nodes} nodes, {len(options.seeds)} seeds"
    size, network = format_bytes(experiment.bytes), options.path or generated
    axes.set_title(f"{size} on {network} ({options.engine.value})", fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"--plot {path}: cannot be written: {error.strerror}") from None


# Starts and stops the worker process of `netstorm simulate`, and reads its answers with a deadline.

_READ: Final = 65_536
_ANSWER: Final = msgspec.json.Decoder(Answer)


class CaseTimeout(Exception):
    """A case has exceeded its time limit."""


class WorkerProcess:
    """A process that runs cases, one at a time. It is started when needed, and restarted after a case that
    exceeded its limit. It must be closed.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""

    def close(self) -> None:
        """Kill the process, if there is one, and its case."""
        process, self._process, self._received = self._process, None, b""
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def run(self, case: Case, limit_s: float) -> Iterator[Answer]:
        """Run a case, and yield the answers as they come; the last is `Ended` or `Failed`.

        Raises:
            CaseTimeout: the case has not ended `limit_s` after its network was loaded.
        """
        process = self._process = self._process or _start()
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(case) + b"\n")
        process.stdin.flush()
        deadline = clock.monotonic() + limit_s
        while True:
            line = self._line(process, deadline)
            if line is None:
                self.close()
                yield CaseFailed(message=_death(process.returncode), unfit=False)
                return
            answer = _ANSWER.decode(line)
            if isinstance(answer, CaseBegun):
                deadline = clock.monotonic() + limit_s
            yield answer
            if isinstance(answer, (CaseEnded, CaseFailed)):
                return

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """Return the next line, or None if the process has ended."""
        assert process.stdout is not None
        while b"\n" not in self._received:
            left = deadline - clock.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                self.close()
                raise CaseTimeout
            data = os.read(process.stdout.fileno(), _READ)
            if not data:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "netstorm.lab.commands.simulate_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the command, which then kills this process
    )


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        reason = "; memory may have run out" if code == -9 else ""
        return f"the simulating process was killed by signal {-code}{reason}"
    return f"the simulating process ended with exit code {code}; what it printed says why"
