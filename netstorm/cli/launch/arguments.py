"""The arguments of `netstorm launch`, checked before anything is started."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from netstorm.cli.addresses import split_address
from netstorm.cli.launch.hostfile import as_ssh_takes_it, check_host, read_hostfile
from netstorm.cli.launch.job import Job, find_command
from netstorm.cli.launch.job_key import KEY_FILE, fresh_or_given, hold_key
from netstorm.cli.launch.job_run import run_job
from netstorm.cli.launch.local_job import local_job, users_environment
from netstorm.cli.launch.output.console import Console, open_standard_streams
from netstorm.cli.launch.restarts.whole_job import (
    for_attempt,
    run_with_restarts,
    state_folder,
)
from netstorm.cli.launch.shutdown import Shutdown
from netstorm.cli.launch.ssh_job import passed_on, ssh_job
from netstorm.cli.launch.variables.node import RESERVED
from netstorm.cli.launch.variables.pytorch import check_port
from netstorm.cli.launch.wan_job import scheduler_rank, wan_job
from netstorm.cli.wan_line import wan_line
from netstorm.errors import UsageError
from netstorm.settings import Settings, child_environment

__all__ = ["LaunchArguments"]


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
    wan: Path | None = None
    ipv6: bool = False
    join: str | None = None
    job: str | None = None
    restarts: int = 0
    key: Path | None = None
    quiet: bool = False

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
        variables = self._all_variables()
        key = fresh_or_given(child_environment(None, **variables), with_scheduler=self.with_scheduler)
        if key is not None and self.hosts is None:
            variables[KEY_FILE] = hold_key(key.file_text())
        if self.wan is not None:
            return self._run_in_a_wan(self.wan, variables, scratch)
        if self.ipv6:
            raise UsageError("--ipv6 is for --wan: elsewhere the hosts' addresses and names decide")
        job = (
            self._local(variables, scratch)
            if self.hosts is None
            else self._remote(variables, self.hosts, None if key is None else key.file_text())
        )
        return self._run(job, variables, scratch)

    def _run(self, job: Job, variables: dict[str, str], scratch: Path, *, spare: Collection[int] = ()) -> int:
        environment = child_environment(None, **variables)
        settings = _settings_of_rank_0(environment, job.size)  # checks for conflicts, too
        if self.log_folder is not None:
            try:
                self.log_folder.mkdir(0o700, parents=True, exist_ok=True)  # for this user alone
            except OSError as error:
                raise UsageError(f"--log-dir {self.log_folder}: cannot be made: {error}") from None
        console = Console(prefixes=self.prefixes, environment=environment)
        elastic = settings.elastic_range
        fewest = None if elastic is None else elastic[0]

        def attempt(count: int) -> Shutdown:
            state = None
            if self.restarts and job.scheduler is not None:
                state = state_folder(environment, scratch, count, is_local=self.hosts is None)
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
            )
            return shutdown

        # Nodes of an elastic job are started again one by one.
        return run_with_restarts(attempt, self.restarts if fewest is None else 0, console)

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
                raise UsageError(f"--{option} is for --hosts: without it everything runs on this machine")

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

    def _local(self, variables: dict[str, str], scratch: Path) -> Job:
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

    def _remote(self, variables: dict[str, str], hosts: Path, key: str | None) -> Job:
        if self.sites:
            raise UsageError("--site: with --hosts sites are written in the host file, as site=NAME")
        if self.port == 0:
            raise UsageError(
                "--port 0: nodes on other hosts must know the port before the scheduler chooses one"
            )
        placements = read_hostfile(hosts)
        if self.nodes is not None and self.nodes != len(placements):
            raise UsageError(f"-n {self.nodes}: {hosts} has {len(placements)} nodes; leave -n out")
        scheduler_host, port = self.scheduler_host, self.port
        if self.join is not None:
            scheduler_host, port = split_address(self.join, "--join")
        elif scheduler_host is not None:
            check_host(scheduler_host, "--scheduler")
            scheduler_host = as_ssh_takes_it(scheduler_host)
        environment = child_environment(None, **variables)
        ssh = shlex.split(self.ssh or "ssh") or ["ssh"]
        find_command(ssh, Path.cwd(), environment)
        if not self.command:
            find_command(self.command, self.folder, environment)
        return ssh_job(
            placements=placements,
            command=self.command,
            folder=str(self.folder),
            variables={
                name: value for name, value in passed_on(environment, variables).items() if name != KEY_FILE
            },
            scheduler_host=scheduler_host,
            port=port or _settings_of_rank_0(environment, len(placements)).scheduler_port,
            python=self.python or sys.executable,
            ssh=ssh,
            with_scheduler=self.with_scheduler,
            key=key,
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
            if self.hosts is None and not self.network.is_file():
                raise UsageError(f"--network {self.network}: no such file")
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
