"""What `netstorm launch` starts: the processes of a job, and how each is started."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from netstorm.cli.launch.members import SCHEDULER, Member
from netstorm.cli.launch.supervisor import CANNOT_RUN, NOT_FOUND
from netstorm.errors import UsageError

__all__ = ["RESERVED", "CommandError", "Job", "Process", "find_command", "node_variables", "order_text"]

RESERVED: Final = (
    "DMLC_ROLE",
    "DMLC_PS_ROOT_URI",
    "DMLC_PS_ROOT_PORT",
    "DMLC_NUM_WORKER",
    "NETSTORM_RANK",
)
"""Variables that only the launcher can know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a job, run by a keeper."""

    member: Member
    keeper: tuple[str, ...]
    """Command that starts its keeper from here."""
    environment: Mapping[str, str]
    """Of that command."""
    order: bytes
    """First line of the keeper's standard input."""

    @property
    def label(self) -> str:
        """What its lines begin with."""
        return "scheduler" if self.member == SCHEDULER else str(self.member)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All processes of a job."""

    size: int
    """How many nodes."""
    scheduler: Process | None
    ready_file: Path | None
    """Nodes are started once the scheduler has written HOST:PORT here; None: at once."""
    nodes: Callable[[int | None], Sequence[Process]]
    """Made of the scheduler's port, if it had to choose one."""
    hosts: Mapping[Member, str] = field(default_factory=dict)
    """Where members run, if not on this machine."""


class CommandError(Exception):
    """The command cannot be run; `exit_code` is a shell's for that."""

    def __init__(self, message: str, exit_code: int) -> None:
        """Keep both."""
        super().__init__(message)
        self.exit_code: Final = exit_code


def node_variables(
    *, rank: int, size: int, host: str, port: int | None, site: str | None
) -> dict[str, str | int]:
    """Return what tells a node who it is and where the scheduler is."""
    variables: dict[str, str | int] = {
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": host,
        "DMLC_NUM_WORKER": size,
        "NETSTORM_RANK": rank,
    }
    if port is not None:
        variables["DMLC_PS_ROOT_PORT"] = port
    if site is not None:
        variables["NETSTORM_SITE"] = site
    return variables


def order_text(**order: object) -> bytes:
    """Return the first line of a keeper's standard input."""
    return json.dumps(order).encode() + b"\n"


def find_command(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Check that a command can be run on this machine, before anything is started.

    Raises:
        UsageError: there is none.
        CommandError: it is not there, or not executable; says what to do.
    """
    if not command:
        raise UsageError(
            "no command: write it last, after --, as in: netstorm launch -n 4 -- python train.py"
        )
    name = command[0]
    path = environment.get("PATH", os.defpath)
    if "/" in name:
        file = folder / name
        if file.is_dir():
            raise CommandError(f"{name!r} is a folder, not a command", CANNOT_RUN)
        if not file.exists():
            raise CommandError(f"command {name!r} not found in {folder}", NOT_FOUND)
        if not os.access(file, os.X_OK):
            hint = f"; to run a Python script: -- python {name} …" if name.endswith(".py") else ""
            raise CommandError(f"{name!r} is not executable{hint}", CANNOT_RUN)
    elif shutil.which(name, path=path) is None:
        if (folder / name).is_file():
            hint = f"; to run the script of that name here: -- python {name} …"
        elif name.startswith("-"):
            hint = "; options of the launcher come before --, the command after it"
        else:
            hint = f" in PATH={path}"
        raise CommandError(f"command {name!r} not found{hint}", NOT_FOUND)
