"""Jobs on this machine: on loopback, with the cores shared among the nodes, or in an emulated WAN, each
rank in its own namespace and the scheduler in one of them.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from netstorm.cli.launch import supervisor
from netstorm.cli.launch.job import DASHBOARD, LaunchedJob, Process, start_message
from netstorm.cli.launch.shutdown import SCHEDULER, Member
from netstorm.cli.launch.variables import (
    FROM_ANOTHER_JOB,
    Master,
    free_port,
    given_or,
    threads_each,
    usual_port,
    variables_of_nodes,
)
from netstorm.errors import UsageError
from netstorm.settings import child_environment

if TYPE_CHECKING:
    from netstorm.lab.emulation.wan import Wan

__all__ = ["dashboard_process", "local_job", "scheduler_rank", "users_environment", "wan_job", "wan_line"]


# A job on this machine: on loopback, with the cores shared among the nodes.

_LOOPBACK: Final = "127.0.0.1"
SUPERVISOR: Final = (sys.executable, "-I", "-S", supervisor.__file__)
"""The command of a supervisor on this machine."""


def scheduler_process(
    supervisor: tuple[str, ...], environment: Mapping[str, str], port: int, ready_file: Path
) -> Process:
    """Return a scheduler that runs on this machine.

    Args:
        supervisor: the command of its supervisor.
        environment: its address and the number of nodes; a node's settings do no harm.
        port: 0: any free port.
        ready_file: it writes its address to this file.
    """
    words = [sys.executable, "-m", "netstorm", "scheduler"]
    words += ["--port", str(port), "--ready-file", str(ready_file), "--launched"]
    return Process(
        member=SCHEDULER,
        supervisor=supervisor,
        environment=child_environment(environment, DMLC_ROLE="scheduler", NETSTORM_RANK=None),
        start_message=start_message(command=words, folder=None, reads=True),
    )


def dashboard_process(
    environment: Mapping[str, str],
    beside_scheduler: Callable[[Sequence[str]], Sequence[str]] | None,
    listener: int | None,
    options: Sequence[str],
) -> Process:
    """Return a dashboard on this machine.

    Args:
        environment: names the token's file and the certificate, if any.
        beside_scheduler: as `LaunchedJob` has it.
        listener: file descriptor of the socket at which it listens; None: it opens one.
        options: how the scheduler is reached from where it is.
    """
    if beside_scheduler is not None:
        options = ("--through", shlex.join(beside_scheduler(("top", "--json", *options))))
    inherited = () if listener is None else (listener,)
    options = [*options, *(f"--inherited={number}" for number in inherited)]
    return Process(
        member=DASHBOARD,
        supervisor=SUPERVISOR,
        environment=child_environment(environment, DMLC_ROLE=None, NETSTORM_RANK=None),
        start_message=start_message(
            command=[sys.executable, "-m", "netstorm", "dashboard", *options], folder=None
        ),
        descriptors=inherited,
    )


def node_process(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    variables: Mapping[str, str | int],
    *,
    supervisor: tuple[str, ...] = SUPERVISOR,
) -> Process:
    """Return a node that runs on this machine.

    Args:
        command: its words.
        folder: its working directory.
        environment: as `users_environment` returns it.
        variables: as `variables_of_nodes` returns them, and others of this node alone.
        supervisor: the command of its supervisor.

    Raises:
        SettingsError: a value that the node would refuse.
    """
    own = child_environment(environment, **variables)
    own.setdefault("OMP_NUM_THREADS", str(threads_each(int(variables["DMLC_NUM_WORKER"]))))
    return Process(
        member=Member(int(variables["NETSTORM_RANK"])),
        supervisor=supervisor,
        environment=own,
        start_message=start_message(command=list(command), folder=str(folder)),
    )


def users_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that all nodes on this machine have in common.

    If NetStorm is in a virtual environment that is not activated (`.venv/bin/netstorm launch …`), its folder
    comes first in PATH: `python` in the command must be the interpreter that has NetStorm.

    What torchrun has set for a job around this one is left out.

    Raises:
        SettingsError: a variable that a node would refuse.
    """
    others = dict.fromkeys((*FROM_ANOTHER_JOB, "NETSTORM_RESTART"))
    environment = child_environment(None, **{**others, "DMLC_NODE_HOST": _LOOPBACK, **variables})
    activated = environment.get("VIRTUAL_ENV") or environment.get("CONDA_PREFIX")
    if sys.prefix != sys.base_prefix and not activated and "PATH" not in variables:
        folders = [str(Path(sys.prefix, "bin")), environment.get("PATH", os.defpath)]
        environment["PATH"] = os.pathsep.join(folders)
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment


def local_job(
    *,
    size: int,
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    port: int,
    sites: Sequence[str | None],
    ready_file: Path | None,
    scheduler_host: str = _LOOPBACK,
    torch_port: Callable[[], int] = free_port,
) -> LaunchedJob:
    """Return a job of a scheduler and nodes on this machine.

    Args:
        size: number of nodes.
        command, folder: each node's words, and its working directory.
        environment: as `users_environment` returns it.
        scheduler_host, port: the scheduler's; 0: any free port.
        sites: of each rank.
        ready_file: the scheduler writes its address to this file; None: it runs already, none is started.
        torch_port: returns a free port of this machine, for PyTorch's rank 0.

    Raises:
        SettingsError: a value that a node or the scheduler would refuse.
    """

    def nodes(chosen: int | None) -> list[Process]:
        master = given_or(environment, Master(address=_LOOPBACK, port=torch_port()))
        variables = variables_of_nodes(
            [_LOOPBACK] * size, sites, scheduler=scheduler_host, port=chosen or port or None, master=master
        )
        return [node_process(command, folder, environment, own) for own in variables]

    nodes(None)  # wrong values are found before anything is started
    hosts = dict.fromkeys(map(Member, range(size)), _LOOPBACK)
    job = LaunchedJob(size=size, scheduler=None, ready_file=ready_file, nodes=nodes, hosts=hosts)
    if ready_file is None:
        return job
    common = {"DMLC_PS_ROOT_URI": _LOOPBACK, "DMLC_NUM_WORKER": size, "DMLC_PS_ROOT_PORT": port or None}

    def scheduler(chosen: int | None) -> Process:
        own = child_environment(environment, **common)
        return scheduler_process(SUPERVISOR, own, chosen or port, ready_file)

    return dataclasses.replace(job, scheduler=scheduler(None), scheduler_at=scheduler)


# A job in an emulated WAN: each rank in its own namespace, the scheduler in one of them.


def scheduler_rank(text: str | None, size: int) -> int:
    """Return the rank in whose namespace the scheduler runs; 0 if `text` is None.

    Raises:
        UsageError: it is no rank.
    """
    if text is None:
        return 0
    if not text.isdecimal() or int(text) >= size:
        raise UsageError(f"--scheduler {text}: with --wan expected a rank, 0 to {size - 1}")
    return int(text)


def wan_job(
    *,
    wan: Wan,
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    port: int,
    sites: Sequence[str | None],
    scheduler_at: int,
    ready_file: Path | None,
    ipv6: bool = False,
) -> LaunchedJob:
    """Return a job whose processes run in the namespaces of `wan`, one node a rank. The changes in the
    network file begin when the nodes are started.

    Args:
        wan: a network that is up; the caller takes it down.
        command, folder: each node's words, and its working directory.
        environment: as `users_environment` returns it.
        port: the scheduler's; 0: any free port.
        sites, scheduler_at: the site of each rank; the rank in whose namespace the scheduler runs.
        ready_file: the scheduler writes its address to this file; None: it runs already, none is started.
        ipv6: all use the network's IPv6 addresses.

    Raises:
        SettingsError: a value that a node or the scheduler would refuse.
    """
    size = wan.network.size
    addresses = [wan.ipv6_address(rank) if ipv6 else wan.address(rank) for rank in range(size)]
    host = addresses[scheduler_at]

    def nodes(chosen_port: int | None) -> list[Process]:
        scheduler_port = chosen_port or port or None
        torch_port = usual_port(scheduler_port)  # rank 0 is alone in its namespace
        master = given_or(environment, Master(address=addresses[0], port=torch_port))
        variables = variables_of_nodes(addresses, sites, scheduler=host, port=scheduler_port, master=master)
        return [
            node_process(
                command,
                folder,
                environment,
                {**own, "DMLC_NODE_HOST": address},
                supervisor=tuple(wan.command(rank, SUPERVISOR)),
            )
            for rank, (own, address) in enumerate(zip(variables, addresses, strict=True))
        ]

    def started(chosen_port: int | None) -> list[Process]:
        made = nodes(chosen_port)
        wan.start_changes()
        return made

    nodes(None)  # wrong values are found before anything is started
    hosts = {Member(rank): wan.address(rank) for rank in range(size)}
    job = LaunchedJob(size=size, scheduler=None, ready_file=ready_file, nodes=started, hosts=hosts)
    if ready_file is None:
        return job

    common = {"DMLC_PS_ROOT_URI": host, "DMLC_NUM_WORKER": size, "DMLC_PS_ROOT_PORT": port or None}

    def scheduler(chosen_port: int | None) -> Process:
        return scheduler_process(
            tuple(wan.command(scheduler_at, SUPERVISOR)),
            child_environment(environment, DMLC_NODE_HOST=host, **common),
            chosen_port or port,
            ready_file,
        )

    return dataclasses.replace(
        job,
        scheduler=scheduler(None),
        scheduler_at=scheduler,
        beside_scheduler=lambda words: wan.command(scheduler_at, [sys.executable, "-m", "netstorm", *words]),
    )


# One line on an emulated network, which goes with every result made in it.


def wan_line(wan: Wan) -> str:
    """Return what a reader of results must know of the network they were made in."""
    return (
        f"an emulated network of {wan.network.size} nodes and {len(wan.network.links)} links; "
        f"backend: {wan.backend_why}; congestion control: {wan.congestion}"
    )
