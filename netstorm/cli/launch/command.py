"""`netstorm launch`: the scheduler and all nodes of a job, on this machine or through ssh on others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from netstorm.cli.usage_errors import exit_on_usage_error

__all__ = ["CONTEXT", "launch"]

CONTEXT: Final = {"allow_interspersed_args": False}
"""For typer: what follows the command's name is the command's, with or without `--` before it."""


def launch(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND...", help="What each node runs.")
    ] = None,
    *,
    nodes: Annotated[
        int | None, typer.Option("-n", "--nodes", metavar="N", help="Number of nodes.", show_default=False)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="The scheduler's TCP port. Default: any free port; with --hosts DMLC_PS_ROOT_PORT.",
            show_default=False,
        ),
    ] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Site of the nodes: one name for all, or one for each rank (repeat, or a,b,c).",
        ),
    ] = None,
    topology: Annotated[
        str | None, typer.Option(metavar="NAME", help="Scheme that forms the trees: NETSTORM_TOPOLOGY.")
    ] = None,
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Network file to plan for: NETSTORM_NETWORK.")
    ] = None,
    wan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Emulate this network file on this machine, one namespace for each rank. Needs root.",
        ),
    ] = None,
    ipv6: Annotated[
        bool, typer.Option("--ipv6", help="With --wan: all use the network's IPv6 addresses.")
    ] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Variable for all processes; NAME alone: with its value in this environment.",
        ),
    ] = None,
    chdir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Working directory of the nodes. Default: the current one."),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.0, help="Time from SIGINT to SIGTERM, and from SIGTERM to SIGKILL."
        ),
    ] = 10.0,
    no_prefix: Annotated[
        bool, typer.Option("--no-prefix", help="Print output lines without the rank.")
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("-q", "--quiet", help="Print the nodes' output, and warnings and errors, but no more."),
    ] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write the output to DIR/rank-R.log and DIR/scheduler.log."),
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Host file: run on these hosts, through ssh. One host a line: HOST [slots=N] [site=NAME] "
            "[rank=R] [address=ADDRESS]; # begins a comment.",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="With --hosts: host of the scheduler; default: the first. With --wan: its rank; default: 0.",
        ),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Use the scheduler at this address (netstorm scheduler --jobs ...), and start none.",
        ),
    ] = None,
    job: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job: NETSTORM_JOB.")] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The job's key: NETSTORM_KEY_FILE. Default: a fresh one for this job; with --join none.",
            show_default=False,
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="With --hosts: interpreter that has NetStorm. Default: this one's path."
        ),
    ] = None,
    ssh: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="With --hosts: ssh with options, such as 'ssh -p 2222'."),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Start what has failed again, up to N times: a node of an elastic job, the scheduler, or "
            "all processes of a job that needs them all.",
        ),
    ] = 0,
    no_scheduler: Annotated[bool, typer.Option("--no-scheduler", hidden=True)] = False,
) -> None:
    """Start a scheduler and N nodes, and run the job to its end.

    \b
      netstorm launch -n 4 -- python train.py --epochs 3
      netstorm launch -n 4 --site a,a,b,b --topology star -- python train.py
      netstorm launch --hosts cluster.txt -- python train.py
      netstorm launch --wan network.yaml -- python train.py
      netstorm launch -n 2 --join 127.0.0.1:9091 --job mine -- python train.py

    Each node runs COMMAND with the DMLC_* variables of its rank, and those of PyTorch (RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). PyTorch's rank 0 listens on a free port, with
    --hosts 1000 above the scheduler's, or at --env MASTER_PORT=PORT. Output lines are printed after the rank.
    Unless OMP_NUM_THREADS is set, the nodes of a machine share its cores equally: N processes with a thread
    for each core would slow each other down.

    Connections are encrypted, with a key that is made for this job, and is in no file and on no command line.
    NETSTORM_SECURITY=off does without.

    Ctrl-C interrupts all nodes. Nodes that still run get SIGTERM after the grace time, and SIGKILL after
    another one; a second Ctrl-C takes the next step at once. When a node fails, the others have
    PS_HEARTBEAT_TIMEOUT and the grace time to end by themselves. No process that a node has started outlives
    the launcher.

    With --restarts N, what has failed is started again after 0.5 s, then 1 s, and so on up to 30 s. In an
    elastic job (NETSTORM_ELASTIC=MIN:MAX) that is the node alone, up to N times each, with the same rank;
    without a node that has failed more often the job goes on as long as MIN are left. A job that is not
    elastic cannot go on without a node: all its processes are started again, up to N times, and scripts
    resume from their checkpoints. A scheduler that is killed is started again alone, and goes on from its log
    (NETSTORM_STATE_DIR; with --hosts only if that is set). NETSTORM_RESTART says how often a node was started
    again.

    The exit code is that of the first failure (128 + the signal if a signal killed the node), 130 after
    Ctrl-C, 143 after SIGTERM unless all nodes then end with exit code 0, 78 if no process has joined the job,
    127 if the command is not found, 2 if the arguments are wrong.
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
                key=key,
                wan=wan,
                ipv6=ipv6,
                restarts=restarts,
                quiet=quiet,
            )
            code = given.run(scratch)
        except CommandError as error:
            print(f"netstorm: {error}", file=sys.stderr)
            code = error.exit_code
    raise typer.Exit(code)
