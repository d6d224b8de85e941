"""Making the status of a job from a snapshot. Any thread but the scheduler's own does it. Pure."""

from __future__ import annotations

import math

from netstorm.scheduler.awareness.network_estimate import LinkEstimate
from netstorm.scheduler.observe.announcements import MOST_CHARACTERS
from netstorm.scheduler.observe.snapshot import NodeSnapshot, Snapshot, ViewSnapshot
from netstorm.scheduler.observe.status import (
    DetourStatus,
    FailedLinkStatus,
    FormerPolicy,
    JobLine,
    JobStatus,
    KeysStatus,
    LinkStatus,
    NodeView,
    PolicyStatus,
    TreeStatus,
    ViewChangeStatus,
    ViewStatus,
)
from netstorm.topology.policy import Policy

__all__ = ["build_status", "job_line"]


def build_status(snapshot: Snapshot, *, time: float, scheduler: str = "", http: str = "") -> JobStatus:
    """Return the status of a job.

    Args:
        snapshot: of the job.
        time: of the snapshot, in s since the Unix epoch.
        scheduler: HOST:PORT of the scheduler.
        http: HOST:PORT at which the status is served.
    """
    now = snapshot.now
    return JobStatus(
        time=time,
        job=snapshot.job,
        release=snapshot.release,
        scheduler=scheduler,
        http=http,
        phase=snapshot.phase.value,
        text=snapshot.text,
        age_s=now - snapshot.started_at,
        num_workers=snapshot.num_workers,
        nodes=tuple(_node(node, now) for node in snapshot.nodes),
        policy=_policy(snapshot.policy, now - snapshot.policy_since, snapshot.considered),
        former=tuple(
            FormerPolicy(
                version=policy.version,
                reason=policy.reason,
                ended_s=now - policy.end,
                lasted_s=policy.end - policy.begin,
            )
            for policy in reversed(snapshot.former)
        ),
        keys=KeysStatus(count=snapshot.keys, bytes=snapshot.key_bytes),
        links=tuple(map(_link, snapshot.links())),
        counters=dict(snapshot.counters),
        failed_links=tuple(
            FailedLinkStatus(
                source=link.source, target=link.target, reason=link.reason, since_s=now - link.since
            )
            for link in snapshot.failed_links
        ),
        link_share=snapshot.link_share,
        routed_pairs=tuple(sorted(snapshot.routed)),
        crowded=snapshot.contended,
        view=None if snapshot.view is None else _view(snapshot.view, now),
    )


def job_line(status: JobStatus) -> JobLine:
    """Return the summary of a job's status."""
    return JobLine(job=status.job, phase=status.phase, num_workers=status.num_workers, text=status.text)


def _link(link: LinkEstimate) -> LinkStatus:
    measured = math.isfinite(link.age)
    return LinkStatus(
        source=link.source,
        target=link.target,
        rate=_known(link.rate),
        measured=measured,
        error=link.error if measured and math.isfinite(link.error) else None,
        latency_s=link.latency if math.isfinite(link.latency) and link.latency >= 0 else None,
        age_s=link.age if measured else None,
        censored=link.censored,
    )


def _policy(policy: Policy, since_s: float, considered: str) -> PolicyStatus:
    total = sum(policy.weights)
    trees = tuple(
        TreeStatus(
            root=tree.root,
            share=weight / total,
            reduce_parent=tree.reduce_parent,
            broadcast_parent=tree.broadcast_parent,
        )
        for tree, weight in zip(policy.trees, policy.weights, strict=True)
    )
    return PolicyStatus(
        version=policy.version,
        reason=policy.reason,
        since_s=since_s,
        considered=considered,
        trees=trees,
        detours=tuple(DetourStatus(path=detour.path, explore=detour.explore) for detour in policy.detours),
    )


def _node(node: NodeSnapshot, now: float) -> NodeView:
    member = node.member
    last = node.reports[-1] if node.reports else None
    status = None if last is None else last.status
    waiting = sending = None
    if last is not None and last.at > node.reports[0].at:
        first, span = node.reports[0], last.at - node.reports[0].at
        waiting = min(1.0, max(0.0, last.status.waited_s - first.status.waited_s) / span)
        sending = 8.0 * max(0, last.status.bytes_sent - first.status.bytes_sent) / span
    return NodeView(
        rank=member.rank if member.rank >= 0 else None,
        host=member.host,
        port=member.port,
        site=member.site,
        state=_state(node),
        heard_s=max(0.0, now - node.heard_at),
        busy_s=node.busy_s,
        said=node.last_event,
        waits_for=node.waiting_for,
        rounds=None if status is None else status.rounds,
        last_round=None if status is None or status.last_round < 0 else status.last_round,
        round_s=None if status is None or status.last_round < 0 else _known(status.round_s),
        waited_s=None if status is None else status.waited_s,
        waiting=waiting,
        bytes_sent=None if status is None else status.bytes_sent,
        sending=sending,
        compression=None if status is None else status.compression[:MOST_CHARACTERS],
        clock_offset_s=None if status is None or status.clock_error < 0 else status.clock_offset,
        clock_error_s=None if status is None or status.clock_error < 0 else status.clock_error,
        clock_drift=None if status is None or status.clock_error < 0 else status.clock_drift,
        clock_hops=None if status is None or status.clock_error < 0 else status.clock_hops or None,
        detoured=None if status is None else status.detoured,
        egress=_known(node.egress),
        ingress=_known(node.ingress),
    )


def _view(view: ViewSnapshot, now: float) -> ViewStatus:
    return ViewStatus(
        number=view.number,
        fewest=view.fewest,
        most=view.most,
        silent=view.silent,
        waiting=view.waiting,
        changes=tuple(
            ViewChangeStatus(
                view=change.view, members=change.members, text=change.text, ago_s=now - change.at
            )
            for change in reversed(view.changes)
        ),
    )


def _state(node: NodeSnapshot) -> str:
    if node.left:
        return "left"
    if node.finished:
        return "finished"
    if node.silent:
        return "silent"
    if node.busy_s:
        return "busy"
    return "running" if node.joined else "joining"


def _known(number: float) -> float | None:
    return number if math.isfinite(number) and number > 0 else None
