"""Puts a machine to work on real sockets: van, endpoint, stack and I/O thread of one process."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from netstorm.observe.counters import Counters
from netstorm.observe.trace import Trace
from netstorm.protocol.ids import Peer
from netstorm.pslite.endpoint.endpoint import Endpoint
from netstorm.pslite.endpoint.logged_endpoint import LoggedEndpoint
from netstorm.pslite.endpoint.stack import Stack
from netstorm.pslite.machine import Machine
from netstorm.pslite.measurement.tcp_progress import Progress
from netstorm.pslite.process.io_thread import IoThread
from netstorm.pslite.session.limits import Limits
from netstorm.pslite.system.allocator import keep_freed_memory
from netstorm.pslite.van.interface import progress_by_peer
from netstorm.pslite.zeromq.van import ZmqVan
from netstorm.settings import Settings

__all__ = ["Ask", "Driver", "start_driver"]

M = TypeVar("M", bound=Machine)

Ask: TypeAlias = Callable[[Callable[[Exception | None], None], float], None]
"""A method of a machine that calls its first argument when done; the second is the time."""


@dataclass(frozen=True, slots=True)
class Driver(Generic[M]):
    """A machine at work, and what belongs to it."""

    machine: M
    endpoint: Endpoint
    thread: IoThread[M]
    port: int
    """Where others can connect."""
    van: ZmqVan
    """The thread's own."""

    def progress(self) -> Iterator[tuple[Peer, Progress]]:
        """Say how far the connections that were opened here have come. On the I/O thread only."""
        return progress_by_peer(self.van, self.endpoint.connections())

    def restart_bbr(self, peer: Peer) -> bool:
        """Have BBR find out anew what the link to a peer carries; return whether it does. On the I/O thread
        only.
        """
        connection = self.endpoint.connections().get(peer)
        return connection is not None and self.van.restart_bbr(connection)

    def ask(self, method: Ask) -> Future[None]:
        """Call a method of the machine on the I/O thread; the future ends when the machine says so.

        Raises:
            Closed: the thread has ended, or belongs to the process that this one was forked from.
        """
        future: Future[None] = Future()

        def done(error: Exception | None) -> None:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self.tell(lambda now: method(done, now), done)
        return future

    def tell(self, function: Callable[[float], None], refused: Callable[[Exception], None]) -> None:
        """Call a function on the I/O thread; `refused` is called if that never happens, or if it raises.

        Raises:
            Closed: as for `ask`.
        """

        def look(call: Future[None]) -> None:
            error = call.exception()
            if isinstance(error, Exception):
                refused(error)

        self.thread.call(function).add_done_callback(look)


def start_driver(
    make_machine: Callable[[int], M],
    *,
    settings: Settings,
    counters: Counters,
    bind_host: str,
    port: int,
    rank: int,
    ordered: Callable[[Peer], bool],
    stamp: Callable[[], int],
    name: str,
    trace: Trace | None = None,
    dscp: int = 0,
    unmarked: tuple[str, int] | None = None,
) -> Driver[M]:
    """Listen, and let a machine work.

    Args:
        make_machine: makes it, given the port that others can connect to.
        bind_host: address to listen on.
        port: 0: any that is free.
        rank: as every Hello says it: -1 for the scheduler, and for a node until it has one.
        ordered: see `Endpoint`.
        stamp: the cluster clock, in ns.
        name: of the thread.
        trace: takes note of all that is delivered.
        dscp: mark of packets; 0: none.
        unmarked: host and port to which connections have no mark.

    Raises:
        SettingsError: the address or port cannot be listened on.
    """
    keep_freed_memory()
    incarnation = secrets.randbits(63)
    van = ZmqVan(
        max_message_bytes=settings.max_message_bytes,
        link_timeout_s=settings.link_timeout_s,
        counters=counters,
        dscp=dscp,
        unmarked=unmarked,
    )
    try:
        bound = van.bind(bind_host, port)
        machine = make_machine(bound)
        endpoint = (LoggedEndpoint if settings.verbose else Endpoint)(
            machine,
            job=settings.job,
            incarnation=incarnation,
            rank=rank,
            ordered=ordered,
            stamp=stamp,
            limits=Limits(link_timeout_s=settings.link_timeout_s, window_bytes=settings.window_bytes),
            rng=random.Random(incarnation),
            counters=counters,
            trace=trace,
        )
        stack = Stack(machine, endpoint)
        thread = IoThread(stack, van, switch_interval_s=settings.switch_interval_s, name=name)
    except BaseException:
        van.shut(0.0)
        raise
    return Driver(machine, endpoint, thread, bound, van)
