"""Ranks of elastic jobs: each is started by itself, and perhaps again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.integration.forking import DEADLINE_S, ForkedProcess, Forker
from tests.integration.jobs import Job


class ElasticRanks:
    """An elastic job of PyTorch. A context manager: nothing survives it."""

    def __init__(self, forker: Forker, folder: Path, *, begin: int, elastic: str, **settings: object) -> None:
        """Start its scheduler.

        Args:
            forker: ranks are forked from it.
            folder: what processes write.
            begin: number of ranks that the job begins with.
            elastic: MIN:MAX.
            settings: of all processes.
        """
        self.folder = folder
        self._forker = forker
        self._settings = {"NETSTORM_ELASTIC": elastic, "DMLC_NUM_WORKER": begin, **settings}
        self._scheduler = Job(folder, begin, **self._settings)
        self._processes: dict[str, ForkedProcess] = {}

    def start(self, name: str, rank: int, program: Callable[..., Any], /, **arguments: Any) -> None:
        """Have a process call `program`; `name` stands for it from now on."""
        host, port = self._scheduler.address.rsplit(":", 1)
        environment = {
            "DMLC_PS_ROOT_URI": host,
            "DMLC_PS_ROOT_PORT": port,
            "NETSTORM_RANK": str(rank),
            **{key: str(value) for key, value in self._settings.items()},
        }
        self._processes[name] = ForkedProcess(
            self._forker,
            program=f"{program.__module__}:{program.__qualname__}",
            arguments={**arguments, "folder": str(self.folder)},
            environment=environment,
            **{kind: f"{self.folder}/{kind}-{name}" for kind in ("out", "err", "answer")},
        )

    def kill(self, name: str) -> None:
        """Kill a process."""
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes[name].wait()

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a process a signal."""
        self._processes[name].send_signal(number)

    def said(self, name: str) -> str:
        """Return what a process has written so far."""
        files = [self.folder / f"{kind}-{name}" for kind in ("out", "err")]
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    def wait_until_said(self, name: str, text: str, times: int = 1) -> None:
        """Wait until a process has written `text` so many times."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            has_ended = self._processes[name].poll() is not None  # it may write, and end, now
            if self.said(name).count(text) >= times:
                return
            assert not has_ended, f"{name} has ended: {self.said(name)}"
            assert time.monotonic() < deadline, f"{name} never said {text!r}: {self.said(name)}"
            time.sleep(0.02)

    def wait_until_stopped(self, name: str) -> None:
        """Wait until a process has been stopped by a signal."""
        process = psutil.Process(self._processes[name].pid)
        deadline = time.monotonic() + DEADLINE_S
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline, f"{name} does not stop: {self.said(name)}"
            time.sleep(0.02)

    def wait_until_there(self, file: str) -> None:
        """Wait until a file is in the folder."""
        deadline = time.monotonic() + DEADLINE_S
        while not (self.folder / file).exists():
            assert time.monotonic() < deadline, f"nobody has made {file!r}"
            time.sleep(0.02)

    def answer(self, name: str, limit_s: float = DEADLINE_S) -> Any:
        """Wait for a process to end well, and return what its program has returned."""
        code = self._processes[name].wait(limit_s)
        assert code == 0, f"{name} ended with {code}: {self.said(name)}"
        return json.loads((self.folder / f"answer-{name}").read_text())

    def end(self) -> None:
        """Wait until the scheduler says that the job has ended well."""
        ended = self._scheduler.end(-1)
        assert ended.code == 0, ended.text

    def __enter__(self) -> ElasticRanks:  # noqa: PYI034 -- Self is Python 3.11's
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._scheduler.__exit__(*error)


Started = Callable[..., ElasticRanks]
"""What the fixture `job` is."""
