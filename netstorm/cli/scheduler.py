"""`netstorm scheduler`: the scheduler of one job, or of several."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from netstorm.cli.support import exit_on_usage_error

__all__ = ["scheduler"]


def scheduler(
    *,
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Host name or address at which nodes reach it: DMLC_PS_ROOT_URI."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=65535, help="TCP port: DMLC_PS_ROOT_PORT. 0: any free port."),
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Address to listen on: NETSTORM_BIND. *: all."),
    ] = None,
    num_workers: Annotated[
        int | None, typer.Option("-n", "--num-workers", metavar="N", help="Number of nodes: DMLC_NUM_WORKER.")
    ] = None,
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Network file to plan for: NETSTORM_NETWORK.")
    ] = None,
    topology: Annotated[
        str | None, typer.Option(metavar="NAME", help="Scheme that forms the trees: NETSTORM_TOPOLOGY.")
    ] = None,
    job: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job: NETSTORM_JOB.")] = None,
    jobs: Annotated[
        str | None,
        typer.Option(
            metavar="N|forever",
            help="Number of jobs that it serves, at once or in turn: NETSTORM_JOBS. Nodes name their job. "
            "Default: 1.",
        ),
    ] = None,
    sntp_port: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="UDP port of the time server: NETSTORM_SNTP_PORT."),
    ] = None,
    join_timeout: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Longest wait for all nodes: NETSTORM_JOIN_TIMEOUT."),
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write HOST:PORT here once nodes can connect.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for a log to restart from: NETSTORM_STATE_DIR."),
    ] = None,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="Take an elastic job over when its nodes have lost their scheduler: NETSTORM_STANDBY. The "
            "address must be one of NETSTORM_STANDBYS.",
        ),
    ] = False,
    recover: Annotated[
        bool,
        typer.Option(
            "--recover",
            help="Take the job of the nodes at --peers over, whose scheduler's machine is gone. All other "
            "settings as those of the scheduler before.",
        ),
    ] = False,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...",
            help="Addresses of nodes, one that is alive is enough: NETSTORM_RECOVER_PEERS.",
        ),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The job's key: NETSTORM_KEY_FILE.")
    ] = None,
    launched: Annotated[bool, typer.Option("--launched", hidden=True)] = False,
    beside_ranks: Annotated[bool, typer.Option("--beside-ranks", hidden=True)] = False,
) -> None:
    """Run the scheduler of one job until all its nodes have left; with --jobs, of several.

    Options win over variables; all other settings are variables (see `netstorm env`). The scheduler prints
    its address and, every few seconds, the nodes that it waits for.

    With --jobs each job has its own nodes, ranks and end, and its name may be used again. Its first node
    gives the number of nodes, unless DMLC_NUM_WORKER is set for the scheduler.

    With --recover it takes a running job over, at an address that no node knows: its nodes have lost the
    scheduler before, and wait (NETSTORM_RECOVERABLE, --state or NETSTORM_STANDBYS there).

    The exit code is 0 if all jobs ended well, 1 if one failed, 2 if none could begin, and 130 or 143 if
    SIGINT or SIGTERM stopped one; its nodes are notified.
    """
    from netstorm.cli.support import BEGUN, came_line, first_failure_line
    from netstorm.errors import UsageError
    from netstorm.scheduler.process.scheduler_process import Launcher, run_scheduler
    from netstorm.settings import Settings

    with exit_on_usage_error():
        if recover and peers is None and not Settings.from_environment(role="scheduler").recover_peers:
            raise UsageError("--recover without --peers: expected addresses of nodes, such as host2:40001")
        if peers is not None and not recover:
            raise UsageError(
                f"--peers {peers} without --recover: expected both, to take over the job of nodes"
            )
        settings = Settings.from_environment(
            role="scheduler",
            scheduler_host=host,
            scheduler_port=port or None,
            bind_host=bind,
            num_workers=num_workers,
            network_file=None if network is None else str(network),
            topology=topology,
            job=job,
            jobs="0" if jobs == "forever" else jobs,
            state_dir=None if state is None else str(state),
            sntp_port=sntp_port,
            join_timeout_s=join_timeout,
            standby=standby or None,
            recover_peers=peers,
            key_file=None if key is None else str(key),
        )
        code = run_scheduler(
            settings,
            any_port=port == 0,
            ready_file=ready_file,
            print_line=_print_line,
            launcher=Launcher(
                words=0,
                on_came=lambda rank: _print_line(came_line(rank)),
                on_begun=lambda: _print_line(BEGUN),
                on_outcome=lambda outcome: _print_line(first_failure_line(outcome.rank, outcome.text)),
            )
            if launched
            else None,
            beside_ranks=launched or beside_ranks,
        )
    raise typer.Exit(code)


def _print_line(line: str) -> None:
    with contextlib.suppress(OSError):  # the reader of our output may be gone; the job goes on
        typer.echo(line)
