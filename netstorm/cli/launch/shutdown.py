"""How a job ends: who is told what, when, with which exit code. Decisions only: `children` acts.

The first process that fails starts it: the others get time to notice and end by themselves (a node raises
`NodeLost` or `NodeFailed`), and are then interrupted, terminated, killed. Ctrl-C and SIGTERM start at their
own step of that ladder, and a second one takes the next step at once. The scheduler outlives the nodes,
because it tells them of each other's end.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

from netstorm.cli.launch.members import SCHEDULER, Member, in_words, outcome

__all__ = ["Action", "GiveUp", "Say", "Send", "Shutdown"]


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send a signal to members and all that belongs to them."""

    members: tuple[Member, ...]
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End what stands for these members on this machine: they do not end even of SIGKILL."""

    members: tuple[Member, ...]


Action: TypeAlias = Say | Send | GiveUp


class Stage(Enum):
    """Where a job is."""

    RUNNING = auto()
    FAILED = auto()
    """Some process has failed; the others may still end by themselves."""
    STOPPING = auto()
    """Somebody is being made to end."""


_SSH_FAILED: Final = 255
_KILL_S: Final = 7.0
"""A keeper that lives ends at the latest 5 s after SIGKILL, even if a process hangs in the kernel."""
_SCHEDULER_S: Final = 2.0
"""Of a job that has failed or is stopped, the scheduler has nothing left to do once the nodes are gone."""

_LADDER: Final[Mapping[signal.Signals, signal.Signals | None]] = {
    signal.SIGINT: signal.SIGTERM,
    signal.SIGTERM: signal.SIGKILL,
    signal.SIGKILL: None,
}

_ASKED: Final[Mapping[signal.Signals, tuple[str, signal.Signals]]] = {
    signal.SIGINT: ("Ctrl-C", signal.SIGINT),
    signal.SIGTERM: ("SIGTERM has come", signal.SIGTERM),
    signal.SIGHUP: ("the terminal is gone (SIGHUP)", signal.SIGTERM),
    signal.SIGPIPE: ("nobody reads the output any more", signal.SIGTERM),
}
"""Why the whole job is to stop, in words, and where on the ladder that begins."""


class Shutdown:
    """What is known of all processes of one job."""

    def __init__(
        self, nodes: int, *, grace_s: float, patience_s: float, hosts: Mapping[Member, str] | None = None
    ) -> None:
        """Begin with nothing started.

        Args:
            nodes: how many there will be.
            grace_s: from one step of the ladder to the next.
            patience_s: from the first failure to the ladder.
            hosts: where members run, if not on this machine; for messages.
        """
        self._nodes: Final = frozenset(Member(rank) for rank in range(nodes))
        self._grace_s: Final = grace_s
        self._patience_s: Final = patience_s
        self._hosts: Final = hosts or {}
        self._alive: set[Member] = set()
        self._codes: dict[Member, int] = {}
        self._stage = Stage.RUNNING
        self._failures: dict[Member | None, tuple[str, int]] = {}
        """Text and exit code of each that was not made to end, in order; None: the launcher's own."""
        self._judged = False
        self._blamed: Member | None = None
        self._asked: signal.Signals | None = None
        self._step: signal.Signals | None = None
        self.deadline: float | None = None
        """When `tick` is to be called; None: not without another event."""

    # ---------------------------------------------------------------------------------------- what is known

    @property
    def may_start(self) -> bool:
        """Whether it still makes sense to start a process."""
        return self._stage is Stage.RUNNING

    @property
    def is_over(self) -> bool:
        """Whether every process has ended and none will start."""
        return not self._alive and (not self.may_start or self._nodes <= self._codes.keys())

    @property
    def exit_code(self) -> int:
        """The first failure's, or 128 + the signal that stopped the job, or 0."""
        first = self._first_failure()
        if first is not None:
            return first[1]
        return 0 if self._asked is None else 128 + self._asked

    def summary(self) -> list[str]:
        """Return how each process ended, unless all is well."""
        if not self.exit_code:
            return []
        first = self._first_failure()
        lines = [first[0]] if first is not None else []
        by_code: dict[int, list[Member]] = defaultdict(list)
        for member, code in self._codes.items():
            by_code[code].append(member)
        lines += [f"{outcome(code)}: {in_words(by_code[code])}" for code in sorted(by_code, reverse=True)]
        missing = self._nodes - self._codes.keys()
        return lines + ([f"not started: {in_words(missing)}"] if missing else [])

    def _first_failure(self) -> tuple[str, int] | None:
        """Return the failure that the others came of, by the scheduler's word or else in time."""
        if not self._failures:
            return None
        if self._blamed is not None and self._blamed in self._failures:
            return self._failures[self._blamed]
        # A scheduler that has passed judgement has not failed: it reports that the job has.
        exempt = {SCHEDULER} if self._judged else set()
        nodes = [failure for member, failure in self._failures.items() if member not in exempt]
        return next(iter(nodes or self._failures.values()))

    # ---------------------------------------------------------------------------------------- what happens

    def started(self, member: Member) -> None:
        """Note that a process runs."""
        self._alive.add(member)

    def exited(self, member: Member, code: int, now: float) -> list[Action]:
        """Note that a process has ended.

        Args:
            member: which.
            code: exit code, or 128 + the number of the signal that killed it.
            now: in seconds, as in all calls.
        """
        self._alive.discard(member)
        self._codes[member] = code
        actions: list[Action] = []
        if code and self._stage is not Stage.STOPPING:
            actions += self._fail(member, self._failure(member, code), code, now)
        self._set_schedulers_deadline(now)
        return actions

    def cannot_go_on(self, reason: str, now: float) -> list[Action]:
        """Note a failure of the launcher's own, such as a process that cannot be started."""
        return self._fail(None, reason, 1, now) if self._stage is Stage.RUNNING else []

    def judged(self, blamed: Member | None) -> None:
        """Note the scheduler's word on whose end was the first; None: on nobody's in particular."""
        self._judged, self._blamed = True, blamed

    def asked_to_stop(self, reason: signal.Signals, now: float) -> list[Action]:
        """Deal with Ctrl-C (SIGINT), SIGTERM, SIGHUP, or SIGPIPE for output that nobody reads."""
        why, step = _ASKED[reason]
        if not self._alive:
            self._asked, self._stage = self._asked or reason, Stage.STOPPING
            return []
        if self._stage is Stage.STOPPING:
            again, self._asked = self._asked is not None, self._asked or reason
            return self._climb(f"{why} again" if again else why, now)
        self._asked, self._stage = reason, Stage.STOPPING
        return self._take(self._lowest(step), why, now)

    def tick(self, now: float) -> list[Action]:
        """Do what is due."""
        if self.deadline is None or now < self.deadline:
            return []
        if self._step is not None:
            late = f"{self._step_s(self._step):g} s after {self._step.name}"
        elif self._only_scheduler():
            late = f"{self._schedulers_time():g} s after the last node"
        else:
            late = f"{self._patience_s:g} s after the first failure"
        self._stage = Stage.STOPPING
        return self._climb(f"not ended {late}", now)

    # -------------------------------------------------------------------------------------------- decisions

    def _fail(self, member: Member | None, text: str, code: int, now: float) -> list[Action]:
        self._failures[member] = (text, code)
        if self._stage is Stage.FAILED:
            return []
        self._stage = Stage.FAILED
        others = self._alive - {SCHEDULER}
        if not others:
            self.deadline = now + self._schedulers_time()
            return [Say(text)]
        self.deadline = now + self._patience_s
        have = "has" if len(others) == 1 else "have"
        return [Say(f"{text}; {in_words(others)} {have} {self._patience_s:g} s to end by themselves")]

    def _failure(self, member: Member, code: int) -> str:
        if member == SCHEDULER and self._judged:
            return "the job has failed"
        where = f" on {self._hosts[member]}" if member in self._hosts else ""
        how = outcome(code)
        how = f"was {how}" if how.startswith("killed") else f"failed with {how}"
        if where and code == _SSH_FAILED:
            how += " (ssh's own code when it cannot connect, or has lost the connection)"
        return f"{in_words([member])}{where} {how}"

    def _set_schedulers_deadline(self, now: float) -> None:
        """Begin the scheduler's own end once no node is left."""
        if not self._alive:
            self.deadline = None
        elif self._only_scheduler() and (not self.may_start or self._nodes <= self._codes.keys()):
            self._step = None
            self.deadline = now + self._schedulers_time()

    def _schedulers_time(self) -> float:
        return self._grace_s if self._stage is Stage.RUNNING else min(self._grace_s, _SCHEDULER_S)

    def _only_scheduler(self) -> bool:
        return self._alive == {SCHEDULER}

    def _targets(self) -> tuple[Member, ...]:
        return tuple(sorted(self._alive - {SCHEDULER} or self._alive))

    def _lowest(self, step: signal.Signals) -> signal.Signals:
        # A scheduler alone has nobody to say goodbye to, and nothing that an interrupt could save.
        return signal.SIGTERM if step is signal.SIGINT and self._only_scheduler() else step

    def _climb(self, why: str, now: float) -> list[Action]:
        step = self._lowest(signal.SIGINT) if self._step is None else _LADDER[self._step]
        return self._take(step, why, now)

    def _take(self, step: signal.Signals | None, why: str, now: float) -> list[Action]:
        members = self._targets()
        if step is None:
            self.deadline = None
            return [Say(f"{why}: giving up on {self._places(members)}"), GiveUp(members)]
        self._step = step
        self.deadline = now + self._step_s(step)
        return [Say(f"{why}: sending {step.name} to {in_words(members)}"), Send(members, step)]

    def _step_s(self, step: signal.Signals) -> float:
        return _KILL_S if step is signal.SIGKILL else self._grace_s

    def _places(self, members: tuple[Member, ...]) -> str:
        hosts = sorted({self._hosts[member] for member in members if member in self._hosts})
        left = f"; processes may be left on {', '.join(hosts)}" if hosts else ""
        return in_words(members) + left
