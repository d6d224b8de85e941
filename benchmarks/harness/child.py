"""One child process: JSON lines to its standard input, JSON lines back, its errors in a file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

__all__ = ["Child", "ChildError"]

_TAIL = 12


class ChildError(Exception):
    """A child ended, was too slow or reported an error; the message has the end of its error output."""


class Child:
    """A process in a session of its own: Ctrl-C reaches the driver alone, which then stops it by pid."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path | None = None
    ) -> None:
        """Start it; `log` keeps its error output, which else is kept for messages alone."""
        self.name = name
        self._errors: IO[bytes] = (
            tempfile.TemporaryFile() if log is None else log.open("w+b")  # noqa: SIM115 - closed by stop()
        )
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._received = b""
        self._observed = [psutil.Process(self._process.pid)]

    def fileno(self) -> int:
        """Return what to wait on for an answer."""
        return self._stdout.fileno()

    def send(self, command: Mapping[str, Any]) -> None:
        """Send one command."""
        try:
            self._stdin.write(json.dumps(command).encode() + b"\n")
            self._stdin.flush()
        except OSError as error:
            raise ChildError(self.describe("is gone")) from error

    def try_answer(self) -> dict[str, Any] | None:
        """Return an answer if one is complete.

        Raises:
            ChildError: the child has ended or answers with an error.
        """
        if b"\n" not in self._received:
            try:
                got = os.read(self.fileno(), 65536)
            except BlockingIOError:
                return None
            if not got:
                self._wait(2.0)
                raise ChildError(self.describe(f"ended with exit code {self._process.poll()}"))
            self._received += got
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        answer: dict[str, Any] = json.loads(line)
        if answer.get("error"):
            raise ChildError(f"{self.name}: {answer['error']}")
        return answer

    def observe(self, pids: Sequence[int]) -> None:
        """Have the work measured of these processes instead: what the child has started, or stands for."""
        self._observed = [psutil.Process(pid) for pid in pids]

    def alive(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.poll()

    def cpu_s(self) -> float:
        """Return the processor time used so far, all threads, in seconds; 0 if it has ended."""
        return sum(map(_cpu_s, self._observed))

    def peak_rss(self) -> int:
        """Return the largest resident memory so far, in bytes; 0 if it has ended."""
        return sum(_peak_rss(process.pid) for process in self._observed)

    def close_input(self) -> None:
        """Ask the child to end: its lifeline notices."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def stop(self, grace_s: float) -> None:
        """Wait for the end, then insist; always returns with the process gone."""
        self.close_input()
        for insist in (None, signal.SIGTERM, signal.SIGKILL):
            if insist is not None:
                self._process.send_signal(insist)
            if self._wait(grace_s):
                break
            grace_s = 2.0
        for process in self._observed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # psutil asks whether it is still the same one
        self._stdout.close()
        self._errors.close()

    def describe(self, what: str) -> str:
        """Return `what` happened to this child and the end of its error output."""
        self._errors.flush()
        size = os.fstat(self._errors.fileno()).st_size
        written = os.pread(self._errors.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")
        tail = "\n".join(f"    {line}" for line in written.strip().splitlines()[-_TAIL:])
        return f"{self.name} (pid {self._process.pid}) {what}" + (f":\n{tail}" if tail else "")

    def _wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._process.poll() is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _peak_rss(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peaks[0]) * 1024 if peaks else 0
