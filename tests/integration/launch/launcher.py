"""Starts `netstorm launch` with small programs as nodes, and looks at what becomes of their processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.integration.forking import ROOT, ForkedProcess
from tests.integration.jobs import Ended, Job

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


class Launch(ForkedProcess):
    """A launcher that is forked, with its output in files."""

    def __init__(self, folder: Path, words: list[str], environment: dict[str, str]) -> None:
        assert Job.forker is not None
        self._files = [folder / ".out", folder / ".err"]
        for file in self._files:
            file.write_text("")  # or a former launcher's output could be read, or none
        out, err = map(str, self._files)
        super().__init__(
            Job.forker, words=words, environment=environment, folder=str(folder), out=out, err=err
        )

    def said(self) -> tuple[str, str]:
        """Return what it has printed so far: standard output, and standard error."""
        out, err = (file.read_text(errors="surrogateescape") for file in self._files)
        return out, err

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()


class Launcher:
    """One folder with a program, and the processes that it left its id of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "program.py"
        self.heartbeat_timeout_s = 0.5

    def words(self, *options: str) -> list[str]:
        command = [sys.executable, "-u", str(self.program)]
        return ["netstorm", "launch", "--no-scheduler", *options, "--", *command]

    def real_words(self, *options: str) -> list[str]:
        """Return the words of a launcher that is not forked."""
        return [sys.executable, "-m", *self.words(*options)]

    def environment(self, **variables: str) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        defaults = {"PS_HEARTBEAT_TIMEOUT": str(self.heartbeat_timeout_s), "PS_HEARTBEAT_INTERVAL": "0.1"}
        return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **defaults, **variables}

    def piped(self, program: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a launcher, not forked, whose output goes to pipes."""
        self.program.write_text(PREAMBLE + program)
        return subprocess.Popen(
            self.real_words(*options),
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    @contextlib.contextmanager
    def started(self, program: str, *options: str, **variables: str) -> Iterator[Launch]:
        self.program.write_text(PREAMBLE + program)
        process = Launch(self.folder, self.words(*options), self.environment(**variables))
        try:
            yield process
        finally:
            process.kill()

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


def ended(process: Launch) -> Ended:
    return Ended(process.wait(PATIENCE_S), *process.said())


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
