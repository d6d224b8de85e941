"""Runs a machine on real sockets: makes the van, endpoint, stack and I/O thread of a process."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from netstorm.observe.log import Counters
from netstorm.observe.trace import Trace
from netstorm.protocol.frames import Peer
from netstorm.pslite.endpoint.endpoint import Endpoint
from netstorm.pslite.endpoint.logged_endpoint import LoggedEndpoint
from netstorm.pslite.endpoint.stack import Stack
from netstorm.pslite.machine import Machine
from netstorm.pslite.measurement.tcp_progress import Progress
from netstorm.pslite.process.io_thread import IoThread
from netstorm.pslite.security.credentials import load_credentials
from netstorm.pslite.session.limits import Limits
from netstorm.pslite.system.allocator import keep_freed_memory
from netstorm.pslite.system.boot import boot_number
from netstorm.pslite.van.interface import progress_by_peer
from netstorm.pslite.zeromq.van import ZmqVan
from netstorm.pslite.zeromq.waiting_connections import most_sessions
from netstorm.settings import Settings

__all__ = ["Ask", "Driver", "start_driver"]

M = TypeVar("M", bound=Machine)

Ask: TypeAlias = Callable[[Callable[[Exception | None], None], float], None]
"""A method of a machine: calls its first argument when done, with an error or None; the second is the
time."""


@dataclass(frozen=True, slots=True)
class Driver(Generic[M]):
    """A running machine, and what belongs to it."""

    machine: M
    endpoint: Endpoint
    thread: IoThread[M]
    port: int
    """Port that others connect to."""
    van: ZmqVan
    """Owned by the thread."""

    def progress(self) -> Iterator[tuple[Peer, Progress]]:
        """Yield how much the connections opened here have delivered. On the I/O thread only."""
        return progress_by_peer(self.van, self.endpoint.connections())

    def restart_bbr(self, peer: Peer) -> bool:
        """Restart BBR on the connection to a peer; return whether that worked. On the I/O thread only."""
        connection = self.endpoint.connections().get(peer)
        return connection is not None and self.van.restart_bbr(connection)

    def ask(self, method: Ask) -> Future[None]:
        """Call a method of the machine on the I/O thread; the future ends when the machine calls back.

        Raises:
            Closed: the thread has ended, or belongs to the process that this one was forked from.
        """
        future: Future[None] = Future()

        def done(error: Exception | None) -> None:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self.thread.tell(lambda now: method(done, now), done)
        return future


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
    """Listen, and start a machine.

    Args:
        make_machine: makes it, given the port that others connect to.
        settings: of this process.
        counters: what was dropped or refused is counted there.
        bind_host: address to listen on.
        port: 0: any that is free.
        rank: for every Hello; -1 for the scheduler, and for a node until it has one.
        ordered: see `Endpoint`.
        stamp: returns the cluster clock, in ns.
        name: of the thread.
        trace: records all deliveries.
        dscp: differentiated services code point of packets; 0: none.
        unmarked: host and port to which packets are not marked.

    Raises:
        SettingsError: the address or port cannot be listened on, or there is no key for it.
    """
    credentials = load_credentials(settings, bind_host)
    keep_freed_memory()
    van = ZmqVan(
        max_message_bytes=settings.max_message_bytes,
        link_timeout_s=settings.link_timeout_s,
        counters=counters,
        dscp=dscp,
        unmarked=unmarked,
        credentials=credentials,
    )
    try:
        bound = van.bind(bind_host, port)
        machine = make_machine(bound)
        endpoint = _make_endpoint(
            machine, settings, counters=counters, rank=rank, ordered=ordered, stamp=stamp, trace=trace
        )
        endpoint.acknowledges = van.acknowledges
        thread = IoThread(
            Stack(machine, endpoint), van, switch_interval_s=settings.switch_interval_s, name=name
        )
    except BaseException:
        van.shut(0.0)
        raise
    return Driver(machine, endpoint, thread, bound, van)


def _make_endpoint(
    machine: Machine,
    settings: Settings,
    *,
    counters: Counters,
    rank: int,
    ordered: Callable[[Peer], bool],
    stamp: Callable[[], int],
    trace: Trace | None,
) -> Endpoint:
    incarnation = secrets.randbits(63)
    endpoint = (LoggedEndpoint if settings.verbose else Endpoint)(
        machine,
        job=settings.job,
        incarnation=incarnation,
        rank=rank,
        boot=boot_number() if settings.checksums == "auto" else 0,
        ordered=ordered,
        payloads=lambda peer: peer >= 0 and not ordered(peer),  # schedulers are sent none, and send none
        stamp=stamp,
        limits=Limits(
            link_timeout_s=settings.link_timeout_s,
            busy_timeout_s=settings.wait_timeout_s,
            window_bytes=settings.window_bytes,
            shallow_windows=bool(settings.loss_bound or settings.dgt),
            sessions=min(Limits().sessions, most_sessions()),
        ),
        rng=random.Random(incarnation),
        counters=counters,
        trace=trace,
    )
    endpoint.draw_tokens_from(random.SystemRandom())
    return endpoint
