"""The runtime: what frontends call, from any thread. One runtime a process, shared by all its stores.

The node itself, its I/O thread and its sockets are in `node_process`.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable
from typing import Final

from netstorm import clock
from netstorm.errors import Closed, NetStormError, UsageError
from netstorm.kvstore.node.general_node import GeneralNode
from netstorm.kvstore.operations.allreduce import Done, Operation
from netstorm.kvstore.operations.asynchronous import AsyncOperation
from netstorm.kvstore.operations.point_to_point import (
    PointToPointOperation,
    ReceiveOperation,
    SendOperation,
)
from netstorm.kvstore.process.busy_time import BusyTime
from netstorm.kvstore.process.completion import CompletionThread
from netstorm.kvstore.process.node_process import NodeProcess
from netstorm.kvstore.process.signals import SignalWatch
from netstorm.kvstore.values.key import Key
from netstorm.observe.counters import Counters
from netstorm.observe.trace import Trace
from netstorm.protocol.frames import Buffer, checksum
from netstorm.settings import Settings

__all__ = ["Runtime", "describe_compression"]

_SLICE_S: Final = 0.2
"""Blocking waits are cut into slices, so that Python's signal handlers run."""


class Runtime:
    """A general node at work in this process, as frontends use it.

    Attributes:
        node: the state machine; to be used on the I/O thread only (`post`).
        process: the node's threads, sockets and servers.
        counters: of this process.
        computing: a thread that may compute, as the I/O thread must not.
    """

    def __init__(self, settings: Settings, *, framework: str = "") -> None:
        """Listen, connect to the scheduler, and wait until all nodes have joined.

        Args:
            settings: of this process.
            framework: whose tensors the program sums.

        Raises:
            SettingsError: an address cannot be used.
            JoinRefused, Disagreement, WaitTimeout, SchedulerLost: why the job does not come together.
        """
        self.settings: Final = settings
        self.counters: Final = Counters()
        self._busy: Final = BusyTime()
        self._namespaces = 0
        self.computing: Final = CompletionThread("netstorm-codecs")
        self._closing: Final = threading.Lock()
        self._closed = False
        self._pid: Final = os.getpid()
        self.process: Final = NodeProcess(settings, self.counters, framework)
        self.node: Final = self.process.node
        self._driver: Final = self.process.driver
        self._signals: Final = SignalWatch(self._driver.thread, self._interrupted)
        try:
            self._wait(self._driver.ask(lambda done, _: self.node.requests.when_joined(done)))
            self.process.serve_metrics()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------- who and whether

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

    def check(self) -> None:
        """Raise the error that has made this runtime useless, if there is one.

        Raises:
            Closed: after `close`, or in a forked child.
            NetStormError: the failure of the job, the same for every call.
        """
        if not self.process.is_mine():
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

    def refuse_if_reproducible(self, what: str) -> None:
        """Refuse what depends on the time, if the results of the job are to be the same in each run.

        Raises:
            UsageError: they are.
        """
        if self.node.requests.reproducible:
            raise UsageError(
                f"{what} with NETSTORM_REPRODUCIBLE=1: expected one of them, since its results depend on "
                "which rank is faster; PyTorch's use_deterministic_algorithms(True) sets the latter, unless "
                "NETSTORM_REPRODUCIBLE=0"
            )

    def statistics(self) -> dict[str, float]:
        """Return what this node has done so far.

        Returns:
            `bytes_sent` and `bytes_received` to and from other nodes and the scheduler, headers included;
            `network_s`, the time with at least one operation under way; `clock_error_s`, by how much this
            node's cluster clock may be off (inf: not known yet); and every counter of the process.
        """
        sent, received = self.process.link_bytes()
        return {
            "bytes_sent": float(sent),
            "bytes_received": float(received),
            "network_s": self._busy.total(clock.monotonic()),
            "clock_error_s": self.process.cluster_clock.error_bound_s(clock.monotonic()),
            **self.counters.snapshot(),
        }

    # --------------------------------------------------------------------------------- keys and operations

    def open_namespace(self) -> int:
        """Return the number of a new store: the n-th of this process is the n-th of every process."""
        self.check()
        self._namespaces += 1
        return self._namespaces - 1

    def register(
        self,
        namespace: int,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        *,
        form: int = 0,
        members: tuple[int, ...] = (),
    ) -> Key:
        """Make a key known to the job; do not wait for the scheduler's answer. `form` is its codec; `members`
        are the ranks that push it (none: all).

        Raises:
            UsageError: a type that cannot be summed.
        """
        self.check()
        key = Key(namespace, name, shape, dtype, form=form, members=members)
        self._driver.thread.post(lambda now: self.node.requests.register(key, now))
        return key

    def submit(self, operation: Operation | AsyncOperation | PointToPointOperation) -> None:
        """Begin an all-reduce, an asynchronous push or pull, a send or a receive.

        Never raises and never blocks. The operation's `done` is called on the I/O thread in any case.
        """
        busy, done = self._busy, operation.done
        if self.process.trace is not None:
            done = _traced(operation, self.process.trace)

        def ended(error: Exception | None) -> None:
            busy.end(clock.monotonic())
            done(error)

        operation.done = ended
        busy.begin(clock.monotonic())
        try:
            self._driver.thread.tell(lambda now: self.node.requests.submit(operation, now), ended)
        except Closed as error:
            ended(error)

    def allreduce(self, operation: Operation, timeout_s: float | None = None) -> None:
        """Submit an operation and wait for the result.

        Raises:
            UsageError: no result within `timeout_s` (None: only NETSTORM_WAIT_TIMEOUT limits the wait).
            NetStormError: why it failed.
        """
        self.check()
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        operation.done = lambda error: (
            future.set_result(None) if error is None else future.set_exception(error)
        )
        self.submit(operation)
        self._wait(future, timeout_s)

    def report_replica(self, key: Key, round: int, value: Buffer) -> None:
        """Have a key's value after a round compared over all ranks; a difference ends the job.

        Does not block.
        """
        digest = checksum(value)
        self.post(lambda node, now: node.requests.report_replica(key, round, digest, now))

    def barrier(self) -> None:
        """Wait until every rank has entered its n-th barrier.

        Raises:
            WaitTimeout: names the ranks that are missing.
            NetStormError: why it failed.
        """
        self.check()
        self._wait(self._driver.ask(self.node.requests.barrier))

    def post(self, function: Callable[[GeneralNode, float], None]) -> None:
        """Have the I/O thread call `function` with the node and the time, soon; never after `close`."""
        self.process.post(lambda now: function(self.node, now))

    # --------------------------------------------------------------------------------------------- the end

    def fail(self, reason: str) -> None:
        """Announce that this rank's program has failed. Nothing works afterwards; `close` does not wait."""

        def announce(now: float) -> None:
            self._signals.poll()  # if a signal has ended the script, the signal is the reason
            after = f", after {self._signals.last}" if self._signals.last else ""
            self.node.requests.fail(f"{reason}{after}", now)

        if self.process.is_mine() and not self._closed:
            self.process.post(announce)

    def finish(self, *, wait: bool = True) -> None:
        """Push no more, and wait until no rank needs this node. Until then it aggregates and forwards.

        Args:
            wait: if not, only announce it; a later call waits.

        Raises:
            NetStormError: the job has failed before all had finished.
        """
        self.check()
        finished = self._driver.ask(self.node.requests.finish)
        if wait:
            self._wait(finished)

    def close(self) -> None:
        """Stop the I/O thread and close the sockets. Twice does no harm; a forked child does nothing."""
        if not self.process.is_mine():
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._signals.close()
        self.process.close()
        self.computing.close()

    def _interrupted(self, signal_name: str) -> None:
        """Fail what is outstanding: Python runs no handler while it is blocked inside a library."""
        self.node.requests.fail(f"interrupted by {signal_name}", clock.monotonic())

    def _wait(self, future: concurrent.futures.Future[None], timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else clock.monotonic() + timeout_s
        while not concurrent.futures.wait([future], _SLICE_S).done:
            if deadline is not None and clock.monotonic() > deadline:
                raise UsageError(f"no result within {timeout_s:g} s")
        future.result()


def describe_compression(runtime: Runtime, text: str) -> None:
    """Say how gradients travel: `netstorm top` and /status.json show it."""

    def describe(node: GeneralNode, _now: float) -> None:
        node.status.compression = text

    runtime.post(describe)


def _traced(operation: Operation | AsyncOperation | PointToPointOperation, trace: Trace) -> Done:
    """Return the operation's `done`, which also records the round in the trace."""
    began, done = clock.monotonic(), operation.done
    name = operation.name if isinstance(operation, (SendOperation, ReceiveOperation)) else operation.key.name

    def ended(error: Exception | None) -> None:
        trace.add_round(name, operation.round, began, clock.monotonic())
        done(error)

    return ended
