"""How a job ends: which process gets which signal, when, and the exit code. Decides only; `job_run` acts.

The first failure begins the shutdown. The other processes have some time to notice and end by themselves (a
node raises `NodeLost` or `NodeFailed`); then they get SIGINT, SIGTERM and SIGKILL, one after the other.
Before the job has begun the first signal is SIGTERM, since no training is lost; and that time is short once
all are gone that have come to the scheduler, since the rest may hear of nothing.

Ctrl-C and SIGTERM begin at their own step of this ladder; a second one takes the next step at once. The
scheduler outlives the nodes, because it tells them about each other's end.

Processes that the job can do without for a while are started again instead, as often as allowed: nodes of an
elastic job, and a scheduler that has a log. An elastic job also goes on without nodes that are lost for good,
as long as there are enough.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NewType, TypeAlias

from netstorm.cli.launch.supervisor import CANNOT_RUN, NOT_FOUND

__all__ = [
    "SCHEDULER",
    "Abandon",
    "Action",
    "Explain",
    "Member",
    "Report",
    "RestartBudget",
    "SendSignal",
    "Shutdown",
    "StartAgain",
    "in_words",
    "outcome",
]


@dataclass(frozen=True, slots=True)
class Report:
    """Print a message of the launcher."""

    text: str


@dataclass(frozen=True, slots=True)
class Explain:
    """Print a message as a line of each of these processes: why it is ended."""

    members: tuple[Member, ...]
    text: str


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Send a signal to processes of the job, and to everything that they have started."""

    members: tuple[Member, ...]
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class Abandon:
    """Kill the supervisors of these processes on this machine: they do not end, not even after SIGKILL."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start a process of the job again, which has failed."""

    member: Member
    count: int
    """How often it has been started again, with this time."""


Action: TypeAlias = Report | Explain | SendSignal | Abandon | StartAgain


class Stage(Enum):
    """Phase of a job."""

    RUNNING = auto()
    FAILED = auto()
    """A process has failed; the others may still end by themselves."""
    STOPPING = auto()
    """Processes are being ended."""


_SSH_FAILED: Final = 255
_KILL_S: Final = 7.0
"""A supervisor ends at most 5 s after SIGKILL, even if a process hangs in the kernel."""
_NOT_BEGUN_S: Final = 2.0
"""Time to end by themselves for processes of a job that fails before it has begun, if none is left that has
come to the scheduler: the rest may wait for the same in a library that hears nothing."""
_SCHEDULER_S: Final = 2.0
"""Time for the scheduler of a failed or stopped job to end after the last node: it has nothing left to do."""

_LADDER: Final[Mapping[signal.Signals, signal.Signals | None]] = {
    signal.SIGINT: signal.SIGTERM,
    signal.SIGTERM: signal.SIGKILL,
    signal.SIGKILL: None,
}

_STOP_REASONS: Final[Mapping[signal.Signals, tuple[str, signal.Signals]]] = {
    signal.SIGINT: ("Ctrl-C", signal.SIGINT),
    signal.SIGTERM: ("SIGTERM has come", signal.SIGTERM),
    signal.SIGHUP: ("the terminal is gone (SIGHUP)", signal.SIGTERM),
    signal.SIGPIPE: ("nobody reads the output any more", signal.SIGTERM),
}
"""By signal: why the job stops, as text, and the first step of the ladder."""


class Shutdown:
    """State of all processes of one job, and what to do about it. Times are in seconds."""

    def __init__(
        self,
        nodes: int,
        *,
        grace_s: float,
        failure_timeout_s: float,
        hosts: Mapping[Member, str] | None = None,
        restarts: int = 0,
        fewest: int | None = None,
        scheduler_restarts: bool = False,
        is_remote: bool = False,
        tells_begin: bool = False,
    ) -> None:
        """Begin before any process is started.

        Args:
            nodes: number of nodes.
            grace_s: time from one step of the ladder to the next.
            failure_timeout_s: time from the first failure to the first step.
            hosts: where processes run, for messages.
            restarts: how often each process that may be started again is.
            fewest: nodes that an elastic job needs; None: the job is not elastic, and needs all.
            scheduler_restarts: whether the scheduler may be started again.
            is_remote: whether the processes run on other machines, through ssh.
            tells_begin: whether `begun` will be called when all nodes have joined.
        """
        self._nodes: Final = frozenset(Member(rank) for rank in range(nodes))
        self._grace_s: Final = grace_s
        self._failure_timeout_s: Final = failure_timeout_s
        self._hosts: Final = hosts or {}
        self._alive: set[Member] = set()
        self._codes: dict[Member, int] = {}
        self._stage = Stage.RUNNING
        self._failures: dict[Member | None, tuple[str, int]] = {}
        """Text and exit code of each failure before the shutdown, in order; None: the launcher's own."""
        self._first_failure_known = False
        self._how_it_went = ""
        self._first_failed: Member | None = None
        self._stop_signal: signal.Signals | None = None
        self._step: signal.Signals | None = None
        self._due: float | None = None
        """When the next step is due."""
        self._time_s = failure_timeout_s
        """From the first failure to the first step."""
        self._failed_at = 0.0
        self._came: Final[set[Member]] = set()
        self._fewest: Final = fewest
        self._scheduler_restarts: Final = scheduler_restarts
        self._is_remote: Final = is_remote
        self._has_begun = not tells_begin
        self._budget: Final = RestartBudget(restarts)
        self._waiting: Final[dict[Member, PlannedRestart]] = {}
        """Processes that are about to be started again."""

    # -------------------------------------------------------------------------------------------------- state

    @property
    def deadline(self) -> float | None:
        """When to call `tick`; None: not before another event."""
        times = [restart.at for restart in self._waiting.values()]
        return min(times + ([] if self._due is None else [self._due]), default=None)

    @property
    def was_stopped(self) -> bool:
        """Whether a signal has stopped the job, or nobody reads its output any more."""
        return self._stop_signal is not None

    @property
    def may_start(self) -> bool:
        """Whether processes may still be started."""
        return self._stage is Stage.RUNNING

    @property
    def is_over(self) -> bool:
        """Whether every process has ended and none will start."""
        return not self._alive and (not self.may_start or self._all_nodes_ended())

    def _all_nodes_ended(self) -> bool:
        return self._nodes <= self._codes.keys() - self._waiting.keys()

    @property
    def exit_code(self) -> int:
        """The first failure's, or 128 + the signal that stopped the job, or 0."""
        if self._failures:
            return self._failures[self._first_failure()][1]
        if self._stop_signal is None or self._ended_well():
            return 0
        return 128 + self._stop_signal

    def _ended_well(self) -> bool:
        """Whether all ranks of a job that was asked to end have done so in good order: they have agreed on
        it, and have saved what there was to save. Ctrl-C, after which a shell's loop ends, is none of that.
        """
        asked = self._stop_signal in {signal.SIGTERM, signal.SIGHUP}
        return asked and all(self._codes.get(member) == 0 for member in self._nodes)

    def summary(self) -> list[str]:
        """Return how each process ended, and last what was the first failure; nothing if all ended well."""
        if not self.exit_code:
            return []
        first = self._first_failure()
        by_code: dict[int, list[Member]] = defaultdict(list)
        for member, code in self._codes.items():
            if member != first:
                by_code[code].append(member)
        missing = self._nodes - self._codes.keys()
        lines = [f"not started: {in_words(missing)}"] if missing else []
        lines += [f"{outcome(code)}: {in_words(by_code[code])}" for code in sorted(by_code, reverse=True)]
        return lines + ([self._cause(first)] if self._failures else [])

    def _cause(self, member: Member | None) -> str:
        """Return a failure as text."""
        if member == SCHEDULER and self._how_it_went:
            return self._how_it_went
        return self._failures[member][0]

    def _first_failure(self) -> Member | None:
        """Return whose failure caused the others, the one that the scheduler reports, or else the earliest;
        None: nothing has failed, or the launcher itself.
        """
        if self._first_failed is not None and self._first_failed in self._failures:
            return self._first_failed
        # A scheduler that has reported the first failure has not failed itself.
        exempt = {SCHEDULER} if self._first_failure_known else set()
        nodes = [member for member in self._failures if member not in exempt]
        return next(iter(nodes or self._failures), None)

    # ------------------------------------------------------------------------------------------------- events

    def started(self, member: Member, now: float = 0.0) -> None:
        """Record that a process runs."""
        self._alive.add(member)
        self._came.discard(member)
        self._codes.pop(member, None)
        self._budget.started(member, now)

    def came(self, member: Member) -> None:
        """Record that a rank has come to the scheduler, and hears from it how the job goes."""
        self._came.add(member)
        self._set_time()

    def begun(self) -> None:
        """Record that all nodes have joined."""
        self._has_begun = True

    def will_start_again(self, member: Member, code: int) -> bool:
        """Return whether `exited` will start a process again that ends with `code`."""
        return (
            code not in {0, CANNOT_RUN, NOT_FOUND}
            and self._stage is Stage.RUNNING
            and self._may_start_again(member)
            and self._budget.is_left(member)
        )

    def exited(self, member: Member, code: int, now: float, *, last_line: str = "") -> list[Action]:
        """Record that a process has ended, and return what to do.

        Args:
            member: which.
            code: exit code, or 128 + the number of the signal that killed it.
            now: the time.
            last_line: of its error output, for messages.
        """
        self._alive.discard(member)
        self._codes[member] = code
        actions: list[Action] = []
        if code and self._stage is not Stage.STOPPING:
            text = self._failure(member, code, last_line)
            actions += self._survive(member, text, code, now) or self._fail(member, text, code, now)
        if member == SCHEDULER and code == 0:
            self._waiting.clear()  # the job is over: whoever is started now would wait for another one
        if self._all_nodes_ended():
            self._waiting.pop(SCHEDULER, None)  # it would have nothing left to do
        self._set_time()
        self._set_schedulers_deadline(now)
        return actions

    def launch_failed(self, reason: str, now: float) -> list[Action]:
        """Record a failure of the launcher itself, such as a process that cannot be started."""
        return self._fail(None, reason, 1, now) if self._stage is Stage.RUNNING else []

    def first_failure_reported(self, member: Member | None, text: str = "") -> None:
        """Record which process failed first, as the scheduler reports it; None: no process in particular.
        `text`: how the job went.
        """
        self._first_failure_known, self._first_failed, self._how_it_went = True, member, text

    def stop_requested(self, reason: signal.Signals, now: float) -> list[Action]:
        """Handle Ctrl-C (SIGINT), SIGTERM, SIGHUP, or SIGPIPE if nobody reads the output."""
        why, step = _STOP_REASONS[reason]
        self._waiting.clear()
        if not self._alive:
            self._stop_signal, self._stage = self._stop_signal or reason, Stage.STOPPING
            return []
        if self._stage is Stage.STOPPING:
            again, self._stop_signal = self._stop_signal is not None, self._stop_signal or reason
            return self._next_step(f"{why} again" if again else why, now)
        self._stop_signal, self._stage = reason, Stage.STOPPING
        return self._send_step(self._first_step(step), why, now)

    def tick(self, now: float) -> list[Action]:
        """Return what is due now."""
        again = [member for member, restart in self._waiting.items() if restart.at <= now]
        actions: list[Action] = [StartAgain(member, self._waiting.pop(member).count) for member in again]
        if self._due is None or now < self._due:
            return actions
        if self._step is not None:
            late = f"{self._step_s(self._step):g} s after {self._step.name}"
        elif self._only_scheduler():
            late = f"{self._schedulers_time():g} s after the last node"
        else:
            late = f"{self._time_s:g} s after the first failure"
        self._stage = Stage.STOPPING
        self._waiting.clear()
        return self._next_step(f"not ended {late}", now)

    # ---------------------------------------------------------------------------------------------- decisions

    def _survive(self, member: Member, text: str, code: int, now: float) -> list[Action]:
        """Return what to do if the job can go on after a failure; nothing: it cannot."""
        if self._stage is not Stage.RUNNING:
            return []
        if self.will_start_again(member, code):
            planned = self._budget.after_failure(member, now)
            if planned is not None:
                self._waiting[member] = planned
                return [Report(f"{text}; it is started again {planned.in_words()}")]
        left = self._alive | self._waiting.keys() | {one for one, how in self._codes.items() if how == 0}
        count = len(left - {SCHEDULER})
        if self._fewest is None or member == SCHEDULER or count < self._fewest:
            return []
        return [Report(f"{text}; the job goes on with {count} nodes")]

    def _may_start_again(self, member: Member) -> bool:
        if member != SCHEDULER:
            return self._fewest is not None and self._codes.get(SCHEDULER) != 0
        # One that has said how the job went has ended on purpose; before all nodes run it may have no port.
        all_started = self._nodes <= self._alive | self._codes.keys()
        return self._scheduler_restarts and all_started and not self._first_failure_known

    def _fail(self, member: Member | None, text: str, code: int, now: float) -> list[Action]:
        self._failures[member] = (text, code)
        self._waiting.clear()
        if self._stage is Stage.FAILED:
            return []
        self._stage = Stage.FAILED
        others = self._alive - {SCHEDULER}
        if not others:
            self._due = now + self._schedulers_time()
            return []  # the summary says it
        self._failed_at = now
        self._set_time()
        have, selves = ("has", "itself") if len(others) == 1 else ("have", "themselves")
        return [Report(f"{text}; {in_words(others)} {have} {self._time_s:g} s to end by {selves}")]

    def _set_time(self) -> None:
        """Set how long the others have to end by themselves, while they have: whoever hears of the failure
        ends, however busy the machine is.
        """
        if self._stage is Stage.FAILED and self._alive - {SCHEDULER}:
            hear = self._has_begun or self._came & self._alive
            self._time_s = self._failure_timeout_s if hear else _NOT_BEGUN_S
            self._due = self._failed_at + self._time_s

    def _failure(self, member: Member, code: int, last_line: str) -> str:
        """Return as text how a process has failed, and what it has said last."""
        if member == SCHEDULER and self._first_failure_known:
            return "the job has failed"
        where = f" on {self._hosts[member]}" if member in self._hosts else ""
        how = outcome(code)
        how = f"was {how}" if how.startswith("killed") else f"failed with {how}"
        if self._is_remote and code == _SSH_FAILED:
            how += " (ssh's own code when it cannot connect, or has lost the connection)"
        return f"{in_words([member])}{where} {how}" + (f": {last_line}" if last_line else "")

    def _set_schedulers_deadline(self, now: float) -> None:
        """Set the scheduler's deadline once no node is left."""
        if not self._alive:
            self._due = None
        elif self._only_scheduler() and (not self.may_start or self._all_nodes_ended()):
            self._step = None
            self._due = now + self._schedulers_time()

    def _schedulers_time(self) -> float:
        return self._grace_s if self._stage is Stage.RUNNING else min(self._grace_s, _SCHEDULER_S)

    def _only_scheduler(self) -> bool:
        return self._alive == {SCHEDULER}

    def _targets(self) -> tuple[Member, ...]:
        return tuple(sorted(self._alive - {SCHEDULER} or self._alive))

    def _first_step(self, step: signal.Signals) -> signal.Signals:
        return signal.SIGINT if self._only_scheduler() else step  # it leaves SIGTERM to the nodes

    def _next_step(self, why: str, now: float) -> list[Action]:
        if self._step is not None:
            step = _LADDER[self._step]
            if step is signal.SIGTERM and self._only_scheduler():
                step = signal.SIGKILL
            return self._send_step(step, why, now)
        first = self._first_step(signal.SIGINT if self._has_begun else signal.SIGTERM)
        actions = self._send_step(first, why, now)
        if self._stop_signal is None and self._failures and not self._only_scheduler():
            cause = self._cause(self._first_failure())
            text = f"ended by the launcher ({first.name}), since {cause}"
            actions.insert(1, Explain(self._targets(), text))
        return actions

    def _send_step(self, step: signal.Signals | None, why: str, now: float) -> list[Action]:
        members = self._targets()
        if step is None:
            self._due = None
            return [Report(f"{why}: giving up on {self._places(members)}"), Abandon(members)]
        self._step = step
        self._due = now + self._step_s(step)
        return [Report(f"{why}: sending {step.name} to {in_words(members)}"), SendSignal(members, step)]

    def _step_s(self, step: signal.Signals) -> float:
        return _KILL_S if step is signal.SIGKILL else self._grace_s

    def _places(self, members: tuple[Member, ...]) -> str:
        remote = members if self._is_remote else ()
        hosts = sorted({self._hosts[member] for member in remote if member in self._hosts})
        left = f"; processes may be left on {', '.join(hosts)}" if hosts else ""
        return in_words(members) + left


# The processes of a job, and their names in messages.

Member = NewType("Member", int)
"""A node's rank, or `SCHEDULER`."""

SCHEDULER: Final = Member(-1)


def in_words(members: Iterable[Member]) -> str:
    """Return the processes as text, such as "ranks 0-3, 5 and the scheduler"."""
    left = set(members)
    ranks = sorted(left - {SCHEDULER})
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = []
    for run in runs:
        if len(run) < 3:
            texts += [str(rank) for rank in run]
        else:
            texts.append(f"{run[0]}-{run[-1]}")
    parts = [f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"] if ranks else []
    return " and ".join(parts + ["the scheduler"] * (SCHEDULER in left))


def outcome(code: int) -> str:
    """Return an exit code as text. A code above 128 means a signal, as in shells."""
    try:
        return f"killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"exit code {code}"


# How often, and how soon, something that has failed is started again.

_FIRST_S: Final = 0.5
"""Before the first restart: what the failed process held, such as a port, is free by then."""
_LONGEST_S: Final = 30.0
"""The time doubles from one failure to the next: what is broken for long should not be tried all the time."""
_STABLE_S: Final = 60.0
"""What has run for this long begins again with the shortest time."""


@dataclass(frozen=True, slots=True)
class PlannedRestart:
    """One restart."""

    count: int
    """Which restart of this process it is, from 1."""
    limit: int
    at: float
    """When."""
    delay_s: float

    def in_words(self) -> str:
        """Return when and which, for messages."""
        return f"in {self.delay_s:g} s (restart {self.count} of {self.limit})"


class RestartBudget:
    """Counts the restarts of each process. Times are in seconds."""

    def __init__(self, limit: int) -> None:
        """Allow `limit` restarts of each process."""
        self._limit: Final = limit
        self._counts: Final[dict[Hashable, int]] = {}
        self._started: Final[dict[Hashable, float]] = {}
        self._delays: Final[dict[Hashable, float]] = {}

    def started(self, who: Hashable, now: float) -> None:
        """Record that a process runs."""
        self._started[who] = now

    def is_left(self, who: Hashable) -> bool:
        """Return whether a process may be started again once more."""
        return self._counts.get(who, 0) < self._limit

    def after_failure(self, who: Hashable, now: float) -> PlannedRestart | None:
        """Return the next restart of a process that has failed; None: there is none left."""
        if not self.is_left(who):
            return None
        count = self._counts.get(who, 0) + 1
        delay = _FIRST_S
        if who in self._delays and now - self._started.get(who, now) < _STABLE_S:
            delay = min(2 * self._delays[who], _LONGEST_S)
        self._counts[who], self._delays[who] = count, delay
        return PlannedRestart(count, self._limit, now + delay, delay)
