"""How a job is doing, as JSON says it: made of a snapshot, off the scheduler's own thread. Pure.

The fields are append-only: programs read them. Rates are in bit/s, times in s; what is not known is null.
"""

from __future__ import annotations

import math

import msgspec

from netstorm.scheduler.observe.snapshot import NodeSnapshot, Snapshot
from netstorm.topology.policy import Policy

__all__ = [
    "DetourStatus",
    "FailedLinkStatus",
    "FormerPolicy",
    "JobLine",
    "JobStatus",
    "KeysStatus",
    "LinkStatus",
    "NodeView",
    "PolicyStatus",
    "TreeStatus",
    "describe",
    "line_of",
]


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One general node."""

    rank: int | None
    """Null: it waits for the others, and has asked for none."""
    host: str
    port: int
    site: str
    state: str
    """joining, running, finished (it will push no more) or left."""
    heard_s: float
    """Since its last sign of life."""
    said: str
    """The last thing heard from it that means something to a person."""
    waits_for: str
    """What it says that it waits for; empty: for nothing, or not for long."""
    rounds: int | None
    """Rounds of all keys complete there."""
    last_round: int | None
    """Number of the newest round that is complete in all keys."""
    round_s: float | None
    """How long that took there, from the begin of the first key to the end of the last."""
    waited_s: float | None
    """Time in which operations were outstanding."""
    waiting: float | None
    """The same as a part of the last seconds, from 0 to 1."""
    bytes_sent: int | None
    """To other nodes, headers included."""
    sending: float | None
    """Bit/s sent in the last seconds."""
    clock_offset_s: float | None
    """Cluster clock less the host's."""
    clock_error_s: float | None
    """Most that this may be wrong."""
    clock_drift: float | None
    """How much faster the cluster clock goes."""
    clock_hops: int | None
    """Exchanges between its clock and the scheduler's: 1 if it asks the scheduler."""
    detoured: int | None
    """Chunks sent over auxiliary paths."""
    egress: float | None
    """Bit/s of all its links out together, while they limited one another."""
    ingress: float | None
    """The same of its links in."""


class TreeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One tree of the policy."""

    root: int
    share: float
    """Part of all data, from 0 to 1."""
    reduce_parent: tuple[int, ...]
    """By rank; -1 at the root."""
    broadcast_parent: tuple[int, ...]


class DetourStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One auxiliary path of the policy."""

    path: tuple[int, ...]
    """The ranks on it: from a rank to its neighbour in a tree."""
    explore: bool
    """It leads over a link that should be measured: a few chunks go there, faster or not."""


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The policy that new rounds run under."""

    version: int
    reason: str
    """Why it was formed."""
    since_s: float
    """For how long it has been in force."""
    considered: str
    """What was last thought of a new one; empty: nothing was."""
    trees: tuple[TreeStatus, ...]
    detours: tuple[DetourStatus, ...]


class FormerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that is not in force any more."""

    version: int
    reason: str
    ended_s: float
    """Since its end."""
    lasted_s: float


class KeysStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is summed."""

    count: int
    bytes: int
    """Of all keys together."""


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one directed link."""

    source: int
    target: int
    rate: float | None
    """Bit/s that is planned with; in jobs of more than 24 nodes, as it was last reported."""
    measured: bool
    """Whether it was ever measured; if not, the rate is what is assumed."""
    error: float | None
    """Standard error of the rate, as a fraction of it."""
    latency_s: float | None
    age_s: float | None
    """Since it was last measured."""
    censored: bool
    """Seen only while an access line was the limit: the rate is what the lines allow."""


class FailedLinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One directed link that has failed; the job goes on without it."""

    source: int
    target: int
    reason: str
    """What its source said."""
    since_s: float


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """One of several jobs of a scheduler, in short."""

    job: str
    phase: str
    num_workers: int
    text: str


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job at one moment."""

    format: int = 1
    """Changes when a field changes its meaning."""
    time: float
    """Of the snapshot, in s since the Unix epoch."""
    job: str
    release: str
    scheduler: str
    """HOST:PORT at which nodes reach the scheduler."""
    http: str
    """HOST:PORT at which this can be read."""
    phase: str
    """gathering, running, finished, failed or over."""
    text: str
    """How the job is doing, in one line; why it has failed, if it has."""
    age_s: float
    num_workers: int
    nodes: tuple[NodeView, ...]
    """By rank."""
    policy: PolicyStatus
    former: tuple[FormerPolicy, ...]
    """The newest first."""
    keys: KeysStatus
    links: tuple[LinkStatus, ...]
    counters: dict[str, float]
    """Of the scheduler's process; of the job, if it has several."""
    failed_links: tuple[FailedLinkStatus, ...] = ()
    link_share: float = 1.0
    """Of each link's rate that the job plans with: its scheduler's other jobs have the rest."""
    jobs: tuple[JobLine, ...] = ()
    """All that are here, in order of arrival, if the scheduler serves several."""
    routed_pairs: tuple[tuple[int, int], ...] = ()
    """(source, target) that are no links: their ways are found to lead past other nodes."""
    crowded: bool = False
    """Links are found to carry less in company: they share lines, whether their caps are known or not."""


def describe(snapshot: Snapshot, *, time: float, scheduler: str = "", http: str = "") -> JobStatus:
    """Return a snapshot in the form in which programs read it.

    Args:
        time: of the snapshot, in s since the Unix epoch.
        scheduler: HOST:PORT of the scheduler.
        http: HOST:PORT at which the status is served.
    """
    now = snapshot.now
    links = (
        LinkStatus(
            source=link.source,
            target=link.target,
            rate=_known(link.rate),
            measured=math.isfinite(link.age),
            error=link.error if math.isfinite(link.age) and math.isfinite(link.error) else None,
            latency_s=link.latency if math.isfinite(link.latency) and link.latency >= 0 else None,
            age_s=link.age if math.isfinite(link.age) else None,
            censored=link.censored,
        )
        for link in snapshot.links()
    )
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
            FormerPolicy(version=version, reason=reason, ended_s=now - end, lasted_s=end - begin)
            for version, reason, begin, end in reversed(snapshot.former)
        ),
        keys=KeysStatus(count=snapshot.keys, bytes=snapshot.key_bytes),
        links=tuple(links),
        counters=dict(snapshot.counters),
        failed_links=tuple(
            FailedLinkStatus(source=one.source, target=one.target, reason=one.reason, since_s=now - one.since)
            for one in snapshot.failed_links
        ),
        link_share=snapshot.link_share,
        routed_pairs=tuple(sorted(snapshot.routed)),
        crowded=snapshot.crowded,
    )


def line_of(status: JobStatus) -> JobLine:
    """Return a job's status in short."""
    return JobLine(job=status.job, phase=status.phase, num_workers=status.num_workers, text=status.text)


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
        detours=tuple(DetourStatus(path=one.path, explore=one.explore) for one in policy.detours),
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
        state="left"
        if node.left
        else "finished"
        if node.finished
        else "running"
        if node.joined
        else "joining",
        heard_s=max(0.0, now - node.heard_at),
        said=node.said,
        waits_for=node.busy,
        rounds=None if status is None else status.rounds,
        last_round=None if status is None or status.last_round < 0 else status.last_round,
        round_s=None if status is None or status.last_round < 0 else _known(status.round_s),
        waited_s=None if status is None else status.waited_s,
        waiting=waiting,
        bytes_sent=None if status is None else status.bytes_sent,
        sending=sending,
        clock_offset_s=None if status is None or status.clock_error < 0 else status.clock_offset,
        clock_error_s=None if status is None or status.clock_error < 0 else status.clock_error,
        clock_drift=None if status is None or status.clock_error < 0 else status.clock_drift,
        clock_hops=None if status is None or status.clock_error < 0 else status.clock_hops or None,
        detoured=None if status is None else status.detoured,
        egress=_known(node.egress),
        ingress=_known(node.ingress),
    )


def _known(number: float) -> float | None:
    return number if math.isfinite(number) and number > 0 else None
