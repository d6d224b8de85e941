"""Collective calls that wait, for the scheduler to compare: ranks whose calls differ wait for each other.
Pure.

A call that other ranks do not make never completes. So a rank reports what has waited for a second, and the
scheduler, which hears of both sides, can name them. A call that reaches its time-out ends the job, and the
scheduler names the ranks that have not made it. What completes sooner costs nothing.
"""

from __future__ import annotations

import math
from typing import Final

from netstorm.kvstore.operations.allreduce import Call, Operation
from netstorm.protocol.messages import CallsWaiting, CallTimedOut, Message, WaitingCall

__all__ = ["WaitingCalls"]

_PATIENCE_S: Final = 1.0
"""How long a call waits before it is reported. Rounds over slow links take longer: a report is a few
bytes."""


class WaitingCalls:
    """The collective calls of one node that have not completed."""

    def __init__(self) -> None:
        self._new: Final[dict[int, Operation]] = {}
        """By identity, in order of submission: those that have not been reported."""
        self._reported: Final[dict[int, Operation]] = {}
        self._deadline = math.inf
        """The first time-out among them, or of one that has completed since."""
        self._reports: Final[list[Message]] = []

    def add(self, operation: Operation) -> None:
        """Record that an operation has been submitted."""
        if operation.call is not None:
            self._new[id(operation)] = operation
            self._deadline = min(self._deadline, _deadline(operation))

    def remove(self, operation: Operation) -> None:
        """Record that an operation has completed."""
        if operation.call is not None:
            self._new.pop(id(operation), None)
            self._reported.pop(id(operation), None)

    def tick(self, now: float) -> None:
        """Prepare reports of calls that have waited long enough, or too long."""
        due = []
        for identity, operation in list(self._new.items()):
            if now < operation.begun_at + _PATIENCE_S:
                break
            self._reported[identity] = self._new.pop(identity)
            due.append(_report(operation.call))
        if due:
            self._reports.append(CallsWaiting(calls=tuple(due)))
        if now >= self._deadline:
            self._time_out(now)

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        first = next(iter(self._new.values()), None)
        return self._deadline if first is None else min(self._deadline, first.begun_at + _PATIENCE_S)

    def has_reports(self) -> bool:
        """Return whether there is something to report."""
        return bool(self._reports)

    def take_reports(self) -> list[Message]:
        """Return the reports to the scheduler, once."""
        taken = list(self._reports)
        self._reports.clear()
        return taken

    def report_again(self) -> None:
        """Report everything once more: the scheduler that has heard it is gone."""
        again = {**self._reported, **self._new}
        self._reported.clear()
        self._new.clear()
        self._new.update(again)

    def clear(self) -> None:
        """Forget all calls."""
        self._new.clear()
        self._reported.clear()
        self._reports.clear()
        self._deadline = math.inf

    def _time_out(self, now: float) -> None:
        operations = [*self._reported.values(), *self._new.values()]
        for operation in operations:
            call = operation.call
            if call is not None and now >= _deadline(operation):
                self._reports.append(
                    CallTimedOut(call=_report(call), members=call.members, seconds=call.timeout_s)
                )
                self._deadline = math.inf  # it ends the job
                return
        self._deadline = min(map(_deadline, operations), default=math.inf)


def _deadline(operation: Operation) -> float:
    assert operation.call is not None
    return operation.begun_at + operation.call.timeout_s


def _report(call: Call | None) -> WaitingCall:
    assert call is not None
    return WaitingCall(group=call.group, number=call.number, text=call.text)
