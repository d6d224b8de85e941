"""Making the status of a job from a snapshot, as JSON and as metrics for Prometheus. Pure.

Any thread but the scheduler's own does it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from netstorm.protocol.messages import KeySpec
from netstorm.scheduler.awareness import LinkEstimate
from netstorm.scheduler.snapshot import MOST_CHARACTERS, JobPhase, JobSnapshot, NodeSnapshot, ViewSnapshot
from netstorm.scheduler.status import (
    DetourStatus,
    FailedLinkStatus,
    FormerPolicy,
    JobLine,
    JobStatus,
    KeysStatus,
    KeyStatus,
    LinkStatus,
    NodeView,
    PolicyStatus,
    TreeStatus,
    ViewChangeStatus,
    ViewStatus,
)
from netstorm.scheduler.traffic_cost import cost_an_hour
from netstorm.topology.policy import Policy
from netstorm.topology.tree import MemberTree

__all__ = ["build_status", "job_line", "metrics", "metrics_of_several", "policy_status"]


# Making the status of a job from a snapshot. Any thread but the scheduler's own does it.


def build_status(snapshot: JobSnapshot, *, time: float, scheduler: str = "", http: str = "") -> JobStatus:
    """Return the status of a job.

    Args:
        snapshot: of the job.
        time: of the snapshot, in s since the Unix epoch.
        scheduler: HOST:PORT of the scheduler.
        http: HOST:PORT at which the status is served.
    """
    now = snapshot.now
    nodes = tuple(_node(node, now) for node in snapshot.nodes)
    policy = policy_status(snapshot.policy, now - snapshot.policy_since, snapshot.considered)
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
        nodes=nodes,
        policy=policy,
        former=tuple(
            FormerPolicy(
                version=policy.version,
                reason=policy.reason,
                ended_s=now - policy.end,
                lasted_s=policy.end - policy.begin,
            )
            for policy in reversed(snapshot.former)
        ),
        keys=KeysStatus(
            count=snapshot.keys,
            bytes=snapshot.key_bytes,
            first=tuple(_key(spec, size) for spec, size in snapshot.first_keys),
        ),
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
        cost_an_hour=None
        if snapshot.planned is None
        else cost_an_hour(snapshot.planned, nodes, policy.trees),
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


def _key(spec: KeySpec, size: int) -> KeyStatus:
    return KeyStatus(
        name=spec.name[:MOST_CHARACTERS],
        store=spec.namespace,
        dtype=spec.dtype,
        shape=spec.shape,
        bytes=size,
        members=len(spec.members),
    )


def policy_status(policy: Policy, since_s: float, considered: str) -> PolicyStatus:
    """Return what is shown of a policy: its trees as nodes run them, without ranks that have left."""
    total = sum(policy.weights)
    trees = [MemberTree(tree, policy.members or range(tree.size)) for tree in policy.trees]
    return PolicyStatus(
        version=policy.version,
        reason=policy.reason,
        since_s=since_s,
        considered=considered,
        trees=tuple(
            TreeStatus(
                root=tree.root,
                share=weight / total,
                reduce_parent=tree.reduce_parent,
                broadcast_parent=tree.broadcast_parent,
            )
            for tree, weight in zip(trees, policy.weights, strict=True)
        ),
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
        site=member.site or ("" if node.described is None else node.described.site),
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
        lat=None if node.described is None else node.described.lat,
        lon=None if node.described is None else node.described.lon,
        queued=None if status is None or status.queued < 0 else status.queued,
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


# A job's status as metrics for Prometheus. Names and labels are append-only: dashboards use them.

_NODE_GAUGES: Final = (
    ("heard_s", "netstorm_node_heard_seconds", "Since the node was last heard."),
    ("last_round", "netstorm_node_last_round", "Newest round that is complete in all keys."),
    ("round_s", "netstorm_node_round_seconds", "How long that round took, from first begin to last end."),
    ("waiting", "netstorm_node_waiting_ratio", "Part of the last seconds with operations outstanding."),
    ("sending", "netstorm_node_sending_bits_per_second", "Sent to other nodes in the last seconds."),
    ("clock_offset_s", "netstorm_node_clock_offset_seconds", "Cluster clock less the host's."),
    ("clock_error_s", "netstorm_node_clock_error_seconds", "Most that the offset may be wrong."),
    ("clock_drift", "netstorm_node_clock_drift_ratio", "How much faster the cluster clock goes."),
    ("clock_hops", "netstorm_node_clock_hops", "Exchanges between its clock and the scheduler's."),
    ("egress", "netstorm_node_egress_bits_per_second", "All links out together, when they were the limit."),
    ("ingress", "netstorm_node_ingress_bits_per_second", "All links in together, when they were the limit."),
)
_NODE_COUNTERS: Final = (
    ("rounds", "netstorm_node_rounds", "Rounds of all keys complete."),
    ("waited_s", "netstorm_node_waited_seconds", "Time with operations outstanding."),
    ("bytes_sent", "netstorm_node_sent_bytes", "Sent to other nodes, headers included."),
    ("detoured", "netstorm_node_detoured_chunks", "Chunks sent over auxiliary paths."),
)
_LINK_GAUGES: Final = (
    ("rate", "netstorm_link_rate_bits_per_second", "Measured rate that is planned with."),
    ("error", "netstorm_link_rate_error_ratio", "Standard error of the rate, as a fraction of it."),
    ("latency_s", "netstorm_link_latency_seconds", "One way."),
    ("age_s", "netstorm_link_age_seconds", "Since the link was last measured."),
)

_EVENTS: Final = "netstorm_scheduler_events"
_EVENTS_ABOUT: Final = "What the scheduler counts."


def metrics(status: JobStatus) -> Iterator[Metric]:
    """Yield all metrics of a job. What is not known is left out."""
    yield from _job(status)
    nodes = [node for node in status.nodes if node.rank is not None]
    info = InfoMetricFamily("netstorm_node", "Who a rank is.", labels=["rank"])
    for node in nodes:
        who = {"host": node.host, "port": str(node.port), "site": node.site, "state": node.state}
        info.add_metric([str(node.rank)], who)
    yield info
    yield from _of_nodes(nodes, GaugeMetricFamily, _NODE_GAUGES)
    yield from _of_nodes(nodes, CounterMetricFamily, _NODE_COUNTERS)
    for field, name, about in _LINK_GAUGES:
        gauge = GaugeMetricFamily(name, about, labels=["source", "target"])
        for link in status.links:
            if link.measured and (value := getattr(link, field)) is not None:
                gauge.add_metric([str(link.source), str(link.target)], value)
        yield gauge


def _of_nodes(
    nodes: Sequence[NodeView],
    family: type[GaugeMetricFamily | CounterMetricFamily],
    fields: Sequence[tuple[str, str, str]],
) -> Iterator[Metric]:
    """Yield a metric for each (field of a node, name, text), with a sample for each node that has a value."""
    for field, name, about in fields:
        metric = family(name, about, labels=["rank"])
        for node in nodes:
            if (value := getattr(node, field)) is not None:
                metric.add_metric([str(node.rank)], value)
        yield metric


def metrics_of_several(statuses: Iterable[JobStatus], process: Mapping[str, float]) -> Iterator[Metric]:
    """Yield all metrics of several jobs, each sample with its job's name as a label `job`.

    Args:
        statuses: of the jobs.
        process: the counters of the scheduler's process, which belong to no job; they have no such label.
    """
    families: dict[str, Metric] = {}
    for status in statuses:
        for metric in metrics(status):
            family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                family.samples.append(sample._replace(labels={**sample.labels, "job": status.job}))
    events = families.setdefault(_EVENTS, CounterMetricFamily(_EVENTS, _EVENTS_ABOUT))
    for name, count in sorted(process.items()):
        events.add_sample(f"{_EVENTS}_total", {"event": name}, count)
    yield from families.values()


def _job(status: JobStatus) -> Iterator[Metric]:
    info = InfoMetricFamily("netstorm_job", "Which job this is.")
    info.add_metric([], {"job": status.job, "release": status.release})
    yield info
    phase = GaugeMetricFamily("netstorm_job_phase", "1 at where the job is in its life.", labels=["phase"])
    for known in JobPhase:
        phase.add_metric([known.value], float(known.value == status.phase))
    yield phase
    policy = status.policy
    for name, about, value in (
        ("netstorm_job_age_seconds", "Since the scheduler began.", status.age_s),
        ("netstorm_job_nodes", "Nodes of the job.", status.num_workers),
        ("netstorm_job_nodes_here", "Nodes that have come and not left.", _here(status)),
        ("netstorm_job_keys", "Keys registered.", status.keys.count),
        ("netstorm_job_key_bytes", "Bytes of all keys together.", status.keys.bytes),
        ("netstorm_policy_version", "The policy that new rounds run under.", policy.version),
        ("netstorm_policy_age_seconds", "For how long it has been in force.", policy.since_s),
        ("netstorm_policy_trees", "Its trees.", len(policy.trees)),
        ("netstorm_failed_links", "Links that the job does without.", len(status.failed_links)),
    ):
        yield GaugeMetricFamily(name, about, value=value)
    if status.view is not None:
        yield GaugeMetricFamily("netstorm_view", "Number of the present view.", value=status.view.number)
        yield GaugeMetricFamily(
            "netstorm_view_silent", "Members without the job's state.", value=len(status.view.silent)
        )
    if status.cost_an_hour is not None:
        about = "Of the traffic at its present rates, by the network file's prices."
        yield GaugeMetricFamily("netstorm_job_cost_per_hour", about, value=status.cost_an_hour)
    shares = GaugeMetricFamily("netstorm_tree_share_ratio", "Part of all data.", labels=["tree", "root"])
    for number, tree in enumerate(policy.trees):
        shares.add_metric([str(number), str(tree.root)], tree.share)
    yield shares
    events = CounterMetricFamily(_EVENTS, _EVENTS_ABOUT, labels=["event"])
    for name, count in sorted(status.counters.items()):
        events.add_metric([name], count)
    yield events


def _here(status: JobStatus) -> int:
    return sum(1 for node in status.nodes if node.state != "left")
