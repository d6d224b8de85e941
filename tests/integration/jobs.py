"""Jobs of real processes on loopback, for tests: a scheduler, and nodes that each run a script."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from netstorm.cli.launch.variables import is_free
from tests.integration.forking import ROOT, ForkedProcess, Forker

PYTHONPATH = os.pathsep.join((str(ROOT), str(Path(__file__).with_name("quick_start"))))
"""Of the processes that tests start: MXNet starts sooner there (`quick_start`)."""

SCHEDULER = (sys.executable, "-m", "netstorm", "scheduler")


@dataclass
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Return everything that it said."""
        return self.out + self.err

    @property
    def error_lines(self) -> list[str]:
        """Return the lines on standard error, but for those about nodes that start slowly."""
        return [line for line in self.err.splitlines() if "WARNING waiting for" not in line]


class Job:
    """A scheduler and its nodes. A context manager: nothing survives it."""

    forker: ClassVar[Forker | None] = None
    """Has imported NetStorm (`integration.forker`); None: real processes are started."""
    mxnet_forker: ClassVar[Forker | None] = None
    """Has imported MXNet, too (`mxnet.forker`); None: nobody has asked for it."""

    def __init__(self, folder: Path, nodes: int, **settings: object) -> None:
        self.folder = folder
        self.nodes = nodes
        self._processes: dict[int, subprocess.Popen[bytes] | ForkedProcess] = {}
        self._files = contextlib.ExitStack()
        self._settings = {name: str(value) for name, value in settings.items()}
        ready = folder / "ready"
        self._start(
            -1,
            [*SCHEDULER, "--port", "0", "--ready-file", str(ready)],
            {"DMLC_NUM_WORKER": nodes},
        )
        deadline = time.monotonic() + 60
        while not ready.exists() or not ready.read_text().strip():
            assert self._processes[-1].poll() is None, self.end(-1).text
            assert time.monotonic() < deadline, "the scheduler does not start"
            time.sleep(0.02)
        self.address = ready.read_text().strip()

    def start(
        self,
        rank: int,
        script: str,
        *,
        module: tuple[str, ...] = (),
        real: bool = False,
        **variables: object,
    ) -> None:
        """Start a node.

        Args:
            rank: its rank.
            script: what it runs, Python source.
            module: in front of the script, as `-m NAME`.
            real: start an interpreter, as for a `module`. Otherwise it is forked from a process that has
                imported NetStorm and, if the script names that, MXNet.
            variables: of its environment.
        """
        path = self.folder / f"script{rank}.py"
        path.write_text(script)
        host, port = self.address.rsplit(":", 1)
        self._start(
            rank,
            [sys.executable, *module, str(path)],
            {
                "DMLC_ROLE": "worker",
                "DMLC_PS_ROOT_URI": host,
                "DMLC_PS_ROOT_PORT": port,
                "DMLC_NUM_WORKER": self.nodes,
                "NETSTORM_RANK": rank,
                **variables,
            },
            None if real or module else self._forker_of(script),
        )

    def _forker_of(self, script: str) -> Forker | None:
        return (self.mxnet_forker if "mxnet" in script else None) or self.forker

    def _start(
        self, rank: int, command: list[str], variables: Mapping[str, object], forker: Forker | None = None
    ) -> None:
        words = command[1:]
        if tuple(command[: len(SCHEDULER)]) == SCHEDULER:
            words, forker = command[2:], self.forker
        environment = {
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            **{name: str(value) for name, value in {**self._settings, **variables}.items()},
        }
        if forker is not None:
            files = {name: str(self.folder / f"{name}{rank}") for name in ("out", "err")}
            for file in files.values():  # emptied here: what a process before it said is not this one's
                Path(file).write_bytes(b"")
            self._processes[rank] = ForkedProcess(forker, words=words, environment=environment, **files)
            return
        with (self.folder / f"out{rank}").open("wb") as out, (self.folder / f"err{rank}").open("wb") as err:
            self._processes[rank] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )

    def start_scheduler(self, number: int, *options: str, **variables: object) -> None:
        """Start a further scheduler of the job, which goes by a number below -1 here."""
        self._start(number, [*SCHEDULER, *options], {"DMLC_NUM_WORKER": self.nodes, **variables})

    def start_scheduler_again(self, *options: str) -> None:
        """Start a scheduler at the address of the one before, whose process has ended."""
        self._processes[-1].wait()
        host, port = self.address.rsplit(":", 1)
        # Or the system may give the port to any process that asks for one before the scheduler does.
        held = self._files.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # who listens may have it all the same
        held.bind((host.strip("[]"), int(port)))
        self.start_scheduler(-1, "--port", port, *options)

    def pid(self, rank: int) -> int:
        """Return a process's number; -1 is the scheduler."""
        return self._processes[rank].pid

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a process a signal."""
        self._processes[rank].send_signal(number)

    def said(self, rank: int) -> str:
        """Return what a process has written so far."""
        return (self.folder / f"out{rank}").read_text(errors="replace") + (
            self.folder / f"err{rank}"
        ).read_text(errors="replace")

    def wait_until_said(
        self, rank: int, text: str, timeout_s: float = 60, *, after: str = "", times: int = 1
    ) -> None:
        """Wait until a process has written `text` so often, after it first wrote `after`."""
        deadline = time.monotonic() + timeout_s
        while True:
            has_ended = self._processes[rank].poll() is not None  # it may write, and end, at any moment
            said = self.said(rank)
            if (said.partition(after)[2] if after else said).count(text) >= times:
                return
            assert not has_ended, f"rank {rank} ended: {self.said(rank)}"
            assert time.monotonic() < deadline, f"rank {rank} never said {text!r}; {self._everything_said()}"
            time.sleep(0.02)

    def _everything_said(self) -> str:
        names = {-1: "the scheduler"}
        return "\n".join(
            f"{names.get(rank, f'rank {rank}')} said: {self.said(rank)}" for rank in self._processes
        )

    def end(self, rank: int, timeout_s: float = 90) -> Ended:
        """Wait for a process's end."""
        process = self._processes[rank]
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {rank} does not end; {self._everything_said()}") from None
        return Ended(
            code,
            (self.folder / f"out{rank}").read_text(errors="replace"),
            (self.folder / f"err{rank}").read_text(errors="replace"),
        )

    def end_all(self, timeout_s: float = 90) -> list[Ended]:
        """Wait for all nodes and return how they ended, by rank."""
        return [self.end(rank, timeout_s) for rank in range(self.nodes)]

    def __enter__(self) -> Job:  # noqa: PYI034 -- Self is Python 3.11's
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):  # the whole group: a node may have forked
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """Return a TCP port that is free, and none of those that the system gives away meanwhile."""
    chance = random.SystemRandom()  # pytest-randomly seeds the usual one alike in all processes
    while not is_free(port := chance.randrange(20_000, 32_000)):
        pass
    return port


def run_netstorm(folder: Path, *words: str, **variables: str) -> Ended:
    """Run `netstorm WORD...` to its end in a folder, with its output in files there."""
    assert Job.forker is not None
    files = {name: str(folder / f"netstorm.{name}") for name in ("out", "err")}
    process = ForkedProcess(
        Job.forker,
        words=("netstorm", *words),
        environment={**os.environ, **variables},
        folder=str(folder),
        **files,
    )
    return Ended(process.wait(), *(Path(file).read_text() for file in files.values()))


def run_job(
    folder: Path,
    nodes: int,
    script: str,
    *,
    module: tuple[str, ...] = (),
    **settings: object,
) -> list[Ended]:
    """Run one script on all nodes (see `Job.start`); return how each ended."""
    with Job(folder, nodes, **settings) as job:
        for rank in range(nodes):
            job.start(rank, script, module=module)
        return job.end_all()
