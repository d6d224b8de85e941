"""Runs one command, forwards signals to it, and ends everything that it leaves behind.

Standard library only, and one file: `netstorm launch` runs it as a file on a bare interpreter (`-I -S`),
which cannot import packages and takes 10 MB. On other hosts it is started through ssh (`remote`).

Its standard input is its lifeline. The first line, JSON, says what to run; each later line names a signal for
the command's process group, or is JSON for the command itself, if that reads the launcher's lines; the end of
the input means that the launcher is gone, for whatever reason. How the command ended is a line on standard
error (`ended_code`), at once: what it has left running may take a while to end.

Three measures ensure that no process outlives a job. The supervisor is a subreaper, so that all processes
that the command starts stay below it, even daemons with their own session. If the supervisor is killed, the
kernel kills the command (PR_SET_PDEATHSIG). The launcher, also a subreaper, then ends what is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import sys
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Final

__all__ = [
    "Supervisor",
    "become_subreaper",
    "descendants",
    "ended_code",
    "kill_descendants",
    "read_start_message",
]

CANNOT_RUN: Final = 126
NOT_FOUND: Final = 127
"""Exit codes if the command cannot be run, as a shell's."""

_ENDED: Final = b"\x1enetstorm-ended "
"""Begins the line that says how the command ended, wherever in a line the command's own output stops."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_ORPHAN_GRACE_S: Final = 2.0
"""Time from SIGTERM to SIGKILL when the launcher is gone."""
_LEFTOVER_CHECKS: Final = 20
_LEFTOVER_CHECK_MS: Final = 50
"""Processes that a command leaves running get 1 s: Python's resource tracker needs it to free shared memory.
"""
_KILL_CHECKS: Final = 500
_KILL_CHECK_MS: Final = 10
"""SIGKILL takes effect within 5 s, unless a process hangs in the kernel."""


class Supervisor:
    """Runs the one command of this process. Only the main thread may construct it."""

    def __init__(self, lifeline: int, received: bytes = b"") -> None:
        """Install the signal handlers of this process.

        Args:
            lifeline: file descriptor; its lines name signals, its end means that the launcher is gone.
            received: bytes that were already read from it.
        """
        become_subreaper()
        self._lifeline: Final = lifeline
        self._received = received
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _do_nothing)
        self._command = 0
        self._status: int | None = None
        self._abandoned = False
        self._input = -1
        """The end of a pipe to which the command's lines are written; -1: it reads none."""

    def run(
        self,
        command: list[str],
        folder: str | None,
        environment: Mapping[str, str] | None,
        *,
        reads: bool = False,
    ) -> int:
        """Run a command to its end, and end the processes that it leaves behind.

        Args:
            command: its words; nothing is interpreted by a shell.
            folder: working directory; this process's if None.
            environment: this process's if None.
            reads: whether the command reads the launcher's lines.

        Returns:
            The command's exit code, or 128 + the number of the signal that killed it.
        """
        problem = self._start(command, folder, environment, reads=reads)
        if problem is not None:
            _report(problem[1])
            return problem[0]
        self._handle_lines()
        while self._status is None:
            self._wait(None)
        code = os.waitstatus_to_exitcode(self._status)
        code = code if code >= 0 else 128 - code
        with contextlib.suppress(OSError):  # the launcher may be gone
            os.write(2, b"%b%d\n" % (_ENDED, code))
        for _ in range(_LEFTOVER_CHECKS):
            if not descendants(os.getpid()):
                break
            self._wait(_LEFTOVER_CHECK_MS)
        self._end_leftovers()
        return code

    # ----------------------------------------------------------------------------------------------- starting

    def _start(
        self, command: list[str], folder: str | None, environment: Mapping[str, str] | None, *, reads: bool
    ) -> tuple[int, str] | None:
        """Start the command; return exit code and message if it cannot be started."""
        supervisor = os.getpid()
        if reads:
            lines, self._input = os.pipe()
            os.set_blocking(self._input, False)  # a command that does not read must not stop this process
        else:
            lines = os.open(os.devnull, os.O_RDONLY)
        reading, writing = os.pipe()  # exec closes it: its end means that the command runs in its own group
        self._command = os.fork()
        if self._command == 0:
            step = "chdir"
            try:
                _prepare(supervisor)
                os.dup2(lines, 0)
                if folder is not None:
                    os.chdir(folder)
                step = "exec"
                if environment is None:
                    os.execvp(command[0], command)
                os.execvpe(command[0], command, environment)
            except OSError as error:
                os.write(writing, f"{step} {error.errno}".encode())
            finally:
                os._exit(NOT_FOUND)
        os.close(writing)
        os.close(lines)
        with os.fdopen(reading, "rb") as report:
            step, _, number = report.read().decode().partition(" ")
        if not step:
            return None
        os.waitpid(self._command, 0)
        why = os.strerror(int(number))
        if step == "chdir":
            return CANNOT_RUN, f"cannot run {command[0]!r} in the folder {folder!r}: {why}"
        return (
            NOT_FOUND if int(number) == errno.ENOENT else CANNOT_RUN,
            f"cannot run {command[0]!r}: {why}",
        )

    # ----------------------------------------------------------------------------------------------- watching

    def _wait(self, timeout_ms: int | None) -> None:
        """Wait for a signal or a line of the lifeline, and handle it."""
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        if not self._abandoned:
            poller.register(self._lifeline, select.POLLIN)
        for descriptor, _ in poller.poll(timeout_ms):
            if descriptor == self._woken:
                self._handle_signals()
            else:
                self._read_lifeline()
        self._reap()

    def _handle_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._woken, 64):
                if number == signal.SIGALRM:
                    self._kill_everything()
                elif number in {signal.SIGINT, signal.SIGTERM}:  # they are meant for the command
                    self._signal(signal.Signals(number))

    def _read_lifeline(self) -> None:
        data = os.read(self._lifeline, 4096)
        if data:
            self._received += data
            self._handle_lines()
            return
        self._abandoned = True
        self._signal(signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, _ORPHAN_GRACE_S)

    def _handle_lines(self) -> None:
        """Send each signal that a complete line of the lifeline names, and pass the command's lines on."""
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                with contextlib.suppress(OSError):  # it has ended, or reads nothing any more
                    os.write(self._input, line + b"\n")
                continue
            number = signal.Signals[line.decode("ascii")]
            if number is signal.SIGKILL:
                self._kill_everything()
            else:
                self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        if self._status is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._command, number)
            os.killpg(self._command, signal.SIGCONT)  # a stopped process could not handle it

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._command:
                    self._status = status

    # ------------------------------------------------------------------------------------------------- ending

    def _kill_everything(self) -> None:
        """Kill the command and all below it at once."""
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _end_leftovers(self) -> None:
        left = descendants(os.getpid())
        if not left:
            return
        names = ", ".join(f"{pid} ({name_of(pid)})" for pid in left[:3]) + (", …" if len(left) > 3 else "")
        surviving = kill_descendants()
        _report(f"killed what the command had left running: {names}")
        if surviving:
            _report(f"these processes survive SIGKILL: {', '.join(map(str, surviving))}")


def ended_code(line: bytes) -> tuple[bytes, int] | None:
    """Return how the command has ended, and what stands before that in the line; None: it is another line."""
    before, marker, code = line.rpartition(_ENDED)
    return (before, int(code)) if marker and code.isdigit() and int(code) < 256 else None


def read_start_message(lifeline: int) -> tuple[dict[str, object], bytes] | None:
    """Read the first line of a lifeline: what to run, and the bytes after it. None: it ended before."""
    received = b""
    while b"\n" not in received:
        data = os.read(lifeline, 65536)
        if not data:
            return None
        received += data
    line, _, rest = received.partition(b"\n")
    message = json.loads(line)
    return (message, rest) if isinstance(message, dict) else None


def become_subreaper() -> None:
    """Make this process the parent of every orphan below it, so that none escapes."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int) -> list[int]:
    """Return the living processes below `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                # pid (name) state parent …; the name may hold anything, parentheses too: proc(5)
                state, parent, *_ = stat.read().rpartition(b") ")[2].split()
                if state not in {b"Z", b"X"}:
                    children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(0), [])
        found += below
        todo += below
    return found


def kill_descendants(spare: Collection[int] = ()) -> list[int]:
    """Kill and reap every process below this one; return those that cannot be killed.

    Args:
        spare: processes that are left alone, with all below them.
    """
    left: list[int] = []
    for _ in range(_KILL_CHECKS):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        spared = {*spare, *(below for pid in spare for below in descendants(pid))}
        left = [pid for pid in descendants(os.getpid()) if pid not in spared]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return []
        select.poll().poll(_KILL_CHECK_MS)
    return left


def name_of(pid: int) -> str:
    """Return a process's command line, shortened; empty if it has gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as line:
        return line.read().replace(b"\0", b" ").decode(errors="replace").strip()[:60]
    return ""


def _prepare(supervisor: int) -> None:
    """Prepare the forked child: leader of a session, with default signal handlers."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != supervisor:  # it died before the kernel knew of PDEATHSIG
        os._exit(NOT_FOUND)
    signal.set_wakeup_fd(-1)
    for number in (
        signal.SIGCHLD,
        signal.SIGALRM,
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGPIPE,  # Python ignores these two, and the command would too
        signal.SIGXFSZ,
    ):
        signal.signal(number, signal.SIG_DFL)


_libc: Final = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal: the wake-up descriptor already has its number."""


def _report(text: str) -> None:
    with contextlib.suppress(OSError):  # the launcher may be gone
        os.write(2, f"netstorm: {text}\n".encode(errors="replace"))


def main() -> int:
    """Read what to run, and run it."""
    read = read_start_message(0)
    if read is None:
        return CANNOT_RUN
    message, rest = read
    command, folder = message["command"], message["folder"]
    assert isinstance(command, list)
    assert folder is None or isinstance(folder, str)
    return Supervisor(0, rest).run(command, folder, None, reads=bool(message.get("reads")))


if __name__ == "__main__":
    sys.exit(main())
