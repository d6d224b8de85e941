"""What observers read of one job: members, status text, snapshots. Nothing here changes the job."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from netstorm.observe.log import Counters
from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import Member
from netstorm.scheduler.awareness.failed_link import FailedLinkRecord
from netstorm.scheduler.awareness.network_estimate import LinkEstimate
from netstorm.scheduler.job import Job
from netstorm.scheduler.job_lifecycle import JobLifecycle
from netstorm.scheduler.job_policies import JobPolicies
from netstorm.scheduler.observe.snapshot import NodeSnapshot, Snapshot, ViewSnapshot
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies.control_loop import Awareness

__all__ = ["JobView"]

_MOST_ESTIMATED: Final = 24
"""Nodes of a job whose link estimates are computed for a snapshot: that takes 14 ms of the scheduler's thread
with 24 nodes, 0.5 s with 128. Of larger jobs people see what nodes reported."""


class JobView:
    """Reads one job, in every phase."""

    def __init__(
        self,
        options: SchedulerOptions,
        counters: Counters,
        lifecycle: JobLifecycle,
        policies: JobPolicies,
        started_at: float,
    ) -> None:
        self._options: Final = options
        self._counters: Final = counters
        self._lifecycle: Final = lifecycle
        self._policies: Final = policies
        self._started_at: Final = started_at

    @property
    def members(self) -> tuple[Member, ...]:
        """The nodes, by rank; empty until all have joined."""
        job = self._lifecycle.job
        return () if job is None else job.members.all

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The numbers of the nodes' processes, by rank; empty until all have joined."""
        job = self._lifecycle.job
        return () if job is None else job.members.peers

    @property
    def awareness(self) -> Awareness | None:
        """What is measured, and what follows from it; None: awareness is off, or nodes are missing."""
        job = self._lifecycle.job
        return None if job is None else job.awareness

    @property
    def failed_links(self) -> tuple[FailedLinkRecord, ...]:
        """The links that have failed and are not restored."""
        job = self._lifecycle.job
        return () if job is None else tuple(job.link_failures.failures.values())

    def status_text(self, now: float = -math.inf) -> str:
        """Return how the job is doing, in one line; without the time, not who is busy."""
        lifecycle = self._lifecycle
        return lifecycle.startup.status_text() if lifecycle.job is None else lifecycle.job.status_text(now)

    def snapshot(self, now: float) -> Snapshot:
        """Return everything that people and programs may want to know of the job. Cheap."""
        options, lifecycle, policies = self._options, self._lifecycle, self._policies
        job, failure, awareness = lifecycle.job, lifecycle.failure, self.awareness
        return Snapshot(
            now=now,
            started_at=self._started_at,
            job=options.job,
            release=options.release,
            num_workers=options.num_workers,
            phase=lifecycle.phase,
            text=self.status_text(now) if failure is None else failure.reason,
            nodes=lifecycle.startup.snapshots() if job is None else self._node_snapshots(job, now),
            policy=policies.in_force,
            policy_since=policies.history.since,
            former=policies.history.former(),
            keys=0 if job is None else len(job.rounds.keys),
            key_bytes=0 if job is None else job.rounds.keys.total_bytes,
            considered="" if awareness is None else awareness.adaptation.reason,
            links=tuple if job is None else _link_estimates(job, now),
            counters=self._counters.snapshot(),
            failed_links=self.failed_links,
            link_share=policies.link_share,
            routed=frozenset() if awareness is None else awareness.collector.routed,
            contended=awareness is not None and awareness.collector.contended,
            view=None if job is None else _view(job, options),
        )

    def _node_snapshots(self, job: Job, now: float) -> tuple[NodeSnapshot, ...]:
        caps = {} if job.awareness is None else job.awareness.collector.access_caps(now)
        found = []
        for rank, member in enumerate(job.members.all):
            if not member.host:
                continue  # a place that no node has had
            heard = job.members.liveness.last_sign(rank)
            egress, ingress = caps.get(rank, (0.0, 0.0))
            found.append(
                NodeSnapshot(
                    member=member,
                    joined=True,
                    heard_at=heard.at,
                    busy_s=job.members.liveness.busy_for(rank, now),
                    last_event=heard.event,
                    waiting_for=heard.waiting_for,
                    finished=rank in job.finished,
                    left=rank in self._lifecycle.left or not member.port,
                    silent=job.views is not None and rank in job.views.silent,
                    reports=job.announcements.reports(rank),
                    egress=egress,
                    ingress=ingress,
                )
            )
        return tuple(found)


def _view(job: Job, options: SchedulerOptions) -> ViewSnapshot | None:
    """Return the view of a job that nodes may leave and join."""
    if job.views is None or options.elastic is None:
        return None
    fewest, most = options.elastic
    return ViewSnapshot(
        number=job.views.number,
        fewest=fewest,
        most=most,
        silent=job.views.silent,
        waiting=job.views.waiting_text(),
        changes=tuple(job.views.events),
    )


def _link_estimates(job: Job, now: float) -> Callable[[], Sequence[LinkEstimate]]:
    """Return a function that makes the estimates of all links as of now. Any thread may call it."""
    if job.awareness is None or len(job.members) > _MOST_ESTIMATED:
        return job.announcements.links(now)
    estimates = job.awareness.collector.link_estimates(now)
    return lambda: estimates
