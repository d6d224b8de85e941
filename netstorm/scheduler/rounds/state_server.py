"""The state server of ESync: collects how long nodes' local steps take, and answers with their number. Pure.

A node reports when it has taken its steps and begins to exchange. When all have, the answers go out, while
the exchange is under way; so a node that has the sum knows how many steps follow. How long a node has waited
for the others in an exchange is known here, by when their reports came. The rest of the exchange is its own
time to communicate.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.protocol.messages import StepTimes
from netstorm.scheduler.rounds.step_balance import NodeTimes, balanced_steps

__all__ = ["Grant", "StateServer"]

_MOST_TRAININGS: Final = 4096
_MOST_STEPS: Final = 1_000_000
_LONGEST_S: Final = 1e6
"""Bounds on what a node may report: eleven days a step."""

Grant = tuple[int, int, int]
"""A rank, the round that it has reported, and the number of steps of its next one."""


class _Training:
    """One training whose steps are balanced."""

    def __init__(self) -> None:
        self.reports: Final[dict[int, StepTimes]] = {}
        """The last one of each rank."""
        self.times: Final[dict[int, NodeTimes]] = {}
        self.arrived: Final[dict[int, float]] = {}
        """When each rank's last report came."""
        self.waited: Final[dict[int, float]] = {}
        """How long each rank has waited for others in the last exchange that all have begun."""
        self.answered = -1
        """The last round for which all have an answer."""


class StateServer:
    """The state server of one job."""

    def __init__(self) -> None:
        """Begin without reports."""
        self._trainings: Final[dict[int, _Training]] = {}

    def report(self, rank: int, report: StepTimes, members: Collection[int], now: float) -> list[Grant]:
        """Record a rank's report; return what is to be answered now, and to whom.

        A report that comes again, because its answer may be lost, is answered again. So is one of an earlier
        round than another rank's: that one's answer cannot have been computed without this rank, so a process
        that served the job before has computed it. A rank that is not among `members` is told to take its
        fewest steps: it has joined later, and nobody waits for it until it has caught up.

        Args:
            rank: the sender.
            report: what it says.
            members: the ranks whose values count, and that have not finished.
            now: the time.

        Raises:
            ProtocolViolation: no correct node reports that.
        """
        _check(rank, report)
        training = self._trainings.setdefault(report.training, _Training())
        last = training.reports.get(rank)
        if last is None or report.round > last.round:
            _record(training, rank, report, now)
        if rank not in members:
            return [(rank, report.round, report.least)]
        if report.round <= training.answered or _is_behind(training, report):
            steps = balanced_steps(training.times)[rank]
            return [(rank, report.round, steps)]
        return _grants(training, members)

    def members_changed(self, members: Collection[int], present: Collection[int]) -> list[tuple[int, Grant]]:
        """Return what is to be answered now that ranks have left, finished, or caught up, with the training
        of each.

        Args:
            members: as in `report`.
            present: all ranks that are in the job; what is known of others is forgotten.
        """
        found = []
        for number, training in self._trainings.items():
            for rank in [rank for rank in training.reports if rank not in present]:
                for known in (training.reports, training.times, training.arrived, training.waited):
                    known.pop(rank, None)
            found += [(number, grant) for grant in _grants(training, members)]
        return found


def _check(rank: int, report: StepTimes) -> None:
    times_ok = 0 < report.step_s <= _LONGEST_S and 0 <= report.exchange_s <= _LONGEST_S
    steps_ok = 1 <= report.least <= report.most <= _MOST_STEPS
    if not (0 <= report.training < _MOST_TRAININGS and report.round >= 0 and times_ok and steps_ok):
        raise ProtocolViolation(
            f"rank {rank} reports {report}: expected one of {_MOST_TRAININGS} trainings, a step of more than "
            f"0 and at most {_LONGEST_S:g} s, an exchange of at most as long, and 1 to {_MOST_STEPS} steps"
        )


def _record(training: _Training, rank: int, report: StepTimes, now: float) -> None:
    before = training.times.get(rank)
    step_s = report.step_s if before is None else (before.step_s + report.step_s) / 2
    training.reports[rank] = report
    training.arrived[rank] = now
    training.times[rank] = NodeTimes(
        step_s=step_s,
        exchange_s=max(0.0, report.exchange_s - training.waited.get(rank, math.inf)),
        least=report.least,
        most=report.most,
    )


def _is_behind(training: _Training, report: StepTimes) -> bool:
    return any(other.round > report.round for other in training.reports.values())


def _grants(training: _Training, members: Collection[int]) -> list[Grant]:
    """Return the answers to all members that wait for one, once all have reported that round or a later one.

    A rank that has caught up was answered before, so it may be a round ahead.
    """
    reports = training.reports
    if not members or any(rank not in reports for rank in members):
        return []
    number = min(reports[rank].round for rank in members)
    if number <= training.answered:
        return []
    training.answered = number
    latest = max(training.arrived[rank] for rank in members)
    for rank in members:
        training.waited[rank] = latest - training.arrived[rank]
    steps = balanced_steps({rank: training.times[rank] for rank in members})
    return [(rank, number, steps[rank]) for rank in sorted(members) if reports[rank].round == number]
