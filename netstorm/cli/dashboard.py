"""`netstorm dashboard`: jobs in a browser, live or from a recording."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from netstorm.addresses import host_port, is_loopback
from netstorm.cli.status_source import CaOption, PipedStatus, SchedulerOption, TokenOption, reach
from netstorm.cli.support import exit_on_usage_error, has_dashboard
from netstorm.errors import UsageError
from netstorm.scheduler.status import JobStatus
from netstorm.settings import Settings, foreign_variable

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from netstorm.dashboard.server import Feed, PageGuard

__all__ = ["dashboard"]


def dashboard(
    *,
    scheduler: SchedulerOption = None,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Show this recording of netstorm record, with a slider for its time."
        ),
    ] = None,
    through: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Show what this command prints, such as 'ssh HOST netstorm top --json'.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on.", show_default=True)
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="Port to listen on; 0: any free one. Default: 8787, or any free one if that is taken.",
            show_default=False,
        ),
    ] = None,
    token_file: TokenOption = None,
    ca: CaOption = None,
    inherited: Annotated[int | None, typer.Option("--inherited", hidden=True)] = None,
) -> None:
    """Show jobs in a browser: the network, trees, curves and events, live or recorded.

    The first line says the address. The page shows all jobs of the scheduler, and needs nothing from any
    other host. It is served until Ctrl-C, and stays when the job ends.

    If --host is no loopback address, or the scheduler has a token or is reached with --through, the address
    has a token of its own: only who has the whole address sees the page. NETSTORM_WEB_CERT and
    NETSTORM_WEB_KEY encrypt it.

    The exit code is 0 after Ctrl-C, or 2 if there is nothing to show, or it may not be seen.
    """
    with exit_on_usage_error():
        if not has_dashboard():
            raise UsageError("the dashboard needs Starlette and uvicorn: pip install 'netstorm[dashboard]'")
        from netstorm.dashboard.server import PageGuard, open_socket, serve

        given = [("--file", file), ("--scheduler", scheduler), ("--through", through)]
        if len(chosen := [f"{name} {value}" for name, value in given if value is not None]) > 1:
            raise UsageError(f"{' and '.join(chosen)}: expected one of them")
        settings = Settings.from_environment(elastic="")
        if file is not None:
            make, secret = _replay(file), False
        elif through is not None:
            make, secret = _live(PipedStatus(through).status), True
        else:
            source, _ = reach(scheduler, token_file=token_file, ca=ca)
            make, secret = _live(source.status), source.has_token
        token = secrets.token_urlsafe(24) if secret or not is_loopback(host) else None
        guard = PageGuard(token, (host, settings.node_host))
        listener = open_socket(host, port) if inherited is None else socket.socket(fileno=inherited)
        scheme = "https" if settings.web_cert else "http"
        shown = settings.node_host or os.uname().nodename if host in {"0.0.0.0", "::"} else host  # noqa: S104
        number = listener.getsockname()[1]
        address = host_port(shown, number)
        tls = {"certificate": settings.web_cert or None, "key": settings.web_key or None}
        with contextlib.suppress(KeyboardInterrupt):  # which may come before the server listens to signals
            link = "" if token is None else f"?token={token}"
            typer.echo(f"netstorm dashboard: {scheme}://{address}/{link}")
            if is_loopback(host) and (way := _ssh_here(number)):
                typer.echo(f"netstorm dashboard: from another machine first: {way}")
            serve(listener, lambda: make(guard), **tls)


def _ssh_here(port: int) -> str:
    """Return the command that makes a loopback port of this machine one of the user's; empty: it is one."""
    here, login = os.uname().nodename, foreign_variable("SLURM_SUBMIT_HOST")
    if login is None and foreign_variable("SSH_CONNECTION") is None:
        return ""
    jump = f" -J {login}" if login not in {None, here} else ""
    return f"ssh -N -L {port}:127.0.0.1:{port}{jump} {here}"


def _live(
    read: Callable[[str | None], JobStatus],
) -> Callable[[PageGuard], tuple[Starlette, Feed | None]]:
    from netstorm.dashboard.server import Feed, live_app

    def make(guard: PageGuard) -> tuple[Starlette, Feed | None]:
        feed = Feed(read)
        return live_app(feed, guard), feed

    return make


def _replay(file: Path) -> Callable[[PageGuard], tuple[Starlette, Feed | None]]:
    from netstorm.dashboard.recording import page_data
    from netstorm.dashboard.server import replay_app

    records = page_data(file)
    return lambda guard: (replay_app(records, guard), None)
