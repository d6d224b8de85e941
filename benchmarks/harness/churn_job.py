"""A job whose processes die and come back: the processes, what they report, and what must hold of it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from harness.faults import KINDS
from systems.base import BENCHMARKS, environment

__all__ = ["ChurnJob", "Member"]

REMOVED: Final = 3
"""Exit code of `workers.churn` when it has heard that it is out of the job."""

_TAIL: Final = 3000
_KEPT_STEPS: Final = 20_000
"""Steps whose states are kept to be compared: no rank is further behind."""


@dataclass(slots=True)
class Member:
    """One rank: its present process, and what it has reported."""

    rank: int
    process: subprocess.Popen[bytes]
    """Under torchrun its agent, which all ranks share."""
    pid: int
    log: Path
    started_at: float
    """When the present process was started, on the monotonic clock, as all times here."""
    rest: bytes = b""
    step: int = -1
    """The last one that it has completed."""
    completed_at: float = 0.0
    stopped: bool = False
    killed: bool = False
    ended: bool = False
    contributes: bool = False
    """Its values are in the last step."""
    restart_at: float | None = None
    joined_at: float | None = None

    @property
    def runs(self) -> bool:
        """Whether it takes part, as far as is known."""
        return not (self.stopped or self.killed or self.ended) and self.contributes


@dataclass(slots=True)
class ChurnJob:
    """The processes of one job on this machine.

    Attributes:
        steps: the last step that any rank has completed.
        errors: what must not happen, in words.
        comings: when a process was started, and when its values were in a step, of each.
    """

    kinds: ClassVar[Sequence[str]] = tuple(KINDS)
    """The kinds of fault that it can have."""
    may_skip: ClassVar[bool] = False
    """Whether a rank may go on with a later step than the next one."""

    nodes: int
    folder: Path
    variables: Mapping[str, str]
    command: Callable[[int, Sequence[str]], list[str]]
    """Makes a command run beside a rank."""
    hosts: Sequence[str] = ()
    members: dict[int, Member] = field(default_factory=dict)
    worker: str = "churn.py"
    scheduler: subprocess.Popen[bytes] | None = None
    steps: int = 0
    errors: list[str] = field(default_factory=list)
    comings: list[tuple[float, float]] = field(default_factory=list)
    removed: int = 0
    _states: dict[int, dict[tuple[int, int], set[tuple[int, int]]]] = field(default_factory=dict)
    """By step, and by the checksum of the state after it and the ranks in it: ranks that say so, and their
    processes."""
    _last_steps: dict[tuple[int, int], int] = field(default_factory=dict)
    """By rank and process that was killed, or heard that it was out of the job: its last step."""
    _completed_at: dict[int, float] = field(default_factory=dict)
    """By step: when the first rank had completed it."""
    _log_before: int = 0
    """Length of the scheduler's log when its present process was started."""
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    # -------------------------------------------------------------------------------------------- processes

    def start_scheduler(self) -> None:
        """Start a scheduler, or start it again: it goes on with its log."""
        with (self.folder / "scheduler.log").open("ab") as log:
            self._log_before = log.tell()
            self.scheduler = subprocess.Popen(
                self.command(
                    0, [sys.executable, "-m", "netstorm", "scheduler", "--state", str(self.folder / "state")]
                ),
                env=environment(DMLC_ROLE="scheduler", DMLC_NODE_HOST=self._host(0), **self.variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def scheduler_ready(self) -> bool:
        """Whether the scheduler that was started last has said that it goes on."""
        assert self.scheduler is not None
        if self.scheduler.returncode is not None:
            return False
        with (self.folder / "scheduler.log").open("rb") as log:
            log.seek(self._log_before)
            return b"goes on" in log.read()

    def completed_at(self) -> list[float]:
        """Return when each step was completed by a rank for the first time, in order."""
        return sorted(self._completed_at.values())

    def start(self, rank: int, now: float) -> None:
        """Start a rank, or start it again."""
        path = self.folder / f"rank{rank}.log"
        with path.open("ab") as log:
            process = subprocess.Popen(
                self.command(rank, [sys.executable, str(BENCHMARKS / "workers" / self.worker)]),
                env=environment(
                    PYTHONPATH=os.pathsep.join((str(BENCHMARKS), str(BENCHMARKS.parent))),
                    **self.variables_of(rank),
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        member = Member(rank, process, process.pid, path, now)
        self.members[rank] = member
        self._selector.register(process.stdout, selectors.EVENT_READ, member)

    def variables_of(self, rank: int) -> Mapping[str, str]:
        """Return the environment of a rank's process."""
        return {
            "DMLC_ROLE": "worker",
            "DMLC_NODE_HOST": self._host(rank),
            "NETSTORM_RANK": str(rank),
            **self.variables,
        }

    def tell(self, rank: int, command: str) -> None:
        """Give a rank a command."""
        stdin = self.members[rank].process.stdin
        assert stdin is not None
        try:
            stdin.write(command.encode() + b"\n")
            stdin.flush()
        except OSError:
            pass  # it has just ended, which `read` sees

    def kill(self, rank: int, restart_at: float) -> None:
        """Kill a rank; it is started again at a time."""
        member = self.members[rank]
        member.killed, member.restart_at = True, restart_at
        member.process.kill()

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a rank SIGSTOP, SIGCONT, or SIGUSR1: it logs where its threads are."""
        member = self.members[rank]
        if number != signal.SIGUSR1:
            member.stopped = number == signal.SIGSTOP
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, number)

    def kill_scheduler(self) -> None:
        """Kill the scheduler."""
        assert self.scheduler is not None
        self.scheduler.kill()
        self.scheduler.wait()

    def stop(self) -> None:
        """End all processes, whatever they do."""
        for member in self.members.values():
            member.process.kill()
            member.process.wait()
            for pipe in (member.process.stdin, member.process.stdout):
                if pipe is not None:
                    pipe.close()
        if self.scheduler is not None:
            self.scheduler.kill()
            self.scheduler.wait()
            if self.scheduler.stdin is not None:
                self.scheduler.stdin.close()
        self._selector.close()

    def _host(self, rank: int) -> str:
        return self.hosts[rank] if self.hosts else "127.0.0.1"

    # ----------------------------------------------------------------------------------------- what they say

    def read(self, timeout_s: float) -> None:
        """Take what processes have said, for at most so long, and start those again that are to be."""
        for found, _ in self._selector.select(timeout_s):
            member: Member = found.data
            try:
                got = os.read(found.fd, 1 << 16)
            except BlockingIOError:
                continue
            if not got:
                self._selector.unregister(found.fileobj)
                self._ended(member)
                continue
            *lines, member.rest = (member.rest + got).split(b"\n")
            for line in lines:
                self._said(member, json.loads(line))
        now = time.monotonic()
        for member in list(self.members.values()):
            if (
                member.restart_at is not None
                and now >= member.restart_at
                and member.ended  # all that it has said is read
            ):
                for pipe in (member.process.stdin, member.process.stdout):
                    if pipe is not None:
                        pipe.close()
                self.start(member.rank, now)

    def _said(self, member: Member, words: dict[str, Any]) -> None:
        event = words.get("event")
        if event == "joined":
            member.joined_at = time.monotonic()
        elif event == "error":
            self.errors.append(f"rank {member.rank}: {words['text']}")
        elif event == "removed":
            self.removed += 1
        elif event is None:
            self._completed(member, words["step"], words["state"], words["ranks"], words["at"])

    def _completed(self, member: Member, step: int, state: int, ranks: int, at: float) -> None:
        if 0 <= member.step != step - 1 and not self.may_skip:
            self.errors.append(f"rank {member.rank} completes step {step} after step {member.step}")
        member.step, member.completed_at = step, at
        contributes = bool(ranks >> member.rank & 1)
        if contributes and not member.contributes:
            self.comings.append((member.started_at, at))
        member.contributes = contributes
        self.steps = max(self.steps, step)
        self._completed_at[step] = min(at, self._completed_at.get(step, at))
        said = self._states.setdefault(step, {})
        said.setdefault((state, ranks), set()).add((member.rank, member.process.pid))
        if len(self._states) > _KEPT_STEPS:
            for old in sorted(self._states)[: _KEPT_STEPS // 2]:
                if len(self._states[old]) == 1:
                    del self._states[old]

    def check_states(self) -> None:
        """Compare what all processes have said of each step; at the end, when it is known who has ended how.

        A rank that dies, or is stopped for too long, may be the only one to complete its last step with a
        result that has reached nobody else: the others take that step without it.
        """
        for step, said in sorted(self._states.items()):
            counting = {
                what: {one for one in by if self._last_steps.get(one) != step} for what, by in said.items()
            }
            different = [(what, by) for what, by in counting.items() if by]
            if len(different) > 1:
                texts = ", ".join(
                    f"{state:#x} of ranks {ranks:#b}, say ranks {sorted(rank for rank, _ in by)}"
                    for (state, ranks), by in different
                )
                self.errors.append(f"after step {step} ranks have different states: {texts}")

    def _ended(self, member: Member) -> None:
        code = member.process.wait()
        member.ended = True
        if member.killed or code == REMOVED:
            self._last_steps[member.rank, member.process.pid] = member.step
        if member.killed or code == 0:
            return
        if code == REMOVED:
            member.restart_at = time.monotonic() + 0.1
            return
        self.errors.append(f"rank {member.rank} ended with exit code {code}: {self.log_of(member)[-300:]}")
        member.restart_at = time.monotonic() + 1.0

    def log_of(self, member: Member) -> str:
        """Return the end of what a rank has logged."""
        return member.log.read_text(errors="replace")[-_TAIL:].strip()
