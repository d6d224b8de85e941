"""The barriers of a job: who is told that one is reached, or for whom it waits, and who waits in vain."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Final

from netstorm.protocol import messages as m
from netstorm.scheduler.membership.barrier_count import BarrierCount
from netstorm.scheduler.membership.member_texts import list_some
from netstorm.scheduler.membership.members import Members
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.outbox import Outbox
from netstorm.scheduler.replay_log.records import BarrierArrival
from netstorm.scheduler.replay_log.replay import ReplayedJob

__all__ = ["REMIND_EVERY_S", "Barriers"]

_log = logging.getLogger(__name__)

REMIND_EVERY_S: Final = 3.0
"""How often waiting nodes are told for whom they wait."""


class Barriers:
    """The barriers of one job. A method that finds that the job cannot go on returns the reason."""

    def __init__(
        self, members: Members, finished: Collection[int], options: SchedulerOptions, outbox: Outbox
    ) -> None:
        """Begin before the first barrier.

        Args:
            members: the nodes.
            finished: ranks that come to no more barriers; the caller adds to it.
            options: say whether others wait for these ranks.
            outbox: takes messages and log records.
        """
        self._members: Final = members
        self._finished: Final = finished
        self._options: Final = options
        self._outbox: Final = outbox
        self._count: Final = BarrierCount(len(members))
        for rank in set(range(len(members))) - set(members.present):
            self._count.exclude(rank)

    def restore(self, replayed: ReplayedJob, now: float) -> None:
        """Go on where another process stopped."""
        for rank in replayed.finished if self._options.joins else ():
            self._count.exclude(rank)
        absent = [member.rank for member in replayed.members if not member.port]
        for rank in (*absent, *replayed.policies[replayed.version].silent):
            self._count.exclude(rank)
        self._count.restore(replayed.barriers, now)

    def arrive(self, rank: int, number: int, now: float) -> m.PeerGone | None:
        """Handle a node's arrival at a barrier.

        Raises:
            ProtocolViolation: it is not the node's next barrier.
        """
        self._members.liveness.heard(rank, now, f"it came to barrier {number}")
        reached = self._count.arrive(rank, number, now)
        self._outbox.record(BarrierArrival(rank=rank, number=number))
        self._send_reached(reached)
        if number not in reached and self._count.is_reached(number):  # the others were there before it
            self._members.send([rank], m.BarrierReached(number=number))
        return self._in_vain()

    def arrive_again(self, rank: int, number: int, now: float) -> m.PeerGone | None:
        """Handle a node that says again that it waits at a barrier: its message or the answer may be lost.

        Raises:
            ProtocolViolation: it has not arrived there before, and it is not its next barrier.
        """
        if self._count.is_reached(number):
            self._members.send([rank], m.BarrierReached(number=number))
        elif not self._count.has_arrived(rank, number):
            return self.arrive(rank, number, now)
        return None

    @property
    def reached(self) -> int:
        """How many barriers have been reached."""
        return self._count.oldest

    def without(self, rank: int) -> m.PeerGone | None:
        """Wait for a rank that has left at no barrier, nor for another process that has its place."""
        self._send_reached(self._count.remove(rank))
        return self._in_vain()

    def with_rank(self, rank: int) -> None:
        """Wait for a rank that has joined, from the next barrier on."""
        self._count.include(rank)

    def finish(self, rank: int) -> m.PeerGone | None:
        """Handle a node that has just finished, and comes to no more barriers."""
        if self._options.joins:
            self._send_reached(self._count.exclude(rank))
        return self._in_vain()

    def remind(self, now: float) -> m.PeerGone | None:
        """Tell waiting nodes for whom they wait."""
        missing = self._count.missing()
        waited, limit = now - self._count.since, self._options.wait_timeout_s
        if not missing or waited < REMIND_EVERY_S:
            return None
        nodes = len(self._members.present)
        text = f"barrier {self._count.oldest}: waiting for {len(missing)} of {nodes} nodes: " + list_some(
            self._members.describe(rank) for rank in missing
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
        self._members.send(self._count.waiting(), m.Waiting(text=text))
        return None

    def _send_reached(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            arrived = [rank for rank in self._members.present if self._count.has_arrived(rank, number)]
            self._members.send(arrived, m.BarrierReached(number=number))

    def _in_vain(self) -> m.PeerGone | None:
        """Return why nodes wait in vain, if they wait for a rank that has finished."""
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
