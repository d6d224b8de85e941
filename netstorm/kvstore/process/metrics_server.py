"""Serves a node's /metrics on a thread of its own, if NETSTORM_METRICS_PORT asks for it."""

from __future__ import annotations

import concurrent.futures
import logging
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector

from netstorm.addresses import host_port
from netstorm.errors import SettingsError, WaitTimeout
from netstorm.kvstore.node.general_node import GeneralNode
from netstorm.kvstore.process.metrics import NodeSnapshot, metrics
from netstorm.observe.pages import metrics_page, pages
from netstorm.observe.web import WebServer
from netstorm.observe.web_access import WebAccess
from netstorm.observe.web_refusals import WebRefusals
from netstorm.pslite.process.driver import Driver
from netstorm.settings import Settings

__all__ = ["start_metrics_server"]

_log = logging.getLogger(__name__)

_ANSWER_S: Final = 2.0
"""How long the I/O thread may take to answer before the request fails."""


def start_metrics_server(
    settings: Settings, driver: Driver[GeneralNode], access: WebAccess
) -> WebServer | None:
    """Serve a node's metrics, if that is asked for and possible. Training does not fail if no port is free.

    The nodes of one machine have the same settings, so each takes the first port that is free.
    """
    first = settings.metrics_port

    def snapshot() -> NodeSnapshot:
        future = driver.thread.call(lambda now: _snapshot(settings, driver, now))
        try:
            return future.result(_ANSWER_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise WaitTimeout(f"the node has not answered for {_ANSWER_S:g} s") from None

    refusals = WebRefusals()
    page = metrics_page(lambda: metrics(snapshot()), _add_process, refusals.register)
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


def _snapshot(settings: Settings, driver: Driver[GeneralNode], now: float) -> NodeSnapshot:
    node = driver.machine
    links = driver.endpoint.links()
    return NodeSnapshot(
        job=settings.job,
        rank=node.rank,
        site=settings.site,
        status=node.status.report(now),
        links={
            (int(peer), "opened" if opened else "accepted"): link for (peer, opened), link in links.items()
        },
        counters=node.counters.snapshot(),
    )


def _add_process(registry: CollectorRegistry) -> None:
    """Processor time, memory and files of this process, under the names that every client library uses."""
    ProcessCollector(registry=registry)
