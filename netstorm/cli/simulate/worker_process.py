"""Starts and stops the worker process of `netstorm simulate`, and reads its answers with a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import msgspec

from netstorm import clock
from netstorm.cli.simulate.cases import Answer, Begun, Case, Ended, Failed

__all__ = ["CaseTimeout", "WorkerProcess"]

_READ: Final = 65_536
_ANSWER: Final = msgspec.json.Decoder(Answer)


class CaseTimeout(Exception):
    """A case has exceeded its time limit."""


class WorkerProcess:
    """A process that runs cases, one at a time. It is started when needed, and restarted after a case that
    exceeded its limit. It must be closed.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""

    def close(self) -> None:
        """Kill the process, if there is one, and its case."""
        process, self._process, self._received = self._process, None, b""
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def run(self, case: Case, limit_s: float) -> Iterator[Answer]:
        """Run a case, and yield the answers as they come; the last is `Ended` or `Failed`.

        Raises:
            CaseTimeout: the case has not ended `limit_s` after its network was loaded.
        """
        process = self._process = self._process or _start()
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(case) + b"\n")
        process.stdin.flush()
        deadline = clock.monotonic() + limit_s
        while True:
            line = self._line(process, deadline)
            if line is None:
                self.close()
                yield Failed(message=_death(process.returncode), unfit=False)
                return
            answer = _ANSWER.decode(line)
            if isinstance(answer, Begun):
                deadline = clock.monotonic() + limit_s
            yield answer
            if isinstance(answer, (Ended, Failed)):
                return

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """Return the next line, or None if the process has ended."""
        assert process.stdout is not None
        while b"\n" not in self._received:
            left = deadline - clock.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                self.close()
                raise CaseTimeout
            data = os.read(process.stdout.fileno(), _READ)
            if not data:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "netstorm.cli.simulate.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the command, which then kills this process
    )


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        reason = "; memory may have run out" if code == -9 else ""
        return f"the simulating process was killed by signal {-code}{reason}"
    return f"the simulating process ended with exit code {code}; what it printed says why"
