"""A job on this machine: everything on loopback, its cores shared out."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from netstorm.cli.cores import threads_each
from netstorm.cli.launch import supervisor
from netstorm.cli.launch.job import Job, Process, node_variables, order_text
from netstorm.cli.launch.members import SCHEDULER, Member
from netstorm.settings import child_environment

__all__ = ["KEEPER", "local_job", "scheduler_process", "users_environment"]

_LOOPBACK: Final = "127.0.0.1"
KEEPER: Final = (sys.executable, "-I", "-S", supervisor.__file__)
"""The command that keeps a process of a job on this machine."""


def scheduler_process(
    keeper: tuple[str, ...], environment: Mapping[str, str], port: int, ready_file: Path
) -> Process:
    """Return a scheduler that runs on this machine.

    Args:
        keeper: the command that keeps it.
        environment: where it listens, and for how many nodes; a node's settings do no harm.
        port: 0: any that is free.
        ready_file: where it writes its address.
    """
    words = [sys.executable, "-m", "netstorm", "scheduler"]
    words += ["--port", str(port), "--ready-file", str(ready_file), "--print-outcome"]
    return Process(
        member=SCHEDULER,
        keeper=keeper,
        environment=child_environment(environment, DMLC_ROLE="scheduler", NETSTORM_RANK=None),
        order=order_text(command=words, folder=None),
    )


def users_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a node on this machine, but for what makes it this node.

    If NetStorm is in a virtual environment that is not activated (`.venv/bin/netstorm launch …`), it is for
    the nodes: `python` in the command means the one that has NetStorm.

    Raises:
        SettingsError: a variable that a node would refuse.
    """
    environment = child_environment(None, **{"DMLC_NODE_HOST": _LOOPBACK, **variables})
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
) -> Job:
    """Return a job of a scheduler and nodes on this machine.

    Args:
        size: how many nodes.
        command: of each node.
        folder: the nodes' working directory.
        environment: as `users_environment` returns it.
        port: the scheduler's; 0: any that is free.
        sites: of each rank.
        ready_file: where the scheduler writes its address; None: there is no scheduler, it runs already.
        scheduler_host: where, then.

    Raises:
        SettingsError: a value that a node or the scheduler would refuse.
    """
    common = {"DMLC_PS_ROOT_URI": _LOOPBACK, "DMLC_NUM_WORKER": size, "DMLC_PS_ROOT_PORT": port or None}

    def nodes(chosen_port: int | None) -> list[Process]:
        made = []
        for rank in range(size):
            variables = node_variables(
                rank=rank,
                size=size,
                host=scheduler_host,
                port=chosen_port or port or None,
                site=sites[rank],
            )
            own = child_environment(environment, **variables)
            own.setdefault("OMP_NUM_THREADS", str(threads_each(size)))
            made.append(
                Process(
                    member=Member(rank),
                    keeper=KEEPER,
                    environment=own,
                    order=order_text(command=list(command), folder=str(folder)),
                )
            )
        return made

    nodes(None)  # wrong values are found before anything is started
    scheduler = None
    if ready_file is not None:
        scheduler = scheduler_process(KEEPER, child_environment(environment, **common), port, ready_file)
    return Job(size=size, scheduler=scheduler, ready_file=ready_file, nodes=nodes)
