"""Nodes that leave a running job, and those that come later: who is who, and whether the job goes on."""

from __future__ import annotations

from typing import Final

from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer
from netstorm.scheduler.job import Job
from netstorm.scheduler.job_lifecycle import JobLifecycle
from netstorm.scheduler.membership.process_registry import ProcessRegistry
from netstorm.scheduler.membership.refusal import Refusal
from netstorm.scheduler.membership.rendezvous import Applicant
from netstorm.scheduler.membership.startup import Startup
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.views.latecomers import Latecomers

__all__ = ["MemberChanges"]


class MemberChanges:
    """The changes of one job's members.

    Attributes:
        ranks: of the processes that are in the job.
        latecomers: nodes that have come after the job began, and wait for a place.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        lifecycle: JobLifecycle,
        startup: Startup,
        registry: ProcessRegistry,
    ) -> None:
        """Begin without members.

        Args:
            options: of the job.
            lifecycle: ends the job if it cannot go on.
            startup: refuses nodes.
            registry: the numbers of processes.
        """
        self.ranks: Final[dict[Peer, int]] = {}
        self.latecomers: Final = Latecomers(options)
        self._lifecycle: Final = lifecycle
        self._startup: Final = startup
        self._registry: Final = registry

    def begin(self, job: Job) -> None:
        """Record who is who when a job begins, or goes on in this process."""
        for rank, peer in zip(job.members.present, job.members.peers, strict=True):
            self._record(rank, peer)

    def applicant(self, peer: Peer, join: m.Join, now: float) -> Applicant:
        """Return a process that asks to join."""
        return Applicant(
            peer=peer,
            incarnation=self._registry.incarnation_of(peer),
            join=join,
            heard_at=now,
            user=self._registry.user_of(peer),
        )

    def join(self, job: Job, peer: Peer, message: m.Join, now: float) -> None:
        """Handle that a process asks to join a job that has begun, and that nodes may join."""
        refusal = self.latecomers.add(self.applicant(peer, message, now), now)
        if refusal is not None:
            self._startup.refuse(peer, refusal.reason)
        self.place_latecomers(job, now)

    def place_latecomers(self, job: Job, now: float) -> None:
        """Let nodes in that have come after the job began, as far as there are places."""
        for found in self.latecomers.place(job.members, now):
            if isinstance(found, Refusal):
                self._startup.refuse(found.peer, found.reason)
                continue
            peer, rank = found.applicant.peer, found.rank
            if found.replaces:
                reason = f"another process has come as the node at {found.applicant}"
                if not self.go_on_without(job, m.PeerGone(rank=rank, kind="lost", reason=reason), now):
                    return
            self._record(rank, peer)
            job.admit_later(rank, peer, found.applicant.member(rank), now)

    def go_on_without(self, job: Job, gone: m.PeerGone, now: float) -> bool:
        """Go on without a node that is lost or has failed, or end the job. Returns whether it goes on."""
        end: m.PeerGone | None = gone
        if gone.rank >= 0 and gone.kind in ("lost", "failed") and job.views is not None:
            peer = job.members.peer_of(gone.rank)
            end = job.go_on_without(gone.rank, gone.reason, now)
            if end is None and peer is not None:
                del self.ranks[peer]
                self._lifecycle.departed(peer, self._registry.incarnation_of(peer))
        if end is not None:
            self._lifecycle.fail(end, now)
        return end is None

    def _record(self, rank: int, peer: Peer) -> None:
        self.ranks[peer] = rank
        self._registry.pin(peer)
