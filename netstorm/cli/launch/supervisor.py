"""Runs one command, passes signals on to it, and leaves nothing of it behind. Standard library only.

`netstorm launch` starts one supervisor for each process of a job: as a file, on a bare interpreter (`-I -S`),
which takes 10 MB and no package; on other hosts through ssh (`remote`). Its standard input is its
lifeline: the first line, JSON, says what to run; each later line names a signal for the command's process
group; the end of it means that the launcher is gone, however that came about.

Three nets, one under the other, so that no process outlives a job: the keeper is a subreaper, so whatever the
command starts stays below it, even daemons with a session of their own; if the keeper is killed, the kernel
kills the command (PR_SET_PDEATHSIG); and the launcher, also a subreaper, ends what is left then.
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

__all__ = ["Supervisor", "become_subreaper", "descendants", "kill_descendants", "read_order"]

CANNOT_RUN: Final = 126
NOT_FOUND: Final = 127
"""Exit codes when there is nothing to keep: as a shell's."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_ORPHAN_GRACE_S: Final = 2.0
"""From SIGTERM to SIGKILL when the launcher is gone: nobody is left who could wait for longer."""
_LEFTOVER_CHECKS: Final = 20
_LEFTOVER_CHECK_MS: Final = 50
"""What a command leaves running gets 1 s: Python's resource tracker needs it to give back shared memory."""
_KILL_CHECKS: Final = 500
_KILL_CHECK_MS: Final = 10
"""SIGKILL takes effect within 5 s, unless a process hangs in the kernel, and then nothing helps."""


class Supervisor:
    """The one command of this process. Only the main thread may make one."""

    def __init__(self, lifeline: int, received: bytes = b"") -> None:
        """Take over the signals of this process.

        Args:
            lifeline: file descriptor; its lines name signals, its end means that nobody waits any more.
            received: what has been read of it already.
        """
        become_subreaper()
        self._lifeline: Final = lifeline
        self._received = received
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _be_woken)
        self._command = 0
        self._status: int | None = None
        self._abandoned = False

    def run(self, command: list[str], folder: str | None, environment: Mapping[str, str] | None) -> int:
        """Run a command to its end, and end what it leaves behind.

        Args:
            command: its words; nothing is interpreted by a shell.
            folder: working directory; the keeper's own if None.
            environment: the keeper's own if None.

        Returns:
            The command's exit code, or 128 + the number of the signal that killed it.
        """
        problem = self._start(command, folder, environment)
        if problem is not None:
            _say(problem[1])
            return problem[0]
        self._obey()
        while self._status is None:
            self._look(None)
        for _ in range(_LEFTOVER_CHECKS):
            if not descendants(os.getpid()):
                break
            self._look(_LEFTOVER_CHECK_MS)
        self._end_leftovers()
        code = os.waitstatus_to_exitcode(self._status)
        return code if code >= 0 else 128 - code

    # --------------------------------------------------------------------------------------------- starting

    def _start(
        self, command: list[str], folder: str | None, environment: Mapping[str, str] | None
    ) -> tuple[int, str] | None:
        """Start the command; return exit code and message if it cannot be started."""
        keeper = os.getpid()
        reading, writing = os.pipe()  # closed by exec: its end says that the command runs and has its group
        self._command = os.fork()
        if self._command == 0:
            step = "chdir"
            try:
                _prepare(keeper)
                if folder is not None:
                    os.chdir(folder)
                step = "exec"
                if environment is None:
                    os.execvp(command[0], command)  # noqa: S606 - what the user has asked for
                os.execvpe(command[0], command, environment)  # noqa: S606
            except OSError as error:
                os.write(writing, f"{step} {error.errno}".encode())
            finally:
                os._exit(NOT_FOUND)
        os.close(writing)
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

    # --------------------------------------------------------------------------------------------- watching

    def _look(self, timeout_ms: int | None) -> None:
        """Wait for something to happen, and deal with it."""
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        if not self._abandoned:
            poller.register(self._lifeline, select.POLLIN)
        for descriptor, _ in poller.poll(timeout_ms):
            if descriptor == self._woken:
                self._heed_signals()
            else:
                self._read_lifeline()
        self._reap()

    def _heed_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._woken, 64):
                if number == signal.SIGALRM:
                    self._kill_everything()
                elif number in {signal.SIGINT, signal.SIGTERM}:  # somebody means the command, and found us
                    self._signal(signal.Signals(number))

    def _read_lifeline(self) -> None:
        data = os.read(self._lifeline, 4096)
        if data:
            self._received += data
            self._obey()
            return
        self._abandoned = True
        self._signal(signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, _ORPHAN_GRACE_S)

    def _obey(self) -> None:
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
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
            os.killpg(self._command, signal.SIGCONT)  # a stopped process could not obey

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._command:
                    self._status = status

    # ----------------------------------------------------------------------------------------------- ending

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
        immortal = kill_descendants()
        _say(f"killed what the command had left running: {names}")
        if immortal:
            _say(f"these do not die, not even of SIGKILL: {', '.join(map(str, immortal))}")


def read_order(lifeline: int) -> tuple[dict[str, object], bytes] | None:
    """Read the first line of a lifeline: what to run, and what came after it. None: it ended before."""
    received = b""
    while b"\n" not in received:
        data = os.read(lifeline, 65536)
        if not data:
            return None
        received += data
    line, _, rest = received.partition(b"\n")
    order = json.loads(line)
    return (order, rest) if isinstance(order, dict) else None


def become_subreaper() -> None:
    """Become the parent of every orphan below this process, so that none gets away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int) -> list[int]:
    """Return the living processes below `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:  # noqa: PTH123
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
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as line:  # noqa: PTH123
        return line.read().replace(b"\0", b" ").decode(errors="replace").strip()[:60]
    return ""


def _prepare(keeper: int) -> None:
    """Make the forked child what a command expects to be: leader of a session, with default signals."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != keeper:  # it died before the kernel knew that we mind
        os._exit(NOT_FOUND)
    signal.set_wakeup_fd(-1)
    for number in (
        signal.SIGCHLD,
        signal.SIGALRM,
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGPIPE,  # Python ignores these two, and a command would inherit that
        signal.SIGXFSZ,
    ):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)


_libc: Final = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _be_woken(number: int, frame: FrameType | None) -> None:
    """Do nothing: the wake-up descriptor has the number."""


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the launcher may be gone
        os.write(2, f"netstorm: {text}\n".encode(errors="replace"))


def main() -> int:
    """Read what to run, and run it."""
    read = read_order(0)
    if read is None:
        return CANNOT_RUN
    order, rest = read
    command, folder = order["command"], order["folder"]
    assert isinstance(command, list)
    assert folder is None or isinstance(folder, str)
    return Supervisor(0, rest).run(command, folder, None)


if __name__ == "__main__":
    sys.exit(main())
