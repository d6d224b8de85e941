"""`netstorm launch`: scheduler and nodes of a job, on this machine, or on others through ssh or Slurm."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from netstorm.cli.launch.hosts import (
    Placement,
    as_ssh_takes_it,
    check_host,
    passed_on,
    read_hostfile,
    remote_job,
    through_ssh,
)
from netstorm.cli.launch.job import (
    LaunchedJob,
    find_command,
    for_attempt,
    run_job,
    run_with_restarts,
    state_folder,
)
from netstorm.cli.launch.local_job import (
    dashboard_process,
    local_job,
    scheduler_rank,
    users_environment,
    wan_job,
    wan_line,
)
from netstorm.cli.launch.output import Console, open_standard_streams
from netstorm.cli.launch.shutdown import Shutdown
from netstorm.cli.launch.slurm import meeting_place, placements_in, through_srun
from netstorm.cli.launch.variables import KEY_FILE, RESERVED, check_port, fresh_or_given, hold_key
from netstorm.cli.support import exit_on_usage_error, has_dashboard, split_address
from netstorm.errors import UsageError
from netstorm.settings import Settings, child_environment

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
            help="The scheduler's TCP port. Default: any free port; with --hosts DMLC_PS_ROOT_PORT; with "
            "--slurm one that follows from the allocation's number.",
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
            help="Emulate this network file on this machine, one namespace for each rank. Needs root, or "
            "user namespaces.",
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
    slurm: Annotated[
        bool,
        typer.Option(
            "--slurm",
            help="Run on the nodes of this Slurm allocation (sbatch, salloc): as many ranks as it has tasks.",
        ),
    ] = False,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="With --hosts or --slurm: host of the scheduler; default: the first. With --wan: its rank; "
            "default: 0.",
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
            metavar="PATH",
            help="With --hosts or --slurm: interpreter that has NetStorm. Default: this one's path.",
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
    dashboard: Annotated[
        bool | None,
        typer.Option(
            "--dashboard/--no-dashboard",
            help="Serve a page here that shows the job, and end it with the job. Default: if output is a "
            "terminal, or with --slurm, and the extra netstorm[dashboard] is installed; never with --join.",
            show_default=False,
        ),
    ] = None,
    no_scheduler: Annotated[bool, typer.Option("--no-scheduler", hidden=True)] = False,
    page_socket: Annotated[int | None, typer.Option("--page-socket", hidden=True)] = None,
) -> None:
    """Start a scheduler and N nodes, and run the job to its end.

    \b
      netstorm launch -n 4 -- python train.py --epochs 3
      netstorm launch -n 4 --site a,a,b,b --topology star -- python train.py
      netstorm launch --hosts cluster.txt -- python train.py
      netstorm launch --slurm -- python train.py
      netstorm launch --wan network.yaml -- python train.py
      netstorm launch -n 2 --join 127.0.0.1:9091 --job mine -- python train.py

    Each node runs COMMAND with the DMLC_* variables of its rank, and those of PyTorch (RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). PyTorch's rank 0 listens on a free port, on other
    hosts 1000 above the scheduler's, or at --env MASTER_PORT=PORT. Output lines are printed after the rank.
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
    (NETSTORM_STATE_DIR; on other hosts only if that is set). NETSTORM_RESTART says how often a node was
    started again.

    The exit code is that of the first failure (128 + the signal if a signal killed the node), 130 after
    Ctrl-C, 143 after SIGTERM unless all nodes then end with exit code 0, 78 if no process has joined the job,
    127 if the command is not found, 2 if the arguments are wrong.
    """
    from netstorm.cli.launch.job import CommandError
    from netstorm.cli.support import scratch_folder

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
                slurm=slurm,
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
                dashboard=dashboard,
                page_socket=page_socket,
            )
            code = given.run(scratch)
        except CommandError as error:
            print(f"netstorm: {error}", file=sys.stderr)
            code = error.exit_code
    raise typer.Exit(code)


# The arguments of `netstorm launch`, checked before anything is started.


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchArguments:
    """The command line's arguments; None or empty: not given. `netstorm launch --help` explains each."""

    command: tuple[str, ...]
    nodes: int | None
    port: int | None
    sites: tuple[str, ...]
    topology: str | None
    network: Path | None
    variables: tuple[str, ...]
    folder: Path
    grace_s: float
    prefixes: bool
    log_folder: Path | None
    hosts: Path | None
    scheduler_host: str | None
    python: str | None
    ssh: str | None
    with_scheduler: bool
    slurm: bool = False
    wan: Path | None = None
    ipv6: bool = False
    join: str | None = None
    job: str | None = None
    restarts: int = 0
    key: Path | None = None
    quiet: bool = False
    dashboard: bool | None = None
    page_socket: int | None = None

    def run(self, scratch: Path) -> int:
        """Run the job to its end, and return the exit code.

        Args:
            scratch: folder for temporary files.

        Raises:
            UsageError: an argument is wrong.
            CommandError: the command cannot be run.
        """
        open_standard_streams()
        if self.join is not None:
            self._check_join()
        if self.wan is not None:
            self._run_again_without_root()
        variables = self._all_variables()
        key = fresh_or_given(child_environment(None, **variables), with_scheduler=self.with_scheduler)
        if self.slurm and (self.hosts is not None or self.wan is not None):
            raise UsageError("--slurm runs on the allocation's nodes: it goes with neither --hosts nor --wan")
        if key is not None and not self._is_remote:
            variables[KEY_FILE] = hold_key(key.file_text())
        if self.wan is not None:
            return self._run_in_a_wan(self.wan, variables, scratch)
        if self.ipv6:
            raise UsageError("--ipv6 is for --wan: elsewhere the hosts' addresses and names decide")
        job = (
            self._remote(variables, None if key is None else key.file_text())
            if self._is_remote
            else self._local(variables, scratch)
        )
        return self._run(job, variables, scratch)

    @property
    def _is_remote(self) -> bool:
        return self.slurm or self.hosts is not None

    def _run(
        self, job: LaunchedJob, variables: dict[str, str], scratch: Path, *, spare: Collection[int] = ()
    ) -> int:
        environment = child_environment(None, **variables)
        settings = _settings_of_rank_0(environment, job.size)  # checks for conflicts, too
        if self.log_folder is not None:
            try:
                self.log_folder.mkdir(0o700, parents=True, exist_ok=True)  # for this user alone
            except OSError as error:
                raise UsageError(f"--log-dir {self.log_folder}: cannot be made: {error.strerror}") from None
        console = Console(prefixes=self.prefixes, environment=environment)
        dashboard = None
        if self._has_dashboard():
            dashboard = partial(dashboard_process, environment, job.beside_scheduler, self.page_socket)
        elastic = settings.elastic_range
        fewest = None if elastic is None else elastic[0]

        def attempt(count: int) -> Shutdown:
            state = None
            if self.restarts and job.scheduler is not None:
                state = state_folder(environment, scratch, count, is_local=not self._is_remote)
            shutdown = Shutdown(
                job.size,
                grace_s=self.grace_s,
                failure_timeout_s=settings.heartbeat_timeout_s + self.grace_s,
                hosts=job.hosts,
                is_remote=job.is_remote,
                tells_begin=job.scheduler is not None,
                restarts=self.restarts,
                fewest=fewest,
                scheduler_restarts=state is not None,
            )
            run_job(
                for_attempt(job, count, state),
                shutdown,
                console,
                self.log_folder,
                quiet=self.quiet,
                spare=spare,
                dashboard=dashboard,
            )
            return shutdown

        # Nodes of an elastic job are started again one by one.
        return run_with_restarts(attempt, self.restarts if fewest is None else 0, console)

    def _has_dashboard(self) -> bool:
        """Return whether to serve a page: by default for a person, who would see its address.

        A batch job's output is where its user looks for the address.
        """
        if self.dashboard is None:
            seen = self.slurm or all(map(os.isatty, (1, 2)))
            return self.with_scheduler and has_dashboard() and seen and not self.quiet
        if self.dashboard and not self.with_scheduler:
            raise UsageError(
                "--dashboard does not go with --join; of other schedulers: "
                "netstorm dashboard --scheduler HOST:PORT"
            )
        if self.dashboard and not has_dashboard():
            raise UsageError("--dashboard needs Starlette and uvicorn: pip install 'netstorm[dashboard]'")
        return self.dashboard

    def _run_again_without_root(self) -> None:
        """Become a launcher in namespaces of its own if this one may not emulate networks and that one may.

        What browsers connect to is outside: its page listens there.
        """
        from netstorm.lab.emulation.namespaces import without_root

        before = without_root()
        if not before or sys.argv[1:2] != ["launch"]:  # a program's own call is not to replace the program
            return
        options = []
        if self._has_dashboard():
            from netstorm.dashboard.server import open_socket

            listener = open_socket("127.0.0.1", None).detach()
            os.set_inheritable(listener, True)
            options = [f"--page-socket={listener}"]
        words = [*before, sys.executable, "-m", "netstorm", "launch", *options, *sys.argv[2:]]
        os.execvp(words[0], words)

    def _run_in_a_wan(self, file: Path, variables: dict[str, str], scratch: Path) -> int:
        """Make the emulated network, run the job in it, and take it away again."""
        from netstorm.lab.emulation.wan import Wan
        from netstorm.topology.files import load_network

        if self.hosts is not None:
            raise UsageError("--wan emulates a network on this machine: it does not go with --hosts")
        self._refuse_host_options(("python", self.python), ("ssh", self.ssh))
        network = load_network(file)
        if self.nodes not in {None, network.size}:
            raise UsageError(f"-n {self.nodes}: {file} has {network.size} nodes; leave -n out")
        scheduler_at = scheduler_rank(self.scheduler_host, network.size)
        environment = self._checked_environment(variables)
        sites = self._sites(network.size) if self.sites else [node.site or None for node in network.nodes]
        with Wan.up(network, start_changes=False) as wan:
            if not self.quiet:
                print(f"netstorm: {wan_line(wan)}", file=sys.stderr)
            job = wan_job(
                wan=wan,
                command=self.command,
                folder=self.folder,
                environment=environment,
                port=self.port or 0,
                sites=sites,
                scheduler_at=scheduler_at,
                ready_file=scratch / "scheduler" if self.with_scheduler else None,
                ipv6=self.ipv6,
            )
            return self._run(job, variables, scratch, spare={wan.pid})

    def _refuse_host_options(self, *options: tuple[str, str | None]) -> None:
        for option, value in options:
            if value is not None:
                raise UsageError(
                    f"--{option} is for --hosts or --slurm: without one everything runs on this machine"
                )

    def _check_join(self) -> None:
        """Refuse options of a scheduler, which is not started here."""
        for option, value in (
            ("--port", self.port),
            ("--scheduler", self.scheduler_host),
            ("--network", self.network),
            ("--wan", self.wan),
        ):
            if value is not None:
                raise UsageError(f"{option} does not go with --join: that scheduler runs already")

    def _checked_environment(self, variables: dict[str, str]) -> dict[str, str]:
        """Return a node's environment, after checking the folder and the command."""
        if not self.folder.is_dir():
            raise UsageError(f"--chdir {self.folder}: no such folder")
        environment = users_environment(variables)
        find_command(self.command, self.folder, environment)
        return environment

    def _local(self, variables: dict[str, str], scratch: Path) -> LaunchedJob:
        self._refuse_host_options(
            ("scheduler", self.scheduler_host), ("python", self.python), ("ssh", self.ssh)
        )
        if self.nodes is None:
            raise UsageError("how many nodes? As in: netstorm launch -n 4 -- python train.py")
        if self.nodes < 1:
            raise UsageError(f"-n {self.nodes}: expected at least 1 node")
        environment = self._checked_environment(variables)
        host, port = (
            ("127.0.0.1", self.port or 0) if self.join is None else split_address(self.join, "--join")
        )
        return local_job(
            size=self.nodes,
            command=self.command,
            folder=self.folder,
            environment=environment,
            scheduler_host=host,
            port=port,
            sites=self._sites(self.nodes),
            ready_file=scratch / "scheduler" if self.with_scheduler else None,
        )

    def _remote(self, variables: dict[str, str], key: str | None) -> LaunchedJob:
        if self.port == 0:
            raise UsageError(
                "--port 0: nodes on other hosts must know the port before the scheduler chooses one"
            )
        environment = child_environment(None, **variables)
        connect, placements = self._placements(environment)
        if self.nodes is not None and self.nodes != len(placements):
            where = "the allocation" if self.hosts is None else self.hosts
            raise UsageError(f"-n {self.nodes}: {where} has {len(placements)} nodes; leave -n out")
        settings = _settings_of_rank_0(environment, len(placements))
        scheduler_host, port = self.scheduler_host, self.port
        if self.join is not None:
            scheduler_host, port = split_address(self.join, "--join")
        elif scheduler_host is not None:
            check_host(scheduler_host, "--scheduler")
            scheduler_host = as_ssh_takes_it(scheduler_host)
        if self.slurm and self.join is None:
            own_port, job = meeting_place(environment)
            if settings.source("scheduler_port") == "default":
                port = port or own_port
            if settings.source("job") == "default":
                variables["NETSTORM_JOB"] = job
        if not self.command:
            find_command(self.command, self.folder, environment)
        return remote_job(
            placements=placements,
            command=self.command,
            folder=str(self.folder),
            variables={
                name: value for name, value in passed_on(environment, variables).items() if name != KEY_FILE
            },
            scheduler_host=scheduler_host,
            port=port or settings.scheduler_port,
            python=self.python or sys.executable,
            connect=connect,
            with_scheduler=self.with_scheduler,
            key=key,
            is_ssh=not self.slurm,
        )

    def _placements(
        self, environment: Mapping[str, str]
    ) -> tuple[Callable[[str, Sequence[str]], tuple[str, ...]], tuple[Placement, ...]]:
        """Return how hosts are reached, and which rank runs on which."""
        if self.hosts is not None:
            if self.sites:
                raise UsageError("--site: with --hosts sites are written in the host file, as site=NAME")
            ssh = shlex.split(self.ssh or "ssh") or ["ssh"]
            find_command(ssh, Path.cwd(), environment)
            return partial(through_ssh, ssh), read_hostfile(self.hosts)
        if self.ssh is not None:
            raise UsageError("--ssh is for --hosts: with --slurm srun starts all processes")
        find_command(through_srun("", ()), Path.cwd(), environment)
        placements = placements_in(environment)
        sites = self._sites(len(placements))
        return through_srun, tuple(
            replace(placement, site=site) for placement, site in zip(placements, sites, strict=True)
        )

    def _all_variables(self) -> dict[str, str]:
        """Return the variables that all processes get besides this process's environment."""
        variables: dict[str, str] = {}
        here = child_environment()
        for text in self.variables:
            name, equals, value = text.partition("=")
            if not name or (not equals and name not in here):
                raise UsageError(f"--env {text!r}: expected NAME=VALUE, or a NAME that is set here")
            if name in RESERVED:
                raise UsageError(f"--env {text!r}: {name} is set by the launcher itself, for each process")
            variables[name] = value if equals else here[name]
        check_port(variables)
        if self.key is not None:
            variables[KEY_FILE] = str(self.key.absolute())
        if self.job is not None:
            variables["NETSTORM_JOB"] = self.job
        if self.topology is not None:
            variables["NETSTORM_TOPOLOGY"] = self.topology
        if self.network is not None:
            if not self._is_remote and not self.network.is_file():
                found = "that is no file" if self.network.exists() else "no such file"
                raise UsageError(f"--network {self.network}: {found}")
            variables["NETSTORM_NETWORK"] = str(self.network.absolute())
        return variables

    def _sites(self, size: int) -> list[str | None]:
        names = [name for text in self.sites for name in text.split(",")]
        if len(names) not in {0, 1, size}:
            raise UsageError(f"--site: {len(names)} names for {size} nodes; give one for all, or one a rank")
        return [*names] if len(names) == size else [names[0] if names else None] * size


def _settings_of_rank_0(environment: Mapping[str, str], size: int) -> Settings:
    own = {"DMLC_ROLE": "worker", "NETSTORM_RANK": "0", "DMLC_NUM_WORKER": str(size)}
    return Settings.from_environment({**environment, **own})
