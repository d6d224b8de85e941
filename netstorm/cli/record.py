"""`netstorm record`: statuses of jobs into a file. `netstorm report`: such a file as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from netstorm import clock
from netstorm.cli.status_source import CaOption, JobOption, SchedulerOption, StatusSource, TokenOption, reach
from netstorm.cli.support import exit_on_usage_error, size_text
from netstorm.dashboard.recording import StatusRecorder, page_data
from netstorm.errors import Unavailable, UsageError
from netstorm.observe.private_files import write_private
from netstorm.scheduler.status import JobStatus
from netstorm.units import parse_bytes, parse_duration

__all__ = ["record", "report"]

_TRIES: Final = 3
"""Attempts without an answer, after which the scheduler counts as ended, as in `netstorm top`."""
_LEAST_BYTES: Final = 100_000


def record(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="The recording; it is overwritten.")],
    *,
    scheduler: SchedulerOption = None,
    job: JobOption = None,
    every: Annotated[str, typer.Option(metavar="TIME", help="Time between two statuses.")] = "1s",
    limit: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Largest file. When it is full, every second status goes, and the time doubles.",
        ),
    ] = "256MB",
    token_file: TokenOption = None,
    ca: CaOption = None,
) -> None:
    """Record what a scheduler says of its jobs, for netstorm dashboard and report.

    \b
      netstorm record night.jsonl
      netstorm dashboard --file night.jsonl
      netstorm report night.jsonl -o night.html

    A line of the file is a status, as netstorm top --json prints it. Only its owner can read the file. The
    recording ends with Ctrl-C, or with the scheduler.

    The exit code is 0, or 2 if there is no job to record, it may not be seen, or the file cannot be written.
    """
    with exit_on_usage_error():
        every_s, most = parse_duration(every), parse_bytes(limit)
        if every_s < 0.1:
            raise UsageError(f"--every {every}: expected at least 0.1s; the scheduler has no fresher status")
        if most < _LEAST_BYTES:
            raise UsageError(f"--limit {limit}: expected at least {size_text(_LEAST_BYTES)}")
        source, _ = reach(scheduler, job, token_file=token_file, ca=ca)
        recorder, count = StatusRecorder(file, most), 0
        try:
            failed = 0
            while failed < _TRIES:
                try:
                    for each in _statuses(source, job):
                        recorder.add(each)
                        count += 1
                    failed = 0
                except Unavailable:
                    failed += 1
                clock.sleep(every_s)
            typer.echo(f"{source} answers no more: the job has probably ended.", err=True)
        except KeyboardInterrupt:
            pass
        finally:
            recorder.close()
        typer.echo(f"{file}: {count} statuses, {size_text(file.stat().st_size)}", err=True)


def _statuses(source: StatusSource, job: str | None) -> list[JobStatus]:
    """Return the status of a job, or of all that are there."""
    first = source.status(job)
    others = [line.job for line in first.jobs if line.job != first.job] if job is None else []
    return [first, *(source.status(other) for other in others)]


def report(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="A recording.")],
    *,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.html", help="The page.")],
) -> None:
    """Make one HTML file of a recording, which shows it in any browser.

    The page has everything inside, asks for nothing from any host, and runs no script but its own. Only its
    owner can read the file.

    The exit code is 0, or 2 if the recording cannot be read or the page not be written.
    """
    from netstorm.dashboard.page import report as page

    with exit_on_usage_error():
        text = page(page_data(file))
        try:
            write_private(output, text.encode())
        except OSError as error:
            raise UsageError(f"--output {output}: cannot be written: {error.strerror}") from None
        typer.echo(f"{output}: {size_text(len(text.encode()))}", err=True)
