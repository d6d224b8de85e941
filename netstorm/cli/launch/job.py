"""The processes of a job: what is started and how, their output and signals, and the job's new start as a
whole.

`shutdown` decides how a job ends; this carries it out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Final

import msgspec

from netstorm import clock
from netstorm.addresses import split_host_port
from netstorm.cli.launch.output import Console, Lines, Stream, plain
from netstorm.cli.launch.shutdown import (
    SCHEDULER,
    Abandon,
    Action,
    Explain,
    Member,
    Report,
    RestartBudget,
    SendSignal,
    Shutdown,
    StartAgain,
    in_words,
    outcome,
)
from netstorm.cli.launch.supervisor import (
    CANNOT_RUN,
    NOT_FOUND,
    become_subreaper,
    ended_code,
    kill_descendants,
)
from netstorm.cli.support import BEGUN, first_failure, rank_that_came
from netstorm.errors import UsageError
from netstorm.observe.private_files import open_private
from netstorm.scheduler.launched_ranks import RankEnded, shortened

__all__ = [
    "CommandError",
    "LaunchedJob",
    "Process",
    "find_command",
    "for_attempt",
    "run_job",
    "run_with_restarts",
    "start_message",
    "state_folder",
]


# What `netstorm launch` starts: the processes of a job, and how each is started.


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a job, run by a supervisor."""

    member: Member
    supervisor: tuple[str, ...]
    """Command that starts its supervisor from this machine."""
    environment: Mapping[str, str]
    """Of that command."""
    start_message: bytes
    """First line of the supervisor's standard input."""
    descriptors: tuple[int, ...] = ()
    """Of this process; it inherits them."""
    is_restart: bool = False
    """Whether it takes the place of one that has ended: its output is added to that one's log file."""

    def with_variables(self, variables: Mapping[str, str], *, is_restart: bool = False) -> Process:
        """Return this process with further variables, on whichever host it runs."""
        message = json.loads(self.start_message)
        if "variables" in message:  # on another host
            message["variables"] |= variables
        return dataclasses.replace(
            self,
            environment={**self.environment, **variables},
            start_message=start_message(**message),
            is_restart=is_restart or self.is_restart,
        )

    @property
    def label(self) -> str:
        """Prefix of its output lines."""
        return {SCHEDULER: "scheduler", DASHBOARD: "dashboard"}.get(self.member, str(self.member))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedJob:
    """All processes of a job."""

    size: int
    """Number of nodes."""
    scheduler: Process | None
    ready_file: Path | None
    """Nodes are started when the scheduler has written HOST:PORT to this file; None: at once."""
    nodes: Callable[[int | None], Sequence[Process]]
    """Returns the nodes' processes, given the port that the scheduler chose, or None."""
    scheduler_at: Callable[[int | None], Process] | None = None
    """Returns the scheduler for a second start, at the port that the first one chose, or None; None: it has
    no log to go on from, or is not started here."""
    hosts: Mapping[Member, str] = field(default_factory=dict)
    """Where processes run, for messages; the scheduler only if that is another machine."""
    is_remote: bool = False
    """Whether they are started through ssh."""
    beside_scheduler: Callable[[Sequence[str]], Sequence[str]] | None = None
    """Returns the command that runs `netstorm` with some words where a scheduler is whose pages cannot be
    reached from here; None: they can."""


DASHBOARD: Final = Member(-2)
"""Its process is no part of the job: the job neither waits for it nor hears of its end."""

_WATCH: Final = re.compile(rb"netstorm scheduler: watch it with: netstorm top (--scheduler \S+.*)")
"""What the scheduler says once it can be watched: these options are those of `netstorm dashboard`, too."""


class CommandError(Exception):
    """The command cannot be run; `exit_code` is what a shell returns then."""

    def __init__(self, message: str, exit_code: int) -> None:
        """Keep the exit code besides the message."""
        super().__init__(message)
        self.exit_code: Final = exit_code


def start_message(**fields: object) -> bytes:
    """Return the first line of a supervisor's standard input."""
    return json.dumps(fields).encode() + b"\n"


def find_command(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Check that a command can be run on this machine, before anything is started.

    Raises:
        UsageError: no command is given.
        CommandError: it is not found, or not executable.
    """
    if not command:
        raise UsageError(
            "no command: write it last, after --, as in: netstorm launch -n 4 -- python train.py"
        )
    name = command[0]
    path = environment.get("PATH", os.defpath)
    if "/" in name:
        file = folder / name
        if file.is_dir():
            raise CommandError(f"{name!r} is a folder, not a command", CANNOT_RUN)
        if not file.exists():
            raise CommandError(f"command {name!r} not found in {folder}", NOT_FOUND)
        if not os.access(file, os.X_OK):
            hint = f"; to run a Python script: -- python {name} …" if name.endswith(".py") else ""
            raise CommandError(f"{name!r} is not executable{hint}", CANNOT_RUN)
    elif shutil.which(name, path=path) is None:
        if (folder / name).is_file():
            hint = f"; to run the script of that name here: -- python {name} …"
        elif name.startswith("-"):
            hint = "; options of the launcher come before --, the command after it"
        else:
            hint = f" in PATH={path}"
        raise CommandError(f"command {name!r} not found{hint}", NOT_FOUND)


# Runs the processes of a job: starts them, prints their output, and carries out what `shutdown` decides.
#
# One thread, one poll. Only the wait for events blocks, so that Ctrl-C is always handled.

_READY_CHECK_S: Final = 0.02
_READY_S: Final = 60.0
"""Time for the scheduler to start: an interpreter and some imports, on a machine that may be busy."""
_LONGEST_WAIT_S: Final = 3600.0
"""Longest wait in poll(2), whose argument must be finite; a grace may be infinite."""
_READER_MS: Final = 2000
"""At the end of a job that was stopped: how long to wait for a reader of our output that does not read."""


def run_job(
    job: LaunchedJob,
    shutdown: Shutdown,
    console: Console,
    log_folder: Path | None,
    *,
    quiet: bool = False,
    spare: Collection[int] = (),
    dashboard: Callable[[Sequence[str]], Process] | None = None,
) -> int:
    """Run a job to its end. No process of it is left when this returns. Only the main thread may call it.

    Args:
        job: what to start.
        shutdown: decides when and how processes are ended.
        console: prints the processes' output.
        log_folder: also gets their output, one file each; None: no files.
        quiet: print only warnings and errors of the scheduler.
        spare: children of this process that are not part of the job, and live on.
        dashboard: returns the process of the dashboard, given how it reaches the scheduler; None: there is
            none. It ends with the job.

    Returns:
        The exit code, as `Shutdown.exit_code`.

    Raises:
        OSError: the machine lacks something that the launcher needs, such as /proc.
    """
    become_subreaper()
    if job.ready_file is not None:
        job.ready_file.unlink(missing_ok=True)  # of an attempt before: its port is nobody's
    with signals_to_descriptor() as woken:
        run = _JobRun(
            job, shutdown, console, log_folder, woken, quiet=quiet, spare=spare, dashboard=dashboard
        )
        try:
            run.to_the_end()
        finally:
            run.clean_up()
        for line in shutdown.summary():
            console.report(line)
        console.flush(None if shutdown.exit_code == 0 else _READER_MS)
    return shutdown.exit_code


class _JobRun:
    def __init__(
        self,
        job: LaunchedJob,
        shutdown: Shutdown,
        console: Console,
        log_folder: Path | None,
        woken: int,
        *,
        quiet: bool,
        spare: Collection[int],
        dashboard: Callable[[Sequence[str]], Process] | None,
    ) -> None:
        self._job: Final = job
        self._shutdown: Final = shutdown
        self._console: Final = console
        self._log_folder: Final = log_folder
        self._woken: Final = woken
        self._quiet: Final = quiet
        self._spare: Final = spare
        self._make_dashboard = dashboard
        self._dashboard: Child | None = None
        self._words: Final[dict[Member, bytes]] = {}
        """What the scheduler was told of ranks that have ended."""
        self._children: Final[dict[Member, Child]] = {}
        self._nodes_started = False
        self._nodes: Final[dict[Member, Process]] = {}
        """As they were started first."""
        self._port: int | None = None
        """The scheduler's, if it has chosen it."""
        self._ready_by = clock.monotonic() + _READY_S

    def to_the_end(self) -> None:
        if self._job.scheduler is not None:
            self._start(self._job.scheduler)
        while not self._shutdown.is_over:
            if not self._nodes_started and self._shutdown.may_start:
                self._start_nodes_if_ready()
            self._wait()
            self._reap()
            if self._console.is_closed and self._shutdown.exit_code == 0:
                self._act(self._shutdown.stop_requested(signal.SIGPIPE, clock.monotonic()))
            self._act(self._shutdown.tick(clock.monotonic()))

    def clean_up(self) -> None:
        for child in self._children.values():
            child.close_log()
        # There are none, unless a supervisor was killed, or an exception has brought us here.
        left = kill_descendants(self._spare)
        if left:
            self._console.report(f"these processes survive SIGKILL: {', '.join(map(str, left))}")
        if self._dashboard is not None:
            self._dashboard.exit_code()
            self._print(self._dashboard, self._dashboard.read_rest())

    # ----------------------------------------------------------------------------------------------- starting

    def _start_nodes_if_ready(self) -> None:
        port = None
        if self._job.ready_file is not None:
            try:
                port = split_host_port(self._job.ready_file.read_text().strip())[1]
            except (FileNotFoundError, ValueError):
                if clock.monotonic() > self._ready_by:
                    text = f"the scheduler is not ready after {_READY_S:g} s"
                    self._act(self._shutdown.launch_failed(text, clock.monotonic()))
                return
        self._nodes_started = True
        self._port = port
        for process in self._job.nodes(port):
            self._nodes[process.member] = process
            if self._shutdown.may_start:
                self._start(process)

    def _start(self, process: Process) -> None:
        try:
            child = Child(process, self._console, self._log_folder)
        except OSError as error:
            text = f"cannot start {in_words([process.member])}: {process.supervisor[0]}: {error.strerror}"
            self._act(self._shutdown.launch_failed(text, clock.monotonic()))
            return
        self._children[process.member] = child
        if process.member == SCHEDULER:
            for line in self._words.values():  # it was started again
                child.tell(line)
        self._words.pop(process.member, None)
        self._shutdown.started(process.member, clock.monotonic())

    def _start_dashboard(self, line: bytes) -> None:
        """Start the dashboard if this line of the scheduler says how it is reached. No job fails for it."""
        found = _WATCH.fullmatch(line)
        if found is None or self._make_dashboard is None:
            return
        process = self._make_dashboard(shlex.split(found[1].decode()))
        self._make_dashboard = None
        try:
            self._dashboard = Child(process, self._console, None)
        except OSError as error:
            self._console.report(f"there is no dashboard: {error.strerror}")

    def _start_again(self, member: Member, count: int) -> None:
        variables = {"NETSTORM_RESTART": str(count)}
        if member == SCHEDULER:
            assert self._job.scheduler_at is not None
            self._start(self._job.scheduler_at(self._port).with_variables({}, is_restart=True))
        else:
            self._start(self._nodes[member].with_variables(variables, is_restart=True))

    # ----------------------------------------------------------------------------------------------- watching

    def _wait(self) -> None:
        """Wait for output, signals, room for our own output, or the next deadline."""
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        readers = {}
        if not self._console.is_full:
            children = [*self._children.values(), *([self._dashboard] if self._dashboard else [])]
            readers = {number: child for child in children for number in child.descriptors}
        for number in readers:
            poller.register(number, select.POLLIN)
        writing = self._console.wanted
        if writing is not None:
            poller.register(writing, select.POLLOUT)
        for number, _ in poller.poll(self._timeout_ms()):
            if number == self._woken:
                self._handle_signals()
            elif number in readers:
                self._print(readers[number], readers[number].read(number))
            elif writing is not None:
                self._console.write()
        self._show_unfinished()

    def _timeout_ms(self) -> float:
        """Return the longest wait for events."""
        waits = [_LONGEST_WAIT_S]
        if self._shutdown.deadline is not None:
            waits.append(self._shutdown.deadline - clock.monotonic())
        if not self._nodes_started and self._shutdown.may_start:
            waits.append(_READY_CHECK_S)
        return max(0.0, min(waits)) * 1000 + 1

    def _handle_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._woken, 64):
                if number != signal.SIGCHLD:
                    self._act(self._shutdown.stop_requested(signal.Signals(number), clock.monotonic()))

    def _reap(self) -> None:
        """Report the processes that have ended, after their last output."""
        for child in list(self._children.values()):
            code = child.exit_code()
            if code is not None:
                self._print(child, child.read_rest())
                child.close_log()
                self._tell_end(child, code)
                del self._children[child.member]
                last = shortened(child.last_error.decode(errors="replace"))
                self._act(self._shutdown.exited(child.member, code, clock.monotonic(), last_line=last))

    def _tell_end(self, child: Child, code: int) -> None:
        """Tell the scheduler how a rank has ended, once."""
        member, scheduler = child.member, self._children.get(SCHEDULER)
        if member in (SCHEDULER, DASHBOARD) or member in self._words or self._job.scheduler is None:
            return
        ended = RankEnded.of(
            member,
            code,
            outcome(code),
            self._job.hosts.get(member, ""),
            child.last_error,
            again=self._shutdown.will_start_again(member, code),
        )
        self._words[member] = msgspec.json.encode(ended) + b"\n"
        if scheduler is not None:
            scheduler.tell(self._words[member])

    # ------------------------------------------------------------------------------------------------- output

    def _print(self, child: Child, lines: Iterable[tuple[Stream, bytes]]) -> None:
        """Print and log lines; those of the scheduler for this process go to `shutdown` instead."""
        logged = []
        for stream, line in lines:
            first = came = None
            if child.member == SCHEDULER and stream is Stream.OUT:
                first, came = first_failure(line), rank_that_came(line)
            if came is not None:
                self._shutdown.came(Member(came))
            elif first is not None:
                rank, text = first
                self._shutdown.first_failure_reported(Member(rank) if rank >= 0 else None, text)
            elif child.member == SCHEDULER and line == BEGUN.encode():
                self._shutdown.begun()
            else:
                if child.member == SCHEDULER and self._make_dashboard is not None:
                    self._start_dashboard(line)
                if not (self._quiet and child.member == SCHEDULER and _is_information(stream, line)):
                    self._console.line(stream, child.label, line)
                logged.append(line)
        child.write_log(logged)
        if child.ended is not None:
            self._tell_end(child, child.ended)

    def _show_unfinished(self) -> None:
        for child in self._children.values():
            if child.unfinished:
                self._console.show(child.label, child.unfinished)
                return
        self._console.show("", b"")

    # ---------------------------------------------------------------------------------------------- decisions

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Report(text):
                    self._console.report(text)
                case Explain(members, text):
                    for member in members:
                        line = f"netstorm: {text}".encode(errors="replace")
                        self._console.line(Stream.ERR, self._children[member].label, line)
                        self._children[member].write_log([line])
                case SendSignal(members, number):
                    for member in members:
                        self._children[member].send(number.name.encode() + b"\n")
                case StartAgain(member, count):
                    self._start_again(member, count)
                case Abandon(members):
                    for member in members:
                        self._children[member].kill()


_INFORMATION: Final = b" netstorm INFO "
_WARNING: Final = b" netstorm WARNING "


def _is_information(stream: Stream, line: bytes) -> bool:
    """Return whether a line of the scheduler is neither a warning nor an error."""
    return stream is Stream.OUT or _INFORMATION in line


# One process of a job, under its supervisor: how it is started, signalled, and read.

_LAST_OUTPUT_MS: Final = 500
"""Time for the output of an ended process to arrive; longer only if another process holds its pipe."""


class Child:
    """A supervisor, and with it a process of the job.

    Attributes:
        member: which process of the job.
        label: what its lines begin with.
        last_error: the last line of its error output that is not empty, nor one of NetStorm's that is no
            error.
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
            pass_fds=process.descriptors,
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
        said = ended_code(line) if stream is Stream.ERR else None
        if said is not None:
            line, self.ended = said
            if not line:
                return
        is_cause = bool(line.strip()) and not (_INFORMATION in line or _WARNING in line)
        is_error = stream is Stream.ERR and is_cause
        if is_error and (self.ended is None or said is not None):
            self.last_error = plain(line)
        yield stream, line

    def write_log(self, lines: list[bytes]) -> None:
        """Write lines to the log file, if there is one."""
        if self._log is None or not lines:
            return
        try:
            self._log.write(b"".join(line + b"\n" for line in lines))
        except OSError as error:  # a full disk is no reason to end a training
            text = f"cannot write the log of {in_words([self.member])}: {error.strerror}; it ends here"
            self._console.report(text)
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


# A job that cannot go on without one of its processes is started again as a whole.

_JOB: Final = "job"


def state_folder(
    environment: Mapping[str, str], scratch: Path, attempt: int, *, is_local: bool
) -> str | None:
    """Return the folder for the log from which a scheduler of the job goes on; None: it has none.

    Each attempt has its own: its scheduler must not go on with the job of the attempt before.

    Args:
        environment: of the job; NETSTORM_STATE_DIR there wins.
        scratch: folder for temporary files on this machine.
        attempt: from 0.
        is_local: whether the scheduler runs on this machine.
    """
    given = environment.get("NETSTORM_STATE_DIR", "").strip()
    if not given and not is_local:
        return None
    base = given or str(scratch / "state")
    return f"{base}/restart-{attempt}" if attempt else base


def for_attempt(job: LaunchedJob, attempt: int, state: str | None) -> LaunchedJob:
    """Return a job whose nodes know how often it was started again, and whose scheduler keeps a log.

    Args:
        job: as it is started first.
        attempt: from 0.
        state: folder of the log; None: none, so a scheduler that ends cannot be started again.
    """
    again = attempt > 0
    own = {"NETSTORM_RESTART": str(attempt)}
    kept = {} if state is None else {"NETSTORM_STATE_DIR": state}
    scheduler, scheduler_at, nodes = job.scheduler, job.scheduler_at, job.nodes
    return dataclasses.replace(
        job,
        scheduler=None if scheduler is None else scheduler.with_variables(kept, is_restart=again),
        scheduler_at=None
        if scheduler_at is None or state is None
        else lambda port: scheduler_at(port).with_variables(kept),
        nodes=lambda port: [process.with_variables(own, is_restart=again) for process in nodes(port)],
    )


def run_with_restarts(attempt: Callable[[int], Shutdown], limit: int, console: Console) -> int:
    """Run a job until it ends well, is stopped, or has been started again `limit` times.

    Args:
        attempt: runs the job once, given how often it has been started again; returns how it ended.
        limit: number of restarts.
        console: says so.

    Returns:
        The exit code of the last attempt, or 128 + the signal that stopped the job.
    """
    budget = RestartBudget(limit)
    count = 0
    with signals_to_descriptor() as woken:
        while True:
            budget.started(_JOB, clock.monotonic())
            ended = attempt(count)
            code = ended.exit_code
            if code in {0, CANNOT_RUN, NOT_FOUND} or ended.was_stopped:
                return code
            planned = budget.after_failure(_JOB, clock.monotonic())
            if planned is None:
                return code
            console.report(f"all processes are started again {planned.in_words()}")
            console.flush(None)
            stopped = _wait(woken, planned.at)
            if stopped is not None:
                return 128 + stopped
            count = planned.count


def _wait(woken: int, until: float) -> int | None:
    """Wait until a time; return the signal that has come meanwhile and ends the job."""
    while (left := until - clock.monotonic()) > 0:
        poller = select.poll()
        poller.register(woken, select.POLLIN)
        if poller.poll(left * 1000 + 1):
            with contextlib.suppress(BlockingIOError):
                for number in os.read(woken, 64):
                    if number != signal.SIGCHLD:
                        return int(number)
    return None


# Turns the signals that concern a job into bytes on a descriptor, which a poll can wait for.


@contextmanager
def signals_to_descriptor() -> Iterator[int]:
    """Yield a descriptor that gets the number of each signal; restore the handlers at the end."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    before_fd = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        # A signal that is ignored stays ignored: nohup, or a shell that runs us in the background, wants
        # that.
        if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, _do_nothing)
    try:
        yield woken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(woken)
        os.close(wake)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal: the wake-up descriptor already has its number."""
