"""What `netstorm launch` starts: the processes of a job, and how each is started."""

from __future__ import annotations

import dataclasses
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

__all__ = ["CommandError", "Job", "Process", "find_command", "start_message"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a job, run by a supervisor."""

    member: Member
    supervisor: tuple[str, ...]
    """Command that starts its supervisor from this machine."""
    environment: Mapping[str, str]
    """Of that command."""
    start_message: bytes
    """First line of the supervisor's standard input."""
    is_restart: bool = False
    """Whether it takes the place of one that has ended: its output is added to that one's log file."""

    def with_variables(self, variables: Mapping[str, str], *, is_restart: bool = False) -> Process:
        """Return this process with further variables, on whichever host it runs."""
        message = json.loads(self.start_message)
        if "variables" in message:  # on another host
            message["variables"] |= variables
        return dataclasses.replace(
            self,
            environment={**self.environment, **variables},
            start_message=start_message(**message),
            is_restart=is_restart or self.is_restart,
        )

    @property
    def label(self) -> str:
        """Prefix of its output lines."""
        return "scheduler" if self.member == SCHEDULER else str(self.member)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All processes of a job."""

    size: int
    """Number of nodes."""
    scheduler: Process | None
    ready_file: Path | None
    """Nodes are started when the scheduler has written HOST:PORT to this file; None: at once."""
    nodes: Callable[[int | None], Sequence[Process]]
    """Returns the nodes' processes, given the port that the scheduler chose, or None."""
    scheduler_at: Callable[[int | None], Process] | None = None
    """Returns the scheduler for a second start, at the port that the first one chose, or None; None: it has
    no log to go on from, or is not started here."""
    hosts: Mapping[Member, str] = field(default_factory=dict)
    """Where processes run, for messages; the scheduler only if that is another machine."""
    is_remote: bool = False
    """Whether they are started through ssh."""


class CommandError(Exception):
    """The command cannot be run; `exit_code` is what a shell returns then."""

    def __init__(self, message: str, exit_code: int) -> None:
        """Keep the exit code besides the message."""
        super().__init__(message)
        self.exit_code: Final = exit_code


def start_message(**fields: object) -> bytes:
    """Return the first line of a supervisor's standard input."""
    return json.dumps(fields).encode() + b"\n"


def find_command(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Check that a command can be run on this machine, before anything is started.

    Raises:
        UsageError: no command is given.
        CommandError: it is not found, or not executable.
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
