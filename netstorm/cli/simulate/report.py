"""The output of `netstorm simulate`: a table of times, and the reasons why some are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from netstorm import clock
from netstorm.cli.simulate.study import Study
from netstorm.simulation.summary import quartiles
from netstorm.units import format_bytes, format_duration

__all__ = ["progress", "show"]

_LINE_EVERY_S: Final = 10.0
"""Time between two progress lines, where standard error is no terminal."""


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call before each case: it shows a bar on a terminal, else a line at times."""
    console = Console(stderr=True)
    if not console.is_terminal:
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
    if study.optima:
        q1, median, q3 = quartiles(list(study.optima.values()))
        times = "-" if star is None else f"{star.median_s / median:.2f}"
        cells = (f"{median:.4g}", f"{q1:.4g} - {q3:.4g}", "1.00", times, "-", str(len(study.optima)))
        table.add_row("(optimum)", *cells, style="dim")
    return table


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
