"""Processes that are forked from one which has imported what takes long (`fork_server`): the tests' side."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

DEADLINE_S = 110


class Forker:
    """The process that others are forked from. A context manager."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        """Fork from a process that runs `module`, with variables beside those of this process."""
        self._module = module
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None
        self._codes: dict[int, int] = {}

    def __enter__(self) -> Forker:  # noqa: PYI034 -- Self is Python 3.11's
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            cwd=ROOT,
            env={**os.environ, **self._environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write('"end"\n')
        process.stdin.close()
        process.wait(timeout=DEADLINE_S)
        process.stdout.close()

    def fork(self, **request: object) -> int:
        """Return the number of a new process."""
        return int(self._ask(request))

    def exit_code(self, pid: int) -> int | None:
        """Return how a process has ended; None: it has not."""
        if pid not in self._codes:
            self._codes.update({int(ended): code for ended, code in self._ask("ended").items()})
        return self._codes.get(pid)

    def _ask(self, request: object) -> Any:
        """Return the answer to a request."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
            assert ready, f"{self._module} has no answer to {request}"
            return json.loads(process.stdout.readline())
        except BaseException:  # its answer would be taken for that to the next request
            process.kill()
            process.communicate()  # closes its pipes, of which the next test would be told
            self.__enter__()
            raise


class ForkedProcess:
    """A forked process, with the methods of `subprocess.Popen`."""

    def __init__(self, forker: Forker, **request: object) -> None:
        """Fork it; `request` is what the forker's module takes."""
        self._forker = forker
        self.pid = forker.fork(**request)

    def poll(self) -> int | None:
        """Return how it has ended; None: it has not."""
        return self._forker.exit_code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return how it has ended."""
        deadline = time.monotonic() + (DEADLINE_S if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or DEADLINE_S)
            time.sleep(0.01)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)
