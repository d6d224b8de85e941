"""Starts the processes of a job, passes on what they print, and does what `shutdown` decides.

One thread, one poll: nothing here blocks but the wait for events, so that Ctrl-C always gets through.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Final

from netstorm import clock
from netstorm.cli.launch.console import Console, Stream
from netstorm.cli.launch.job import Job, Process
from netstorm.cli.launch.lines import Lines
from netstorm.cli.launch.members import SCHEDULER, Member, in_words
from netstorm.cli.launch.shutdown import Action, GiveUp, Say, Send, Shutdown
from netstorm.cli.launch.supervisor import become_subreaper, kill_descendants
from netstorm.cli.verdict import blamed_rank

__all__ = ["run_job"]

_READY_CHECK_S: Final = 0.02
_READY_S: Final = 60.0
"""For a scheduler to start: an interpreter and some imports, on a machine that may be busy."""
_LONGEST_WAIT_S: Final = 3600.0
"""For poll(2), whose argument is finite, as a grace need not be."""
_LAST_WORDS_MS: Final = 500
"""For what an ended process has written to arrive; longer only if something else still holds its output."""
_READER_MS: Final = 2000
"""At the end of a job that was stopped, for a reader of our output that does not read."""


@dataclass(slots=True, eq=False)
class _Child:
    """A keeper, and with it a process of the job."""

    member: Member
    label: str
    keeper: subprocess.Popen[bytes]
    log: BinaryIO | None
    streams: dict[int, tuple[Stream, Lines]] = field(default_factory=dict)
    """By file descriptor; those that have not ended."""


def run_job(
    job: Job, ending: Shutdown, console: Console, log_folder: Path | None, *, spare: Collection[int] = ()
) -> int:
    """Run a job to its end; nothing of it runs when this returns. Only the main thread may call it.

    Args:
        job: what to start.
        ending: decides.
        console: gets what the processes print.
        log_folder: gets it too, if not None.
        spare: children of this process that are not of the job, and live on.

    Returns:
        The exit code, as `Shutdown.exit_code`.

    Raises:
        OSError: something that no part of a job can cause, such as a machine without /proc.
    """
    become_subreaper()
    with _signals_to_descriptor() as woken:
        run = _Run(job, ending, console, log_folder, woken, spare=spare)
        try:
            run.to_the_end()
        finally:
            run.clean_up()
        for line in ending.summary():
            console.say(line)
        console.flush(None if ending.exit_code == 0 else _READER_MS)
    return ending.exit_code


class _Run:
    def __init__(
        self,
        job: Job,
        ending: Shutdown,
        console: Console,
        log_folder: Path | None,
        woken: int,
        *,
        spare: Collection[int],
    ) -> None:
        self._job: Final = job
        self._ending: Final = ending
        self._console: Final = console
        self._log_folder: Final = log_folder
        self._woken: Final = woken
        self._spare: Final = spare
        self._children: Final[dict[Member, _Child]] = {}
        self._nodes_started = False
        self._ready_by = clock.monotonic() + _READY_S

    def to_the_end(self) -> None:
        if self._job.scheduler is not None:
            self._start(self._job.scheduler)
        while not self._ending.is_over:
            if not self._nodes_started and self._ending.may_start:
                self._start_nodes_if_ready()
            self._wait()
            self._look_for_ends()
            if self._console.is_closed and self._ending.exit_code == 0:
                self._act(self._ending.asked_to_stop(signal.SIGPIPE, clock.monotonic()))
            self._act(self._ending.tick(clock.monotonic()))

    def clean_up(self) -> None:
        for child in self._children.values():
            if child.log is not None:
                child.log.close()
        left = kill_descendants(
            self._spare
        )  # none, unless a keeper was killed or we are here because of an exception
        if left:
            self._console.say(f"these do not die, not even of SIGKILL: {', '.join(map(str, left))}")

    # --------------------------------------------------------------------------------------------- starting

    def _start_nodes_if_ready(self) -> None:
        port = None
        if self._job.ready_file is not None:
            try:
                port = int(self._job.ready_file.read_text().rpartition(":")[2])
            except (FileNotFoundError, ValueError):
                if clock.monotonic() > self._ready_by:
                    text = f"the scheduler is not ready after {_READY_S:g} s"
                    self._act(self._ending.cannot_go_on(text, clock.monotonic()))
                return
        self._nodes_started = True
        for process in self._job.nodes(port):
            if self._ending.may_start:
                self._start(process)

    def _start(self, process: Process) -> None:
        try:
            keeper = subprocess.Popen(  # noqa: S603 - what the user has asked for
                process.keeper,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=process.environment,
                start_new_session=True,  # the terminal's Ctrl-C is for us alone
            )
        except OSError as error:
            text = f"cannot start {in_words([process.member])}: {process.keeper[0]}: {error.strerror}"
            self._act(self._ending.cannot_go_on(text, clock.monotonic()))
            return
        child = _Child(process.member, process.label, keeper, self._open_log(process))
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        child.streams[keeper.stdout.fileno()] = (Stream.OUT, Lines())
        child.streams[keeper.stderr.fileno()] = (Stream.ERR, Lines())
        self._children[process.member] = child
        self._ending.started(process.member)
        _tell(child, process.order)

    def _open_log(self, process: Process) -> BinaryIO | None:
        if self._log_folder is None:
            return None
        name = process.label if process.member == SCHEDULER else f"rank-{process.label}"
        path = self._log_folder / f"{name}.log"
        try:
            return path.open("wb", buffering=0)
        except OSError as error:
            self._console.say(f"cannot write {path}: {error.strerror}; there will be none")
            return None

    # --------------------------------------------------------------------------------------------- watching

    def _wait(self) -> None:
        """Wait for output, signals, room for our own output, or the next deadline."""
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        readers = {}
        if not self._console.is_full:
            readers = {number: child for child in self._children.values() for number in child.streams}
        for number in readers:
            poller.register(number, select.POLLIN)
        writing = self._console.wanted
        if writing is not None:
            poller.register(writing, select.POLLOUT)
        for number, _ in poller.poll(self._timeout_ms()):
            if number == self._woken:
                self._heed_signals()
            elif number in readers:
                self._read(readers[number], number)
            elif writing is not None:
                self._console.write()
        self._show_unfinished()

    def _timeout_ms(self) -> float:
        """Return how long to wait for events at most."""
        waits = [_LONGEST_WAIT_S]
        if self._ending.deadline is not None:
            waits.append(self._ending.deadline - clock.monotonic())
        if not self._nodes_started and self._ending.may_start:
            waits.append(_READY_CHECK_S)
        return max(0.0, min(waits)) * 1000 + 1

    def _heed_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._woken, 64):
                if number != signal.SIGCHLD:
                    self._act(self._ending.asked_to_stop(signal.Signals(number), clock.monotonic()))

    def _look_for_ends(self) -> None:
        for child in list(self._children.values()):
            code = child.keeper.poll()
            if code is not None:
                self._read_last_words(child)
                if child.log is not None:
                    child.log.close()
                del self._children[child.member]
                code = code if code >= 0 else 128 - code
                self._act(self._ending.exited(child.member, code, clock.monotonic()))

    # ----------------------------------------------------------------------------------------------- output

    def _read(self, child: _Child, number: int) -> None:
        stream, lines = child.streams[number]
        data = os.read(number, 65536)
        finished = lines.feed(data) if data else lines.end()
        if child.member == SCHEDULER and stream is Stream.OUT:
            finished = [line for line in finished if not self._is_verdict(line)]
        for line in finished:
            self._console.line(stream, child.label, line)
        if finished:
            self._keep(child, finished)
        if not data:
            del child.streams[number]

    def _is_verdict(self, line: bytes) -> bool:
        rank = blamed_rank(line)
        if rank is not None:
            self._ending.judged(Member(rank) if rank >= 0 else None)
        return rank is not None

    def _keep(self, child: _Child, lines: list[bytes]) -> None:
        if child.log is None:
            return
        try:
            child.log.write(b"".join(line + b"\n" for line in lines))
        except OSError as error:  # a full disk is no reason to end a training
            self._console.say(f"cannot write {child.log.name}: {error.strerror}; it ends here")
            child.log.close()
            child.log = None

    def _read_last_words(self, child: _Child) -> None:
        """Pass on what a process has written before it ended, before its end is reported."""
        while child.streams:
            poller = select.poll()
            for number in child.streams:
                poller.register(number, select.POLLIN)
            ready = poller.poll(_LAST_WORDS_MS)
            for number, _ in ready:
                self._read(child, number)
            if not ready:
                for stream, lines in child.streams.values():
                    for line in lines.end():
                        self._console.line(stream, child.label, line)
                break
        for pipe in (child.keeper.stdin, child.keeper.stdout, child.keeper.stderr):
            if pipe is not None:
                pipe.close()

    def _show_unfinished(self) -> None:
        for child in self._children.values():
            for _, lines in child.streams.values():
                if lines.unfinished:
                    self._console.show(child.label, lines.unfinished)
                    return
        self._console.show("", b"")

    # --------------------------------------------------------------------------------------------- deciding

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Say(text):
                    self._console.say(text)
                case Send(members, number):
                    for member in members:
                        _tell(self._children[member], number.name.encode() + b"\n")
                case GiveUp(members):
                    for member in members:
                        self._children[member].keeper.kill()


def _tell(child: _Child, line: bytes) -> None:
    """Write to a keeper's lifeline. One that does not read has ended, or is about to be killed."""
    assert child.keeper.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.keeper.stdin.write(line)


@contextmanager
def _signals_to_descriptor() -> Iterator[int]:
    """Turn the signals that concern a job into bytes on a descriptor, and give them back at the end."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    before_fd = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        # What nohup, or a shell that put us in the background, has told us to ignore stays ignored.
        if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, _noted)
    try:
        yield woken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(woken)
        os.close(wake)


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing: the wake-up descriptor has the number."""
