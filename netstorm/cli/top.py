"""`netstorm top`: a live view of a running job."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from netstorm.cli.status_source import CaOption, JobOption, SchedulerOption, StatusSource, TokenOption, find
from netstorm.cli.support import exit_on_usage_error
from netstorm.errors import Unavailable
from netstorm.scheduler.status import JobStatus

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["top"]


_EVERY_S: Final = 1.0
_WIDE: Final = 200
"""Columns of output that no terminal shows, unless COLUMNS says otherwise."""
_TRIES: Final = 3
"""Attempts without an answer, after which the job counts as ended."""


def top(
    *,
    scheduler: SchedulerOption = None,
    job: JobOption = None,
    token_file: TokenOption = None,
    ca: CaOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON each second.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print the present state, and exit.")] = False,
) -> None:
    """Show a running job: nodes, links, trees, times, and why the policy changed.

    The view is updated each second, until Ctrl-C or the end of the job. The fields of the JSON are
    described in docs/guides/watching-a-job.md.

    The exit code is 0, or 2 if there is no job to watch, or it may not be seen.
    """
    with exit_on_usage_error():
        source, status = find(scheduler, job, token_file=token_file, ca=ca)
        if as_json:
            _repeat(source, status, _print_json, once=once)
        else:
            _show(source, status, once=once)


def _show(source: StatusSource, status: JobStatus, *, once: bool) -> None:
    from rich.console import Console

    from netstorm.cli.top_view import view
    from netstorm.scheduler.bound import RoundBounds

    console = Console()
    if not console.file.isatty():  # a file or a pipe has no width: nothing is to be cut
        console.width = shutil.get_terminal_size((_WIDE, 0)).columns
    if once or not console.file.isatty():
        bounds = RoundBounds()
        _repeat(
            source, status, lambda now: console.print(view(now, console.width, bounds.of(now))), once=once
        )
    else:
        _live(console, source, status)


def _live(console: Console, source: StatusSource, status: JobStatus) -> None:
    """Show the view on a screen of its own; what was shown last stays when the job has ended."""
    from rich.live import Live

    from netstorm.cli.top_view import view
    from netstorm.scheduler.bound import RoundBounds

    last, bounds = status, RoundBounds()
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def show(now: JobStatus) -> None:
            nonlocal last
            last = now
            live.update(view(now, console.width, bounds.of(now)), refresh=True)

        ended = _repeat(source, status, show, once=False)
    if ended:
        console.print(view(last, console.width, bounds.of(last)))
        console.print(f"{source} answers no more: the job has probably ended.", highlight=False)


def _print_json(status: JobStatus) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(status).decode())


def _repeat(
    source: StatusSource, status: JobStatus, show: Callable[[JobStatus], None], *, once: bool
) -> bool:
    """Show the status each second. Return whether the job ended; if not, Ctrl-C did."""
    from netstorm import clock

    failed = 0
    try:
        show(status)
        while not once and failed < _TRIES:
            clock.sleep(_EVERY_S)
            try:
                status = source.status()
            except Unavailable:
                failed += 1
            else:
                failed = 0
                show(status)
    except KeyboardInterrupt:
        return False
    return not once
