"""The shell around a general node: its threads, sockets, signals and end. Frontends come in here.

One runtime a process, shared by all its stores. Calls come from any thread; everything that happens to the
node happens on the I/O thread.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import netstorm
from netstorm import clock
from netstorm.errors import Closed, NetStormError, SettingsError, UsageError
from netstorm.kvstore.membership.clock_parent import clock_address
from netstorm.kvstore.membership.node_status import DriverStatus
from netstorm.kvstore.node.general_node import GeneralNode
from netstorm.kvstore.operations.allreduce import Done, Operation
from netstorm.kvstore.operations.asynchronous import AsyncOperation
from netstorm.kvstore.options import NodeOptions, given, meter_options
from netstorm.kvstore.paths.auxiliary import AuxiliaryOptions
from netstorm.kvstore.process.busy_time import BusyTime
from netstorm.kvstore.process.signals import SignalWatch
from netstorm.kvstore.values.key import Key
from netstorm.observe.counters import Counters
from netstorm.observe.trace import Trace, trace_path
from netstorm.protocol.frames import Buffer, checksum
from netstorm.protocol.ids import SCHEDULER
from netstorm.protocol.messages import Measured
from netstorm.pslite.clock.sntp_socket import SntpClient, SntpServer
from netstorm.pslite.clock.source import Address
from netstorm.pslite.process.driver import Driver, start_driver
from netstorm.pslite.system.addresses import advertised_host, resolve
from netstorm.settings import Settings

if TYPE_CHECKING:
    from netstorm.observe.web import WebServer

__all__ = ["Runtime"]

_log = logging.getLogger(__name__)

_SLICE_S: Final = 0.2
"""Blocking waits are cut into slices, so that Python's signal handlers run."""

_LINGER_S: Final = 2.0
"""How long a last word (finished, failed) may take to leave."""


class Runtime:
    """A general node at work in this process."""

    def __init__(self, settings: Settings) -> None:
        """Bind, connect to the scheduler and wait until all nodes are here.

        Raises:
            SettingsError: an address cannot be used.
            JoinRefused, Disagreement, WaitTimeout, SchedulerLost: the job does not come together; says why.
        """
        self.settings: Final = settings
        self.counters: Final = Counters()
        self._pid: Final = os.getpid()
        self._busy: Final = BusyTime()
        self._trace: Final = Trace(clock.monotonic) if settings.trace_file else None
        self._namespaces = 0
        self._closing = threading.Lock()
        self._closed = False
        host = advertised_host(
            node_host=settings.node_host, interface=settings.interface, scheduler_host=settings.scheduler_host
        )

        scheduler = resolve(settings.scheduler_host, "DMLC_PS_ROOT_URI")
        by_trees = settings.clock_source == "trees"
        self._sntp: Final = SntpClient(
            scheduler,
            settings.sntp_port or settings.scheduler_port,
            parent=self._clock_parent if by_trees else lambda: None,
            counters=self.counters,
        )
        self._tells_time: SntpServer | None = None

        def make_node(port: int) -> GeneralNode:
            return GeneralNode(
                NodeOptions(
                    scheduler_host=scheduler,
                    scheduler_port=settings.scheduler_port,
                    host=host,
                    port=settings.advertised_port or port,
                    job=settings.job,
                    site=settings.site,
                    asked_rank=settings.rank,
                    num_workers=settings.num_workers,
                    release=netstorm.__version__,
                    pid=self._pid,
                    must_agree=given(settings),
                    join_timeout_s=settings.join_timeout_s,
                    wait_timeout_s=settings.wait_timeout_s,
                    link_retry_s=settings.link_retry_s,
                    meter=meter_options(settings),
                    auxiliary=AuxiliaryOptions.from_settings(settings),
                ),
                now=clock.monotonic(),
                counters=self.counters,
            )

        self._driver: Final[Driver[GeneralNode]] = start_driver(
            make_node,
            settings=settings,
            counters=self.counters,
            bind_host=settings.bind_host or host,
            port=settings.port,
            rank=-1,
            ordered=lambda peer: peer == SCHEDULER,
            stamp=self._sntp.now_ns,
            name="netstorm-node",
            trace=self._trace,
            dscp=settings.dscp,
            unmarked=(scheduler, settings.scheduler_port),
        )
        self.node: Final = self._driver.machine
        self._sntp.start(self._driver.thread)
        if by_trees:
            self._tells_time = self._tell_time(settings.bind_host or host)
        self._driver.endpoint.observer = self.node.meter
        if self.node.meter is not None:
            self.node.meter.progress = self._driver.progress
            self.node.meter.clock_ns = self._sntp.now_ns
            self.node.meter.start_anew = self._driver.start_anew
        self.node.standing.look = self._outside
        self._shown: WebServer | None = None
        self._signals: Final = SignalWatch(self._driver.thread, self.interrupted)
        try:
            self._wait(self._driver.ask(lambda done, _: self.node.on_joined(done)))
            if settings.metrics_port:
                from netstorm.kvstore.process.metrics_server import show  # noqa: PLC0415 - few want it, and a web server is large

                self._shown = show(settings, self._driver)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------- what it is

    @property
    def rank(self) -> int:
        """This node's rank."""
        return self.node.rank

    @property
    def size(self) -> int:
        """How many nodes the job has."""
        return len(self.node.members)

    @property
    def failure(self) -> NetStormError | None:
        """Why nothing works any more; None while it does."""
        return self.node.failure

    def is_mine(self) -> bool:
        """Return whether this process made the runtime; a forked child did not."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise what has made this runtime useless, if anything has.

        Raises:
            Closed: after `close`, or in a forked child.
            NetStormError: the failure of the job, the same for every call.
        """
        if os.getpid() != self._pid:
            raise Closed(
                f"this store belongs to process {self._pid}; process {os.getpid()} was forked from it and "
                "cannot use it: "
                "create the store in the process that trains"
            )
        failure = self.node.failure
        if failure is not None:
            raise type(failure)(*failure.args)
        if self._closed:
            raise Closed("the store has been closed")

    # -------------------------------------------------------------------------------------------- what it
    # does

    def open_namespace(self) -> int:
        """Return the number of a new store: the n-th of this process is the n-th of every process."""
        self.check()
        self._namespaces += 1
        return self._namespaces - 1

    def register(
        self, namespace: int, name: str, shape: tuple[int, ...], dtype: str, *, form: int = 0
    ) -> Key:
        """Make a key known to the job; does not wait for the scheduler's answer. `form` is its codec.

        Raises:
            UsageError: a type that cannot be summed.
        """
        self.check()
        key = Key(namespace, name, shape, dtype, form=form)
        self._driver.thread.post(lambda now: self.node.register(key, now))
        return key

    def submit(self, operation: Operation | AsyncOperation) -> None:
        """Begin an all-reduce, or an asynchronous push or pull; its `done` is called on the I/O thread,
        whatever happens. Never raises, never blocks.
        """
        busy, done = self._busy, operation.done
        if self._trace is not None:
            done = _traced(operation, self._trace)

        def ended(error: Exception | None) -> None:
            busy.end(clock.monotonic())
            done(error)

        operation.done = ended
        busy.begin(clock.monotonic())
        try:
            self._driver.tell(lambda now: self.node.submit(operation, now), ended)
        except Closed as error:
            ended(error)

    def statistics(self) -> dict[str, float]:
        """Return what this node has done so far.

        Returns:
            `bytes_sent` and `bytes_received` to and from other nodes and the scheduler, headers included;
            `network_s`, the time with at least one operation under way; `clock_error_s`, by how much this
            node's idea of the cluster clock may be off (inf: not known yet); and every counter of the
            process.
        """
        links = self._driver.thread.call(lambda _: self._driver.endpoint.links()).result()
        return {
            "bytes_sent": float(sum(link["bytes_sent"] for link in links.values())),
            "bytes_received": float(sum(link["bytes_received"] for link in links.values())),
            "network_s": self._busy.total(clock.monotonic()),
            "clock_error_s": self._sntp.sync.error_bound(clock.monotonic()),
            **self.counters.snapshot(),
        }

    def measured(self) -> Measured | None:
        """Return what this node has measured of its links; None with ENABLE_AWARENESS=0."""
        meter = self.node.meter
        return None if meter is None else self._driver.thread.call(lambda _: meter.known()).result()

    def allreduce(self, operation: Operation, timeout_s: float | None = None) -> None:
        """Like `submit`, and wait for the result.

        Raises:
            WaitTimeout: after `timeout_s` (None: NETSTORM_WAIT_TIMEOUT).
            NetStormError: whatever has made it fail.
        """
        self.check()
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        operation.done = lambda error: (
            future.set_result(None) if error is None else future.set_exception(error)
        )
        self.submit(operation)
        self._wait(future, timeout_s)

    def post(self, function: Callable[[GeneralNode, float], None]) -> None:
        """Have the I/O thread do something with the node, soon; never, if this runtime has been closed."""
        with contextlib.suppress(Closed):
            self._driver.thread.post(lambda now: function(self.node, now))

    def report_replica(self, key: Key, round: int, value: Buffer) -> None:
        """Have a key's value after a round compared over all ranks; a difference ends the job.

        Does not block.
        """
        digest = checksum(value)
        self.post(lambda node, now: node.report_replica(key, round, digest, now))

    def barrier(self) -> None:
        """Wait until every rank has come to its n-th barrier.

        Raises:
            WaitTimeout: names the ranks that are missing.
            NetStormError: whatever has made it fail.
        """
        self.check()
        self._wait(self._driver.ask(self.node.barrier))

    def pass_through_io_thread(self) -> None:
        """Wait until the I/O thread has done what it was doing when this was called."""
        if os.getpid() == self._pid and not self._closed:
            with contextlib.suppress(Closed):
                self._driver.thread.call(lambda _: None).result()

    def fail(self, reason: str) -> None:
        """Tell everybody that this rank's program has failed. Nothing works afterwards; `close` does not
        wait.
        """

        def tell(now: float) -> None:
            self._signals.look()  # a script that a signal has ended has the signal for its reason
            self.node.fail(reason, now)

        if os.getpid() == self._pid and not self._closed:
            with contextlib.suppress(Closed):
                self._driver.thread.post(tell)

    def interrupted(self, signal_name: str) -> None:
        """A signal has come: fail what is outstanding, since Python is deaf while it is blocked inside a
        library.
        """
        self.node.fail(f"interrupted by {signal_name}", clock.monotonic())

    def finish(self) -> None:
        """Push no more, and wait until no rank needs this node: it goes on forwarding until then.

        Raises:
            NetStormError: the job has failed before all had finished.
        """
        self.check()
        self._wait(self._driver.ask(self.node.finish))

    def close(self) -> None:
        """Stop the I/O thread and close the sockets. Twice does no harm; in a forked child it does
        nothing.
        """
        if os.getpid() != self._pid:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if self._shown is not None:
            self._shown.close()
        self._signals.close()
        self._sntp.stop(self._driver.thread)
        if self._tells_time is not None:
            self._tells_time.stop(self._driver.thread)
        self._driver.thread.close(linger_s=_LINGER_S)
        if self._trace is not None:
            self._write_trace(self._trace)

    def _clock_parent(self) -> Address | None:
        """Return which node is to be asked for the time; None: none. Runs on the I/O thread."""
        return clock_address(self.node.policy, self.rank, self.node.members)

    def _tell_time(self, host: str) -> SntpServer | None:
        """Tell children in the trees the time; where that cannot be, they ask the scheduler."""
        try:
            server = SntpServer(
                host,
                self._driver.port,
                now=lambda: self._sntp.now_ns() / 1e9,
                quality=self._sntp.quality,
                counters=self.counters,
            )
        except SettingsError as error:
            _log.warning("NETSTORM_CLOCK=trees: %s; others will ask the scheduler", error)
            return None
        server.start(self._driver.thread)
        return server

    def _outside(self, now: float) -> DriverStatus:
        """Return what the node itself does not know. Runs on the I/O thread."""
        links, sync = self._driver.endpoint.links(), self._sntp.sync
        return DriverStatus(
            bytes_sent=sum(link["bytes_sent"] for (peer, _), link in links.items() if peer != SCHEDULER),
            clock_offset=(self._sntp.now_ns() - clock.wall_ns()) / 1e9,
            clock_drift=sync.drift,
            clock_error=sync.error_bound(now) if sync.synchronised else -1.0,
            clock_hops=sync.hops,
        )

    def _write_trace(self, trace: Trace) -> None:
        path = trace_path(self.settings.trace_file, self.rank)
        offset_s = (self._sntp.now_ns() - clock.monotonic_ns()) / 1e9
        try:
            trace.write(path, self.rank, machine=clock.boot_identity(), cluster_offset_s=offset_s)
        except OSError as error:
            _log.error("NETSTORM_TRACE: %s cannot be written: %s", path, error.strerror)

    def _wait(self, future: concurrent.futures.Future[None], timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else clock.monotonic() + timeout_s
        while True:
            try:
                future.result(timeout=_SLICE_S)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                if deadline is not None and clock.monotonic() > deadline:
                    raise UsageError(f"no result within {timeout_s:g} s") from None
            else:
                return


def _traced(operation: Operation | AsyncOperation, trace: Trace) -> Done:
    """Return the operation's `done`, which then takes note of the round."""
    began, done = clock.monotonic(), operation.done

    def ended(error: Exception | None) -> None:
        trace.add_round(operation.key.name, operation.round, began, clock.monotonic())
        done(error)

    return ended
