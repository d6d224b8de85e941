"""The barriers of a job: who is told that one is reached, for whom all wait, and when that is in vain."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Final

from netstorm.protocol import messages as m
from netstorm.scheduler.log.outbox import Outbox
from netstorm.scheduler.log.records import BarrierCome
from netstorm.scheduler.log.replay import ReplayedJob
from netstorm.scheduler.membership.barrier_count import BarrierCount
from netstorm.scheduler.membership.members import Members
from netstorm.scheduler.membership.rendezvous import list_some
from netstorm.scheduler.options import SchedulerOptions

__all__ = ["REMIND_EVERY_S", "Barriers"]

_log = logging.getLogger(__name__)

REMIND_EVERY_S: Final = 3.0
"""How often those who wait are told for whom."""


class Barriers:
    """Of one job. What may end the job is returned."""

    def __init__(
        self, members: Members, finished: Collection[int], options: SchedulerOptions, outbox: Outbox
    ) -> None:
        """Begin before the first.

        Args:
            members: the nodes.
            finished: ranks that come to no more barriers; others keep them.
            options: say what that means.
            outbox: takes down what another process needs to take over.
        """
        self._members: Final = members
        self._finished: Final = finished
        self._options: Final = options
        self._outbox: Final = outbox
        self._count: Final = BarrierCount(len(members))

    def restore(self, past: ReplayedJob, now: float) -> None:
        """Go on where another process has stopped."""
        for rank in past.finished if self._options.joins else ():
            self._count.excuse(rank)
        self._count.restore(past.barriers, now)

    def come(self, rank: int, number: int, now: float) -> m.PeerGone | None:
        """A node has come to a barrier.

        Raises:
            ProtocolViolation: it is not the node's next one.
        """
        self._members.liveness.heard(rank, now, f"it came to barrier {number}")
        reached = self._count.come(rank, number, now)
        self._outbox.note(BarrierCome(rank=rank, number=number))
        self._tell_reached(reached)
        return self._in_vain()

    def come_again(self, rank: int, number: int, now: float) -> m.PeerGone | None:
        """A node that may not have been heard, or answered, says once more that it waits at a barrier.

        Raises:
            ProtocolViolation: it has not come to it, and it is not its next one.
        """
        if self._count.is_reached(number):
            self._members.tell([rank], m.BarrierReached(number=number))
        elif not self._count.has_come(rank, number):
            return self.come(rank, number, now)
        return None

    def finish(self, rank: int) -> m.PeerGone | None:
        """A node, which is among the finished ones, comes to no more barriers."""
        if self._options.joins:
            self._tell_reached(self._count.excuse(rank))
        return self._in_vain()

    def say(self, now: float) -> m.PeerGone | None:
        """Tell those who wait for whom."""
        missing = self._count.missing()
        waited, limit = now - self._count.since, self._options.wait_timeout_s
        if not missing or waited < REMIND_EVERY_S:
            return None
        text = (
            f"barrier {self._count.oldest}: waiting for {len(missing)} of {len(self._members)} nodes: "
            + list_some(self._members.describe(rank) for rank in missing)
        )
        if self._options.joins:
            text += (
                "; with NETSTORM_UNEVEN=join a rank contributes zeros when its script has ended, not while "
                "it waits at a barrier: those may wait for its pushes"
            )
        if waited >= limit:
            reason = f"waited {limit:g} s (NETSTORM_WAIT_TIMEOUT) at {text}"
            return m.PeerGone(rank=-1, kind="timeout", reason=reason)
        _log.info("%s", text)
        self._members.tell(self._count.waiting(), m.Waiting(text=text))
        return None

    def _tell_reached(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            come = [rank for rank in range(len(self._members)) if self._count.has_come(rank, number)]
            self._members.tell(come, m.BarrierReached(number=number))

    def _in_vain(self) -> m.PeerGone | None:
        """Do not let anybody wait for a rank that has finished."""
        never = self._count.never_coming(self._finished)
        if not never:
            return None
        reason = (
            f"{_ranks(self._count.waiting())} waits at barrier {self._count.oldest}, but "
            f"{_ranks(never)} has finished without coming to it: every rank must come to every barrier"
        )
        return m.PeerGone(rank=-1, kind="disagreement", reason=reason)


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "each of ranks ") + list_some(map(str, ranks))
