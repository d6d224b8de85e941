"""Runs the processes of a job: starts them, prints their output, and carries out what `shutdown` decides.

One thread, one poll. Only the wait for events blocks, so that Ctrl-C is always handled.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

import msgspec

from netstorm import clock
from netstorm.addresses import split_host_port
from netstorm.cli.launch.child import Child
from netstorm.cli.launch.job import Job, Process
from netstorm.cli.launch.members import SCHEDULER, Member, in_words, outcome
from netstorm.cli.launch.output.console import Console, Stream
from netstorm.cli.launch.shutdown import (
    Abandon,
    Action,
    Explain,
    Report,
    SendSignal,
    Shutdown,
    StartAgain,
)
from netstorm.cli.launch.signals import signals_to_descriptor
from netstorm.cli.launch.supervisor import become_subreaper, kill_descendants
from netstorm.cli.launcher_lines import BEGUN, first_failure
from netstorm.scheduler.launched_ranks import RankEnded, shortened

__all__ = ["run_job"]

_READY_CHECK_S: Final = 0.02
_READY_S: Final = 60.0
"""Time for the scheduler to start: an interpreter and some imports, on a machine that may be busy."""
_LONGEST_WAIT_S: Final = 3600.0
"""Longest wait in poll(2), whose argument must be finite; a grace may be infinite."""
_READER_MS: Final = 2000
"""At the end of a job that was stopped: how long to wait for a reader of our output that does not read."""


def run_job(
    job: Job,
    shutdown: Shutdown,
    console: Console,
    log_folder: Path | None,
    *,
    quiet: bool = False,
    spare: Collection[int] = (),
) -> int:
    """Run a job to its end. No process of it is left when this returns. Only the main thread may call it.

    Args:
        job: what to start.
        shutdown: decides when and how processes are ended.
        console: prints the processes' output.
        log_folder: also gets their output, one file each; None: no files.
        quiet: print only warnings and errors of the scheduler.
        spare: children of this process that are not part of the job, and live on.

    Returns:
        The exit code, as `Shutdown.exit_code`.

    Raises:
        OSError: the machine lacks something that the launcher needs, such as /proc.
    """
    become_subreaper()
    if job.ready_file is not None:
        job.ready_file.unlink(missing_ok=True)  # of an attempt before: its port is nobody's
    with signals_to_descriptor() as woken:
        run = _JobRun(job, shutdown, console, log_folder, woken, quiet=quiet, spare=spare)
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
        job: Job,
        shutdown: Shutdown,
        console: Console,
        log_folder: Path | None,
        woken: int,
        *,
        quiet: bool,
        spare: Collection[int],
    ) -> None:
        self._job: Final = job
        self._shutdown: Final = shutdown
        self._console: Final = console
        self._log_folder: Final = log_folder
        self._woken: Final = woken
        self._quiet: Final = quiet
        self._spare: Final = spare
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
            readers = {number: child for child in self._children.values() for number in child.descriptors}
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
        if member == SCHEDULER or member in self._words or self._job.scheduler is None:
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
            first = None
            if child.member == SCHEDULER and stream is Stream.OUT:
                first = first_failure(line)
            if first is not None:
                rank, text = first
                self._shutdown.first_failure_reported(Member(rank) if rank >= 0 else None, text)
            elif child.member == SCHEDULER and line == BEGUN.encode():
                self._shutdown.begun()
            else:
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


def _is_information(stream: Stream, line: bytes) -> bool:
    """Return whether a line of the scheduler is neither a warning nor an error."""
    return stream is Stream.OUT or b" netstorm INFO " in line
