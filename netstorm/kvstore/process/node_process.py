"""A general node at work in this process: what starts and stops its threads, sockets and servers.

What users ask for is in `runtime`. Everything that happens to the node happens on the I/O thread.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from netstorm import clock
from netstorm.errors import Closed, SettingsError
from netstorm.kvstore.membership import DriverStatus, time_server_address
from netstorm.kvstore.node import GeneralNode
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.options import NodeOptions, lane_options
from netstorm.observe.log import Counters
from netstorm.observe.trace import Trace, trace_path
from netstorm.protocol.frames import SCHEDULER, Buffer
from netstorm.protocol.messages import Measured
from netstorm.pslite.admission import log_if_plain, serves_others
from netstorm.pslite.host_addresses import advertised_host, is_own_address, machine_number, resolve
from netstorm.pslite.host_traffic import SharedTraffic
from netstorm.pslite.io_thread import Driver, VanAhead, start_driver
from netstorm.pslite.sntp import Address
from netstorm.pslite.sntp_socket import SntpClient, SntpServer, Watcher, packet_key
from netstorm.pslite.system import memory_bytes
from netstorm.settings import Settings, foreign_variable

if TYPE_CHECKING:
    from netstorm.observe.web import WebAccess, WebServer

__all__ = ["NodeProcess"]


_log = logging.getLogger(__name__)

_LINGER_S: Final = 2.0
"""How long the last messages (finished, failed) may take to leave."""


_FORWARDED: Final = 4
"""Part of the memory that what is forwarded for others may take: the rest is the script's."""

_ANSWER_S: Final = 1.0
"""How long an error message waits for what the I/O thread knows."""


class NodeProcess:
    """The threads, sockets and servers of one general node.

    Attributes:
        node: the state machine; to be used on the I/O thread only.
        driver: its I/O thread and sockets.
        cluster_clock: the time that all nodes share.
        trace: records rounds and deliveries, if NETSTORM_TRACE asks for it.
    """

    def __init__(
        self, settings: Settings, counters: Counters, framework: str = "", ahead: VanAhead | None = None
    ) -> None:
        """Listen, and begin to join.

        Args:
            settings: of this process.
            counters: of the node.
            framework: whose tensors the program sums.
            ahead: has the node's van, with these counters; None: a new one.

        Raises:
            SettingsError: an address cannot be used, or strangers could see the node's metrics.
        """
        self._pid: Final = os.getpid()
        self._settings: Final = _with_own_ports(settings)
        settings = self._settings
        self._counters: Final = counters
        self._metrics: WebServer | None = None
        self._access: WebAccess | None = None
        if settings.metrics_port:
            from netstorm.observe.web import web_access  # noqa: PLC0415 - as in `serve_metrics`

            self._access = web_access(settings)  # before others wait for a node that refuses
        self.trace: Final = Trace(clock.monotonic) if settings.trace_file else None
        for_others = serves_others(settings)
        host = advertised_host(
            node_host=settings.node_host,
            interface=settings.interface,
            bind_host=settings.bind_host,
            scheduler_host=settings.scheduler_host,
            for_others=for_others,
        )
        listens_at = settings.bind_host or host
        scheduler = resolve(settings.scheduler_host, "DMLC_PS_ROOT_URI", for_others=for_others)
        self.cluster_clock: Final = ClusterClock(
            settings, scheduler, followed=self._scheduler, parent=self._time_server, counters=counters
        )
        self.driver: Final[Driver[GeneralNode]] = start_driver(
            lambda port: GeneralNode(
                NodeOptions.from_settings(
                    settings,
                    scheduler=scheduler,
                    host=host,
                    port=port,
                    pid=self._pid,
                    framework=framework,
                    machine=machine_number(),
                    most_forwarded=memory_bytes() // _FORWARDED,
                    connects_at_once=ahead is not None,
                ),
                now=clock.monotonic(),
                counters=counters,
            ),
            settings=settings,
            counters=counters,
            bind_host=listens_at,
            port=settings.port,
            rank=-1,
            ordered=lambda peer: peer == SCHEDULER,
            stamp=self.cluster_clock.client.now_ns,
            name="netstorm-node",
            trace=self.trace,
            dscp=settings.dscp,
            unmarked=(scheduler, settings.scheduler_port),
            traffic=SharedTraffic(settings.job_priority) if settings.job_priority else None,
            lanes=lane_options(settings),
            van=None if ahead is None else ahead.van,
        )
        self.node: Final = self.driver.machine
        if settings.rank <= 0:  # once a job
            log_if_plain(settings, listens_at, _log)
        self.cluster_clock.start(self.driver.thread, host=listens_at, port=self.driver.port)
        self._attach_meter()
        self.node.status.sample_driver = self._driver_status

    def serve_metrics(self) -> None:
        """Serve the node's metrics, if NETSTORM_METRICS_PORT asks for it."""
        if self._access is not None:
            from netstorm.kvstore.process.node_metrics import start_metrics_server  # noqa: PLC0415 - a web server

            self._metrics = start_metrics_server(self._settings, self.driver, self._access)

    def is_mine(self) -> bool:
        """Return whether this process started the node; a forked child did not."""
        return os.getpid() == self._pid

    def drain(self) -> None:
        """Wait until the I/O thread has done all that it was asked for before this call."""
        if self.is_mine():
            with contextlib.suppress(Closed):
                self.driver.thread.call(lambda _: None).result()

    def post(self, function: Callable[[float], None]) -> None:
        """Have the I/O thread call `function` with the time, soon; never, if the node has been closed."""
        with contextlib.suppress(Closed):
            self.driver.thread.post(function)

    def link_bytes(self) -> tuple[int, int]:
        """Return the bytes sent to, and received from, all peers, headers included."""
        links = self.driver.thread.call(lambda _: self.driver.endpoint.links()).result()
        return (
            sum(link["bytes_sent"] for link in links.values()),
            sum(link["bytes_received"] for link in links.values()),
        )

    def staging(self, nbytes: int) -> Buffer | None:
        """See `Runtime.staging`. Runs on the I/O thread."""
        if not self._settings.shared_memory:
            return None
        others = (member.host for member in self.node.members if member.rank != self.node.rank)
        return self.driver.van.memory.staging(nbytes) if any(map(is_own_address, others)) else None

    def waiting_text(self, operation: Operation) -> str:
        """Return what an all-reduce or collective call waits for, for a person; empty: nobody knows."""
        with contextlib.suppress(Closed, concurrent.futures.TimeoutError):
            asked = self.driver.thread.call(lambda _: self.node.waiting_text_of(operation))
            return asked.result(timeout=_ANSWER_S)
        return ""

    def measured(self) -> Measured | None:
        """Return what this node has measured of its links; None with ENABLE_AWARENESS=0."""
        meter = self.node.meter
        return None if meter is None else self.driver.thread.call(lambda _: meter.known()).result()

    def close(self) -> None:
        """Stop the servers and the I/O thread, close the sockets, and write the trace."""
        if self._metrics is not None:
            self._metrics.close()
        self.cluster_clock.stop(self.driver.thread)
        self.driver.thread.close(linger_s=_LINGER_S)
        if self.trace is not None:
            self._write_trace(self.trace)

    def _attach_meter(self) -> None:
        meter = self.node.meter
        self.driver.endpoint.observer = meter
        if meter is not None:
            meter.progress = self.driver.progress
            meter.clock_ns = self.cluster_clock.client.now_ns
            meter.restart_bbr = self.driver.restart_bbr

    def _scheduler(self) -> Address | None:
        """Return the address of the scheduler that the node follows. Runs on the I/O thread."""
        return self.node.live.scheduler

    def _time_server(self) -> Address | None:
        """Return which node to ask for the time; None: the scheduler. Runs on the I/O thread."""
        return time_server_address(self.node.policy, self.node.rank, self.node.members)

    def _driver_status(self, now: float) -> DriverStatus:
        """Return the part of the status that the node itself does not know. Runs on the I/O thread."""
        links, sync = self.driver.endpoint.links(), self.cluster_clock.client.sync
        return DriverStatus(
            bytes_sent=sum(link["bytes_sent"] for (peer, _), link in links.items() if peer >= 0),
            clock_offset=self.cluster_clock.offset_to_host_s(),
            clock_drift=sync.drift,
            clock_error=sync.error_bound(clock.monotonic()) if sync.synchronised else -1.0,
            clock_hops=sync.hops,
            queued=self.driver.endpoint.queued_bytes(),
        )

    def _write_trace(self, trace: Trace) -> None:
        path = trace_path(self._settings.trace_file, self.node.rank)
        offset_s = self.cluster_clock.offset_to_monotonic_s()
        try:
            trace.write(path, self.node.rank, machine=clock.boot_identity(), cluster_offset_s=offset_s)
        except OSError as error:
            _log.error("NETSTORM_TRACE: %s cannot be written: %s", path, error.strerror)


def _with_own_ports(settings: Settings) -> Settings:
    """Return the settings of this one of a machine's nodes, which were given one port for all of them.

    Raises:
        SettingsError: there is no port of that number.
    """
    place = foreign_variable("LOCAL_RANK") or "0"
    if not place.isdecimal() or int(place) == 0 or not (settings.port or settings.advertised_port):
        return settings
    return settings.changed(
        port=settings.port and settings.port + int(place),
        advertised_port=settings.advertised_port and settings.advertised_port + int(place),
    )


# The cluster clock of a node's process: it asks a time server, and serves its children in the trees.
#
# With NETSTORM_CLOCK=trees a node asks its parent in a tree and answers its children, as in the paper
# (arXiv 2404.11352 §V, Fig. 5); otherwise each node asks the scheduler.


class ClusterClock:
    """The cluster clock, as this process knows it.

    Attributes:
        client: asks for the time; its `now_ns` stamps what is sent.
    """

    def __init__(
        self,
        settings: Settings,
        scheduler: str,
        *,
        followed: Callable[[], Address | None],
        parent: Callable[[], Address | None],
        counters: Counters,
    ) -> None:
        """Begin with the host's clock.

        Args:
            settings: the scheduler's SNTP port, and whether nodes ask along the trees.
            scheduler: its host's address at first.
            followed: called on the I/O thread; returns the address of the scheduler that the node follows, at
                which another one may have taken the job over. None: it has not joined yet.
            parent: called on the I/O thread; returns the time server, None for the scheduler's.
            counters: of the process.

        Raises:
            SettingsError: the file of the job's key cannot be used.
        """
        self._along_trees: Final = settings.clock_source == "trees"
        self._counters: Final = counters
        self._sntp_port: Final = settings.sntp_port
        self._followed: Final = followed
        self._key: Final = packet_key(settings)
        self._server: SntpServer | None = None
        self.client: Final = SntpClient(
            scheduler,
            settings.sntp_port or settings.scheduler_port,
            scheduler=self._scheduler,
            parent=parent if self._along_trees else lambda: None,
            counters=counters,
            key=self._key,
        )

    def start(self, thread: Watcher, *, host: str, port: int) -> None:
        """Ask for the time on the I/O thread, and serve it at `host` and `port` if children may ask."""
        self.client.start(thread)
        if not self._along_trees:
            return
        try:
            self._server = SntpServer(
                host,
                port,
                now=lambda: self.client.now_ns() / 1e9,
                quality=self.client.quality,
                counters=self._counters,
                key=self._key,
            )
        except SettingsError as error:
            _log.warning("NETSTORM_CLOCK=trees: %s; other nodes will ask the scheduler", error)
        else:
            self._server.start(thread)

    def stop(self, thread: Watcher) -> None:
        """Ask and serve no more."""
        self.client.stop(thread)
        if self._server is not None:
            self._server.stop(thread)

    def _scheduler(self) -> Address | None:
        """Return the present scheduler's time server. It has the number of that scheduler's TCP port, or the
        one that NETSTORM_SNTP_PORT gives to all schedulers.
        """
        followed = self._followed()
        return None if followed is None else (followed[0], self._sntp_port or followed[1])

    def offset_to_host_s(self) -> float:
        """Return the cluster clock less the host's, in s."""
        return (self.client.now_ns() - clock.wall_ns()) / 1e9

    def offset_to_monotonic_s(self) -> float:
        """Return the cluster clock less the monotonic clock, in s."""
        return (self.client.now_ns() - clock.monotonic_ns()) / 1e9

    def error_bound_s(self, now: float) -> float:
        """Return by how much the cluster clock may be off, in s; inf while it is not known."""
        return self.client.sync.error_bound(now)
