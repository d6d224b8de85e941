"""One process of a job, under its supervisor: how it is started, signalled, and read."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from netstorm.cli.launch.job import Process
from netstorm.cli.launch.members import SCHEDULER, Member
from netstorm.cli.launch.output.console import Console, Stream, plain
from netstorm.cli.launch.output.lines import Lines
from netstorm.cli.launch.supervisor import ended_code
from netstorm.observe.private_files import open_private

__all__ = ["Child"]

_LAST_OUTPUT_MS: Final = 500
"""Time for the output of an ended process to arrive; longer only if another process holds its pipe."""


class Child:
    """A supervisor, and with it a process of the job.

    Attributes:
        member: which process of the job.
        label: what its lines begin with.
        last_error: the last line of its error output that is not empty.
        ended: how the process has ended, as soon as it has, even if what it has started has not: its exit
            code, or 128 + the signal that killed it; None: it has not, or its supervisor could not say.
    """

    def __init__(self, process: Process, console: Console, log_folder: Path | None) -> None:
        """Start the process.

        Raises:
            OSError: its supervisor cannot be started.
        """
        self.member: Final[Member] = process.member
        self.label: Final = process.label
        self.last_error = b""
        self.ended: int | None = None
        self._console: Final = console
        self._supervisor: Final = subprocess.Popen(
            process.supervisor,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=process.environment,
            start_new_session=True,  # the terminal's Ctrl-C is for the launcher alone
        )
        self._log = self._open_log(log_folder, is_restart=process.is_restart)
        assert self._supervisor.stdout is not None
        assert self._supervisor.stderr is not None
        self._streams: Final[dict[int, tuple[Stream, Lines]]] = {
            self._supervisor.stdout.fileno(): (Stream.OUT, Lines()),
            self._supervisor.stderr.fileno(): (Stream.ERR, Lines()),
        }
        """By file descriptor; those that have not ended."""
        self.send(process.start_message)

    @property
    def descriptors(self) -> list[int]:
        """The file descriptors of its output that are still open."""
        return list(self._streams)

    @property
    def unfinished(self) -> bytes:
        """A line of its output that has no end yet; empty: there is none."""
        return next((lines.unfinished for _, lines in self._streams.values() if lines.unfinished), b"")

    def exit_code(self) -> int | None:
        """Return the exit code, or 128 + the signal that killed the supervisor; None: it still runs."""
        code = self._supervisor.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, line: bytes) -> None:
        """Write a line to the supervisor. If it does not read, it has ended, or is about to be killed."""
        assert self._supervisor.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._supervisor.stdin.write(line)

    def tell(self, line: bytes) -> None:
        """Write a line for the process itself; none if it does not read: this must not wait for it."""
        assert self._supervisor.stdin is not None
        poller = select.poll()
        poller.register(self._supervisor.stdin, select.POLLOUT)
        if poller.poll(0):  # there is room for PIPE_BUF
            self.send(line)

    def kill(self) -> None:
        """Kill the supervisor on this machine."""
        self._supervisor.kill()

    def read(self, descriptor: int) -> Iterator[tuple[Stream, bytes]]:
        """Read from one of `descriptors`, and yield each line that is complete."""
        stream, lines = self._streams[descriptor]
        data = os.read(descriptor, 65536)
        finished = lines.feed(data) if data else lines.end()
        if not data:
            del self._streams[descriptor]
        for line in finished:
            yield from self._heard(stream, line)

    def read_rest(self) -> Iterator[tuple[Stream, bytes]]:
        """Yield the last lines of an ended process, and close its pipes."""
        while self._streams:
            poller = select.poll()
            for descriptor in self._streams:
                poller.register(descriptor, select.POLLIN)
            ready = poller.poll(_LAST_OUTPUT_MS)
            for descriptor, _ in ready:
                yield from self.read(descriptor)
            if not ready:
                for stream, lines in self._streams.values():
                    for line in lines.end():
                        yield from self._heard(stream, line)
                break
        for pipe in (self._supervisor.stdin, self._supervisor.stdout, self._supervisor.stderr):
            if pipe is not None:
                pipe.close()

    def _heard(self, stream: Stream, line: bytes) -> Iterator[tuple[Stream, bytes]]:
        """Yield a line of the process, unless its supervisor has written it."""
        found = ended_code(line) if stream is Stream.ERR else None
        if found is not None:
            line, self.ended = found
            if not line:
                return
        if stream is Stream.ERR and line.strip() and (self.ended is None or found is not None):
            self.last_error = plain(line)
        yield stream, line

    def write_log(self, lines: list[bytes]) -> None:
        """Write lines to the log file, if there is one."""
        if self._log is None or not lines:
            return
        try:
            self._log.write(b"".join(line + b"\n" for line in lines))
        except OSError as error:  # a full disk is no reason to end a training
            self._console.report(f"cannot write the log of {self.label}: {error.strerror}; it ends here")
            self._log.close()
            self._log = None

    def close_log(self) -> None:
        """Close the log file, if there is one. Twice does no harm."""
        if self._log is not None:
            self._log.close()

    def _open_log(self, folder: Path | None, *, is_restart: bool) -> BinaryIO | None:
        if folder is None:
            return None
        name = self.label if self.member == SCHEDULER else f"rank-{self.label}"
        path = folder / f"{name}.log"
        try:
            descriptor = open_private(path, os.O_APPEND if is_restart else os.O_TRUNC)
            return os.fdopen(descriptor, "wb", buffering=0)
        except OSError as error:
            self._console.report(f"cannot write {path}: {error.strerror}; there will be none")
            return None
