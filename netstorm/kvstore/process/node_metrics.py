"""A node's own metrics for Prometheus, and the server of them. Few nodes serve any, and the libraries take
35 ms of a processor to import, so only a node with NETSTORM_METRICS_PORT imports this.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from netstorm.addresses import host_port
from netstorm.errors import SettingsError, WaitTimeout
from netstorm.kvstore.node import GeneralNode
from netstorm.observe.web import WebAccess, WebRefusals, WebServer, metrics_page, pages
from netstorm.protocol.frames import SCHEDULER, UNKNOWN
from netstorm.protocol.messages import NodeStatus
from netstorm.pslite.io_thread import Driver
from netstorm.settings import Settings

__all__ = ["NodeMetrics", "metrics", "start_metrics_server"]


_log = logging.getLogger(__name__)


# Names and labels are append-only: dashboards know them.

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
class NodeMetrics:
    """A node's metrics at one moment."""

    job: str
    rank: int
    site: str
    status: NodeStatus
    links: Mapping[tuple[int, str], Mapping[str, int]]
    """Counters of each connection, by peer (-1: the scheduler; below it, those that would take over) and
    "opened" or "accepted"."""
    counters: Mapping[str, float]


def metrics(node: NodeMetrics) -> Iterator[Metric]:
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


# Serves a node's /metrics on a thread of its own, if NETSTORM_METRICS_PORT asks for it.

_ANSWER_S: Final = 2.0
"""How long the I/O thread may take to answer before the request fails."""


def start_metrics_server(
    settings: Settings, driver: Driver[GeneralNode], access: WebAccess
) -> WebServer | None:
    """Serve a node's metrics, if that is asked for and possible. Training does not fail if no port is free.

    The nodes of one machine have the same settings, so each takes the first port that is free.
    """
    first = settings.metrics_port

    def snapshot() -> NodeMetrics:
        future = driver.thread.call(lambda now: _snapshot(settings, driver, now))
        try:
            return future.result(_ANSWER_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise WaitTimeout(f"the node has not answered for {_ANSWER_S:g} s") from None

    refusals = WebRefusals()
    page = metrics_page(lambda: metrics(snapshot()), refusals)
    application = access.guard(pages({"/metrics": page}), refusals)
    ports = range(first, min(first + settings.num_workers, 65536))
    try:
        server = WebServer(
            application,
            settings.http_bind,
            ports,
            name="netstorm-metrics",
            tls=access.tls,
            refusals=refusals,
        )
    except SettingsError as error:
        _log.warning("no metrics of this node: %s (NETSTORM_METRICS_PORT, NETSTORM_HTTP_BIND)", error)
        return None
    address = host_port(settings.http_bind, server.port)
    _log.info("metrics of this node: %s://%s/metrics", access.scheme, address)
    return server


def _snapshot(settings: Settings, driver: Driver[GeneralNode], now: float) -> NodeMetrics:
    node = driver.machine
    links = driver.endpoint.links()
    return NodeMetrics(
        job=settings.job,
        rank=node.rank,
        site=settings.site,
        status=node.status.report(now),
        links={
            (int(peer), "opened" if opened else "accepted"): link for (peer, opened), link in links.items()
        },
        counters=node.counters.snapshot(),
    )
