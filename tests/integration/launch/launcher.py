"""Starts `netstorm launch` with small programs as nodes, and looks at what becomes of their processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
PATIENCE_S = 90.0
"""For anything to happen on a busy machine."""

PREAMBLE = """
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ.get("NETSTORM_RANK", -1))

def note(pid, name=None):  # the tests look for processes by these
    part = pathlib.Path(f".{pid}.part")
    part.write_text(str(pid))
    part.rename(name or f"pid-{pid}")

note(os.getpid())
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


class Launcher:
    """One folder with a program, and the processes that it left its id of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "program.py"
        self.heartbeat_timeout_s = 0.5

    def words(self, *options: str) -> list[str]:
        command = [sys.executable, "-u", str(self.program)]
        return [sys.executable, "-m", "netstorm", "launch", "--no-scheduler", *options, "--", *command]

    def environment(self, **variables: str) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        defaults = {"PS_HEARTBEAT_TIMEOUT": str(self.heartbeat_timeout_s), "PS_HEARTBEAT_INTERVAL": "0.1"}
        return {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), **defaults, **variables}

    @contextlib.contextmanager
    def started(self, program: str, *options: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
        self.program.write_text(PREAMBLE + program)
        process = subprocess.Popen(
            self.words(*options),
            cwd=self.folder,
            env=self.environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def run(self, program: str, *options: str, **variables: str) -> Ended:
        with self.started(program, *options, **variables) as process:
            return ended(process)

    def pids(self) -> list[int]:
        """Return the processes that have ever noted their id."""
        return [int(path.name.removeprefix("pid-")) for path in self.folder.glob("pid-*")]

    def wait_for_pids(self, number: int) -> list[int]:
        until(lambda: len(self.pids()) >= number, f"{number} processes to have started")
        return self.pids()


def inside(folder: Path) -> list[int]:
    """Return the living processes whose working directory is below `folder`: supervisors too."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cwd").readlink().is_relative_to(folder):
                found.append(int(path.name))
    return alive(found)


def ended(process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate(timeout=PATIENCE_S)
    return Ended(process.returncode, out, err)


def alive(pids: list[int]) -> list[int]:
    """Return those that still run; a zombie has ended."""
    living = []
    for pid in pids:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]
            if state not in "ZX":
                living.append(pid)
    return living


def until(condition, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.01)


def kill(pids: list[int]) -> None:
    for pid in alive(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
