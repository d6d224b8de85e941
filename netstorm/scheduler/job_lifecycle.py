"""The phases of a job: how it ends, and how long the scheduler then waits for nodes to leave."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

from netstorm.errors import NetStormError
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.pslite.machine import Disconnect
from netstorm.scheduler.job import Job
from netstorm.scheduler.job_phase import Outcome, Phase
from netstorm.scheduler.membership.startup import Startup
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.outbox import Outbox
from netstorm.scheduler.replay_log.records import Ended

__all__ = ["JobLifecycle", "abort_reason"]

_log = logging.getLogger(__name__)

_LEAVE_TIMEOUT_S: Final = 5.0
"""How long the scheduler of a failed job stays, so that every node hears why."""


class JobLifecycle:
    """One job, from its first node to its last.

    Attributes:
        phase: where the job is.
        startup: its nodes until all have joined.
        job: its nodes from then on; None before.
        failure: why it failed; None if it did not.
        outcome: how it went; None until it is over.
        left: ranks that have left the job.
        ranks_to_come: a job that has failed before it began waits for ranks that have not come yet, and must
            hear why.
    """

    def __init__(self, options: SchedulerOptions, outbox: Outbox, startup: Startup) -> None:
        """Wait for nodes."""
        self.phase = Phase.GATHERING
        self.startup: Final = startup
        self.job: Job | None = None
        self.failure: m.PeerGone | None = None
        self.outcome: Outcome | None = None
        self.left: Final[set[int]] = set()
        self.ranks_to_come = False
        self._options: Final = options
        self._outbox: Final = outbox
        self._end_at = math.inf
        self._stopped = False
        self._nobody_joined = False

    @property
    def end_at(self) -> float:
        """When the scheduler waits no longer for nodes to leave; inf if the job has not ended."""
        return math.inf if self.ranks_to_come and self.job is None and not self._stopped else self._end_at

    @property
    def abandoned(self) -> bool:
        """Whether every process left before the job began."""
        return self.phase is Phase.GATHERING and not self.startup.peers()

    def begin(self, job: Job) -> None:
        """All nodes have joined, or a job that another process served goes on."""
        self.job = job
        self.phase = Phase.FINISHED if job.all_finished else Phase.RUNNING

    def finish(self, peers: Sequence[Peer]) -> None:
        """All nodes have finished: tell them, so that they leave."""
        self.phase = Phase.FINISHED
        _log.info("all nodes have finished")
        self._outbox.send(peers, m.AllFinished())

    def fail(self, failure: m.PeerGone, now: float) -> None:
        """End the job, and tell every node that has not left why. Only the first failure counts."""
        if self.phase not in (Phase.GATHERING, Phase.RUNNING):
            return
        waiting = self.startup.peers() if self.job is None else self.job.members.peers_but(self.left)
        self.phase = Phase.FAILED
        self.failure = failure
        self._outbox.record(Ended(text=failure.reason))
        self._end_at = now + _LEAVE_TIMEOUT_S if waiting else now
        # Without nodes, the last line that the process prints is enough.
        _log.log(logging.ERROR if waiting else logging.DEBUG, "the job ends: %s", failure.reason)
        self._outbox.send(waiting, failure)

    def stop(self, reason: str, now: float) -> None:
        """End the job because this process must end. A finished job just waits for its nodes no longer."""
        self._stopped = True
        if self.phase is Phase.FINISHED:
            self._end_at = now
        else:
            self.fail(m.PeerGone(rank=-1, kind="stopped", reason=reason), now)

    def nobody_joined(self, now: float) -> None:
        """End the job: all processes have ended that might have joined it."""
        self.phase, self._end_at, self._nobody_joined = Phase.FAILED, now, True

    def departure_of(self, incarnation: int) -> str | None:
        """Return why a process is in the job no more; None: it may be in it."""
        views = None if self.job is None else self.job.views
        return None if views is None else views.departed.get(incarnation)

    def departed(self, peer: Peer, incarnation: int) -> None:
        """End the session with a process that is in the job no more, which goes on without it. If it was only
        stopped, it hears of that when it goes on.
        """
        reason = self.departure_of(incarnation)
        if reason is not None:
            self._outbox.send([peer], m.PeerGone(rank=-1, kind="removed", reason=reason))
        self._outbox.add(Disconnect(peer=peer))

    def process_left(self, peer: Peer, reason: str, now: float) -> None:
        """A process without a rank has left, or its session is lost."""
        self.startup.remove(peer, reason, quietly=self.phase is not Phase.GATHERING)
        if self.phase is Phase.FAILED and not self.startup.peers():
            self._end_at = now

    def rank_left(self, rank: int, now: float) -> None:
        """A member has left, or its session is lost."""
        if self.job is None or rank in self.left:
            return
        self.left.add(rank)
        self.job.members.liveness.stop_watching(rank)
        peer = self.job.members.peer_of(rank)
        if peer is not None:
            self._outbox.add(Disconnect(peer=peer))
        if self.left.issuperset(self.job.members.present):
            self._end_at = now

    def end_if_due(self, now: float) -> Outcome | None:
        """Return the outcome if the job is over now. Silent nodes of an ended job count as left."""
        if self.job is not None and self.phase in (Phase.FINISHED, Phase.FAILED):
            for rank in self.job.members.liveness.silent(now):
                self.rank_left(rank, now)
        if now < self.end_at or self.phase is Phase.OVER:
            return None
        self.phase = Phase.OVER
        job, name = self.job, self._options.job
        if self._nobody_joined:
            self.outcome = Outcome.nobody_joined(name)
        else:
            self.outcome = Outcome.of(
                name,
                self.failure,
                nodes=self._options.num_workers if job is None else len(job.members.present),
                keys=0 if job is None else len(job.rounds.keys),
            )
        self._outbox.record(Ended(text=self.outcome.text))
        return self.outcome


def abort_reason(error: Exception) -> str:
    """Return what nodes are told when the scheduler's process cannot go on because of `error`."""
    text = str(error) if isinstance(error, NetStormError) else f"its I/O thread has died: {error!r}"
    return f"the scheduler has stopped: {text}"
