"""The state server of a job among its messages: who reports, and who is told how many steps to take."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from netstorm.protocol import messages as m
from netstorm.scheduler.membership.members import Members
from netstorm.scheduler.rounds.state_server import StateServer

__all__ = ["LocalSteps"]


class LocalSteps:
    """The local steps of one job's nodes; see `StateServer`."""

    def __init__(
        self, members: Members, finished: Collection[int], silent: Callable[[], Collection[int]]
    ) -> None:
        """Begin without reports.

        Args:
            members: the nodes.
            finished: ranks that report no more; the caller adds to it.
            silent: returns the ranks that have joined later, and whose values do not count yet.
        """
        self._members: Final = members
        self._finished: Final = finished
        self._silent: Final = silent
        self._server: Final = StateServer()

    def report(self, rank: int, message: m.StepTimes, now: float) -> None:
        """Handle a node's report.

        Raises:
            ProtocolViolation: no correct node reports that.
        """
        self._members.liveness.heard(rank, now, f"it took the local steps of round {message.round}")
        for grant in self._server.report(rank, message, self._expected(), now):
            self._send(message.training, *grant)

    def members_changed(self) -> None:
        """Wait no more for ranks that have left or finished, and wait for those that have caught up."""
        for training, grant in self._server.members_changed(self._expected(), self._members.present):
            self._send(training, *grant)

    def _expected(self) -> list[int]:
        left_out = {*self._finished, *self._silent()}
        return [rank for rank in self._members.present if rank not in left_out]

    def _send(self, training: int, rank: int, round: int, steps: int) -> None:
        self._members.send([rank], m.StepsGranted(training=training, round=round, steps=steps))
