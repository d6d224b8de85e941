"""A node's own metrics for Prometheus. Names and labels are append-only: dashboards know them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from netstorm.protocol.ids import SCHEDULER, UNKNOWN
from netstorm.protocol.messages import NodeStatus

__all__ = ["NodeSnapshot", "metrics"]

_LINK_COUNTERS: Final = {
    "bytes_sent": ("netstorm_link_sent_bytes", "Headers included."),
    "bytes_resent": ("netstorm_link_resent_bytes", "Part of what was sent: sent again."),
    "bytes_received": ("netstorm_link_received_bytes", "Headers included."),
    "messages_sent": ("netstorm_link_sent_messages", "Acknowledgements included."),
    "messages_received": ("netstorm_link_received_messages", "Acknowledgements included."),
    "duplicates": ("netstorm_link_duplicates", "Received twice, and dropped."),
    "connections": ("netstorm_link_connections", "Opened so far: more than one is a link that broke."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """A node's metrics at one moment."""

    job: str
    rank: int
    site: str
    status: NodeStatus
    links: Mapping[tuple[int, str], Mapping[str, int]]
    """Counters of each connection, by peer (-1: the scheduler; below it, those that would take over) and
    "opened" or "accepted"."""
    counters: Mapping[str, float]


def metrics(node: NodeSnapshot) -> Iterator[Metric]:
    """Yield all metrics of a node; each is labelled with its rank."""
    rank, status = str(node.rank), node.status
    info = InfoMetricFamily("netstorm_node", "Which node this is.", labels=["rank"])
    info.add_metric([rank], {"job": node.job, "site": node.site})
    yield info
    for name, about, total in (
        ("netstorm_node_rounds", "Rounds of all keys complete.", status.rounds),
        ("netstorm_node_waited_seconds", "Time with operations outstanding.", status.waited_s),
        ("netstorm_node_sent_bytes", "Sent to other nodes, headers included.", status.bytes_sent),
        ("netstorm_node_detoured_chunks", "Chunks sent over auxiliary paths.", status.detoured),
    ):
        counter = CounterMetricFamily(name, about, labels=["rank"])
        counter.add_metric([rank], total)
        yield counter
    gauges = [
        ("netstorm_node_last_round", "Newest round that is complete in all keys.", status.last_round),
        ("netstorm_node_round_seconds", "How long that round took.", status.round_s),
    ]
    pushed = node.counters.get("pushes_of_blocks", 0)
    if pushed:
        mean = node.counters.get("staleness_total", 0) / pushed
        most = node.counters.get("staleness_max", 0)
        gauges += [
            ("netstorm_node_staleness_mean", "Updates by others between a gradient and its value.", mean),
            ("netstorm_node_staleness_max", "The most of them.", most),
        ]
    if status.clock_error >= 0:
        gauges += [
            ("netstorm_node_clock_offset_seconds", "Cluster clock less the host's.", status.clock_offset),
            ("netstorm_node_clock_error_seconds", "Most that it may be wrong.", status.clock_error),
            (
                "netstorm_node_clock_drift_ratio",
                "How much faster the cluster clock goes.",
                status.clock_drift,
            ),
            (
                "netstorm_node_clock_hops",
                "Exchanges between its clock and the scheduler's.",
                status.clock_hops,
            ),
        ]
    for name, about, value in gauges:
        gauge = GaugeMetricFamily(name, about, labels=["rank"])
        gauge.add_metric([rank], value)
        yield gauge
    for field, (name, about) in _LINK_COUNTERS.items():
        counter = CounterMetricFamily(name, about, labels=["rank", "peer", "side"])
        for (peer, side), numbers in sorted(node.links.items()):
            counter.add_metric([rank, _name_of(peer), side], numbers[field])
        yield counter
    events = CounterMetricFamily("netstorm_node_events", "What the node counts.", labels=["rank", "event"])
    for event, count in sorted(node.counters.items()):
        events.add_metric([rank, event], count)
    yield events


def _name_of(peer: int) -> str:
    """Return what a label calls a peer; two that are there at once never have the same name."""
    if peer == SCHEDULER:
        return "scheduler"
    return str(peer) if peer >= 0 else f"recovering scheduler {UNKNOWN - peer}"
