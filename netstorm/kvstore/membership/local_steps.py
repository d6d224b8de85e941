"""This rank's reports to the state server, which answers with a number of local steps (ESync). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from netstorm.errors import NetStormError
from netstorm.kvstore.operations.allreduce import Done
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.protocol.messages import StepsGranted, StepTimes

__all__ = ["LocalSteps", "StepsRequest"]


@dataclass(slots=True, kw_only=True, eq=False)
class StepsRequest:
    """A report, and the answer to it."""

    report: StepTimes
    done: Done
    """Called when `steps` is the answer, or with the error that ended the job."""
    steps: int = 0


class LocalSteps:
    """The reports of one node that have not been answered."""

    def __init__(self, outbox: Outbox) -> None:
        """Begin without any; `outbox` takes messages and completions."""
        self._outbox: Final = outbox
        self._waiting: Final[dict[int, StepsRequest]] = {}
        """By training."""
        self._last: Final[dict[int, StepTimes]] = {}
        self._failure: NetStormError | None = None

    def report(self, request: StepsRequest) -> None:
        """Send a report, the next one of its training. Its `done` is called in any case."""
        if self._failure is not None:
            self._outbox.complete(request.done, self._failure)
            return
        self._waiting[request.report.training] = request
        self._last[request.report.training] = request.report
        self._outbox.send_to_scheduler(request.report)

    def granted(self, message: StepsGranted) -> None:
        """Complete the report that is answered. A second answer to it changes nothing."""
        waiting = self._waiting.get(message.training)
        if waiting is None or waiting.report.round != message.round:
            return
        del self._waiting[message.training]
        waiting.steps = max(waiting.report.least, min(waiting.report.most, message.steps))
        self._outbox.complete(waiting.done, None)

    def report_again(self) -> None:
        """Send the last reports again, answered or not: a scheduler that was started again knows none, and
        others may still wait for an answer that takes this rank's.
        """
        for report in self._last.values():
            self._outbox.send_to_scheduler(report)

    def fail_all(self, error: NetStormError) -> None:
        """Fail everything that waits for an answer, and all later reports."""
        self._failure = error
        for waiting in self._waiting.values():
            self._outbox.complete(waiting.done, error)
        self._waiting.clear()
