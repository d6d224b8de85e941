"""`netstorm launch`: the scheduler and all nodes of a job, on this machine or through ssh on others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from netstorm.cli.failing import exit_on_usage_error

__all__ = ["CONTEXT", "launch"]

CONTEXT: Final = {"allow_interspersed_args": False}
"""For typer: what follows the command's name belongs to the command, with or without `--` before it."""


def launch(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND...", help="What each node runs.")
    ] = None,
    *,
    nodes: Annotated[
        int | None, typer.Option("-n", "--nodes", metavar="N", help="How many nodes.", show_default=False)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="The scheduler's TCP port. Default: any that is free; with --hosts DMLC_PS_ROOT_PORT.",
            show_default=False,
        ),
    ] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="The nodes' site: one for all, or one a rank (repeat, or a,b,c)."),
    ] = None,
    topology: Annotated[
        str | None, typer.Option(metavar="NAME", help="How trees are formed: NETSTORM_TOPOLOGY.")
    ] = None,
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The network to plan for: NETSTORM_NETWORK.")
    ] = None,
    wan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Emulate this network on this machine, and run each rank in a namespace of it (needs root).",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="A variable for all processes; NAME alone: with the value it has here."
        ),
    ] = None,
    chdir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The nodes' working directory. Default: this one.")
    ] = None,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="From SIGINT to SIGTERM, and on to SIGKILL.")
    ] = 10.0,
    no_prefix: Annotated[bool, typer.Option("--no-prefix", help="Print lines without their rank.")] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write each process's lines to DIR/rank-R.log and DIR/scheduler.log."
        ),
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Run on other hosts, through ssh. One a line: HOST [slots=N] [site=NAME] [rank=R] "
            "[address=ADDRESS]; # begins a comment.",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="With --hosts: the scheduler's host. Default: the first. With --wan: its rank; 0.",
        ),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Join the scheduler that runs there (netstorm scheduler --jobs ...), and start none.",
        ),
    ] = None,
    job: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job: NETSTORM_JOB.")] = None,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="With --hosts: the interpreter there that has NetStorm. Default: as here."
        ),
    ] = None,
    ssh: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="With --hosts: ssh and options, as in 'ssh -p 2222'."),
    ] = None,
    no_scheduler: Annotated[bool, typer.Option("--no-scheduler", hidden=True)] = False,
) -> None:
    """Start a scheduler and N nodes, and see them to their end.

    \b
      netstorm launch -n 4 -- python train.py --epochs 3
      netstorm launch -n 4 --site a,a,b,b --topology star -- python train.py
      netstorm launch --hosts cluster.txt -- python train.py
      netstorm launch --wan network.yaml -- python train.py
      netstorm launch -n 2 --join 127.0.0.1:9091 --job mine -- python train.py

    Each node runs COMMAND with the DMLC_* variables that tell it who it is. Its lines are printed behind its
    rank. Unless OMP_NUM_THREADS is set, the nodes of a machine get equal shares of its cores: N processes
    that each start a thread for every core slow each other down.

    Ctrl-C interrupts all nodes; those that go on get SIGTERM after the grace, and SIGKILL after another one;
    pressed again, it takes the next step at once. When a node fails, the others have PS_HEARTBEAT_TIMEOUT
    and the grace to end by themselves. Nothing that a node has started outlives the launcher.

    The exit code is the first failure's (128 + the signal, for a node that a signal killed), 130 after
    Ctrl-C, 127 if there is no such command, 2 if the arguments are wrong.
    """
    from netstorm.cli.launch.arguments import LaunchArguments
    from netstorm.cli.launch.job import CommandError
    from netstorm.cli.scratch import scratch_folder

    with exit_on_usage_error(), scratch_folder() as scratch:
        try:
            given = LaunchArguments(
                command=tuple(command or ()),
                nodes=nodes,
                port=port,
                sites=tuple(site or ()),
                topology=topology,
                network=network,
                variables=tuple(env or ()),
                folder=Path.cwd() / (chdir or ""),
                grace_s=grace,
                prefixes=not no_prefix,
                log_folder=log_dir,
                hosts=hosts,
                scheduler_host=scheduler,
                python=python,
                ssh=ssh,
                with_scheduler=not no_scheduler and join is None,
                join=join,
                job=job,
                wan=wan,
            )
            code = given.run(scratch)
        except CommandError as error:
            print(f"netstorm: {error}", file=sys.stderr)
            code = error.exit_code
    raise typer.Exit(code)
