"""The thread of a process that owns its sockets, timers and protocol state; other threads call it here.

A call from another thread is put on a deque, and the I/O thread is woken if it sleeps. An exception on the
thread ends it and fails every outstanding and later call, so nothing hangs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

from netstorm import clock
from netstorm.errors import Closed, SettingsError
from netstorm.observe.log import Counters
from netstorm.observe.trace import Trace
from netstorm.protocol.frames import Peer, encode_body, seal
from netstorm.protocol.messages import Reserve
from netstorm.pslite.admission import Credentials, job_key_of, load_credentials
from netstorm.pslite.datagram.lanes import LaneOptions, Lanes
from netstorm.pslite.datagram.sockets import DatagramSockets
from netstorm.pslite.endpoint import Endpoint, LoggedEndpoint, Stack
from netstorm.pslite.guard import most_sessions
from netstorm.pslite.host_addresses import boot_number, is_own_address
from netstorm.pslite.machine import Machine
from netstorm.pslite.rates import TcpProgress
from netstorm.pslite.sending import HostTraffic
from netstorm.pslite.session import Limits
from netstorm.pslite.system import active_calls, keep_freed_memory, switch_intervals, yield_to_call
from netstorm.pslite.van import Van, progress_by_peer
from netstorm.pslite.zeromq import ZmqVan
from netstorm.settings import Settings

__all__ = ["Ask", "Driver", "IoThread", "VanAhead", "WatchingVan", "start_driver"]


_log = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Machine)

_LONGEST_SLEEP_S: Final = 1.0
"""An idle thread checks everything at this interval, in case a wake-up is lost."""

_CALLS_AT_ONCE: Final = 256
"""Most calls made before sockets and timers get a turn again."""


class WatchingVan(Van, Protocol):
    """A van that also watches other file descriptors."""

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` from `poll` whenever `fd` is readable."""

    def unwatch(self, fd: int) -> None:
        """Stop watching."""


class _Call(Protocol):
    """A function that waits to be called on the thread."""

    def run(self, now: float) -> None:
        """Call the function with the time."""

    def fail(self, error: Exception) -> None:
        """Report that the function will not be called."""


class _Told:
    """A call without a result. A future would cost the caller several locks."""

    __slots__ = ("_failed", "_function")

    def __init__(
        self, function: Callable[[float], None], failed: Callable[[Exception], None] | None = None
    ) -> None:
        """An exception goes to `failed`; without that, it ends the thread."""
        self._function = function
        self._failed = failed

    def run(self, now: float) -> None:
        try:
            self._function(now)
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)

    def fail(self, error: Exception) -> None:
        if self._failed is not None:
            self._failed(error)


class _CallWithFuture(Generic[T]):
    """A call whose result or exception goes to a future."""

    __slots__ = ("_function", "future")

    def __init__(self, function: Callable[[float], T]) -> None:
        self._function = function
        self.future: Future[T] = Future()

    def run(self, now: float) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self._function(now))
            except Exception as error:
                self.future.set_exception(error)

    def fail(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class IoThread(Generic[M]):
    """Runs a stack on a van.

    Attributes:
        error: the exception that has ended the thread; None while it runs, and after an orderly end.
    """

    def __init__(
        self,
        stack: Stack[M],
        van: WatchingVan,
        *,
        switch_interval_s: float | None = None,
        name: str = "netstorm-io",
    ) -> None:
        """Start the thread; it owns `stack` and `van` from now on, and closes `van` at its end.

        Args:
            stack: what to run.
            van: its van.
            switch_interval_s: the interpreter's thread switch interval while any such thread exists (the
                smallest, if they differ); None: unchanged.
            name: of the thread.
        """
        self.error: BaseException | None = None
        self._stack: Final = stack
        self._van: Final = van
        self._pid: Final = os.getpid()
        self._inbox: deque[_Call] = deque()
        self._at_end: dict[Callable[[], None], None] = {}
        self._asleep = False
        self._closing = False
        self._close_at = math.inf
        self._closed = False
        self._now = 0.0
        """The last `Stack.running_time`."""
        self._switch_interval: Final = switch_interval_s
        self._thread: Final = threading.Thread(target=self._run, name=name, daemon=True)
        switch_intervals.add(self, switch_interval_s)
        self._thread.start()

    # -------------------------------------------------------------------------------------- from any thread

    def call(self, function: Callable[[float], T]) -> Future[T]:
        """Call `function` on the thread, with the time, and return its result as a future. It must not block.

        Raises:
            Closed: the thread has ended, or belongs to the process that this one was forked from.
        """
        call = _CallWithFuture(function)
        self._put(call)
        return call.future

    def tell(self, function: Callable[[float], None], failed: Callable[[Exception], None]) -> None:
        """Call `function` on the thread, with the time; `failed` is called if that never happens, or if it
        raises.

        Raises:
            Closed: as for `call`.
        """
        self._put(_Told(function, failed))

    def post(self, function: Callable[[float], None]) -> None:
        """Call `function` on the thread, with the time; an exception in it ends the thread.

        Raises:
            Closed: as for `call`.
        """
        self._put(_Told(function))

    def wake(self) -> None:
        """Make the thread check everything; may be called by any thread."""
        if self._asleep and os.getpid() == self._pid:
            self._van.wake()

    def is_current(self) -> bool:
        """Return whether the caller runs on the thread."""
        return threading.get_ident() == self._thread.ident

    def at_end_of_turn(self, function: Callable[[], None]) -> None:
        """Call `function` once what has come is handled, and what follows has been sent; on another thread at
        once. Several times in one turn are one call. It must not raise.

        What wakes a thread belongs there: that thread wants the interpreter lock.
        """
        if self.is_current():
            self._at_end[function] = None
        else:
            function()

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` on the thread whenever `fd` is readable, until `unwatch`."""
        if self.is_current():
            self._van.watch(fd, callback)
        else:
            self.call(lambda _: self._van.watch(fd, callback)).result()

    def unwatch(self, fd: int) -> None:
        """Stop watching; afterwards `fd` may be closed. After the thread's end it does nothing."""
        if self.is_current():
            self._van.unwatch(fd)
            return
        with contextlib.suppress(Closed):
            self.call(lambda _: self._van.unwatch(fd)).result()

    def close(self, linger_s: float = 0.0) -> None:
        """End the thread and join it: accepted calls are finished, and messages have `linger_s` to reach the
        peers.

        A second call does nothing, nor does one in a forked child. Calls that have not been made by then fail
        with `Closed`.
        """
        if os.getpid() != self._pid:
            return
        if not self._closed:
            with contextlib.suppress(Closed):
                self._put(_Told(lambda now: self._begin_to_close(now + linger_s)))
        if not self.is_current():
            self._thread.join()

    # ------------------------------------------------------------------------------------------ on the thread

    def _put(self, call: _Call) -> None:
        if os.getpid() != self._pid:
            raise Closed(
                f"this belongs to process {self._pid}; process {os.getpid()}, forked from it, cannot use it"
            )
        if self._closed:
            raise self._closed_error()
        self._inbox.append(call)
        if self._asleep:
            self._van.wake()
        if self._thread_is_over():  # in the meantime, maybe without having seen this call
            self._fail_calls()

    def _thread_is_over(self) -> bool:
        return self._closed

    def _closed_error(self) -> Closed:
        if self.error is None:
            return Closed("the I/O thread has ended: the store is closed")
        error = Closed(f"the I/O thread has died: {self.error!r}")
        error.__cause__ = self.error
        return error

    def _begin_to_close(self, deadline: float) -> None:
        self._closing = True
        self._close_at = min(self._close_at, deadline)

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            _log.critical("the I/O thread has died", exc_info=True)
            self.error = error
        self._end()

    def _loop(self) -> None:
        stack, van, inbox = self._stack, self._van, self._inbox
        local, longest = clock.monotonic(), 0.0
        now = stack.running_time(local, local)
        while not (self._closing and not inbox and (now >= self._close_at or stack.endpoint.idle())):
            self._asleep = True  # before the inbox is checked: a thread that appends later wakes this one
            due = min(stack.next_tick(), self._close_at) - now
            timeout = 0.0 if inbox else min(max(due, 0.0), longest)
            wanted = local + timeout
            events = van.poll(timeout)
            self._asleep = False
            local = clock.monotonic()
            self._now = now = stack.running_time(local, wanted)
            longest = min(_LONGEST_SLEEP_S, switch_intervals.update(now))
            for event in events:
                if active_calls:
                    yield_to_call()
                stack.handle(event, now)
            if inbox:
                self._make_calls(now)
            stack.tick(now)
            if active_calls:
                yield_to_call()
            stack.flush(van, now)
            self._end_turn()

    def _end_turn(self) -> None:
        while self._at_end:
            functions, self._at_end = self._at_end, {}
            for function in functions:
                function()

    def _make_calls(self, now: float) -> None:
        for _ in range(min(len(self._inbox), _CALLS_AT_ONCE)):
            if active_calls:
                yield_to_call()
            self._inbox.popleft().run(now)

    def _end(self) -> None:
        """Fail what is left, and close the sockets."""
        self._closed = True
        try:
            self._stack.abort(self._closed_error(), self._now)
        except Exception:
            _log.exception("while failing what was outstanding")
        self._fail_calls()
        self._end_turn()
        linger_s = 0.0 if self.error is not None else max(0.0, self._close_at - self._now)
        try:
            self._van.shut(linger_s)
        except Exception:
            _log.exception("while closing the sockets")
        switch_intervals.remove(self)

    def _fail_calls(self) -> None:
        while True:
            try:
                call = self._inbox.popleft()
            except IndexError:
                return
            call.fail(self._closed_error())


# Runs a machine on real sockets: makes the van, endpoint, stack and I/O thread of a process.

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

    def progress(self) -> Iterator[tuple[Peer, TcpProgress]]:
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
    traffic: HostTraffic | None = None,
    lanes: LaneOptions | None = None,
    reserved: int = 0,
    van: ZmqVan | None = None,
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
        traffic: see `Endpoint`.
        lanes: how values that may be late go as datagrams; None: over sessions.
        reserved: most connections of others that may wait for sessions to come.
        van: one that was made ahead, with the same settings and counters (`VanAhead`); None: a new one.

    Raises:
        SettingsError: the address or port cannot be listened on, or there is no key for it.
    """
    credentials = load_credentials(settings, bind_host)
    keep_freed_memory()
    if van is None:
        van = _new_van(settings, counters, credentials, dscp)
    van.unmarked = unmarked
    try:
        bound = van.bind(bind_host, port)
        machine = make_machine(bound)
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
                sessions=most_sessions(),
                reserved=reserved,
            ),
            rng=random.Random(incarnation),
            tokens=random.SystemRandom(),
            acknowledges=van.acknowledges,
            answers_late=van.answers_late,
            progress=van.progress,
            counters=counters,
            trace=trace,
            traffic=traffic,
            memory=van.memory if settings.shared_memory else None,
            is_own=is_own_address,
        )
        if lanes is not None:
            sockets = DatagramSockets(bind_host, settings.datagram_port, lanes.channels, counters=counters)
            van.on_shut = sockets.close
            try:
                endpoint.lanes = Lanes(lanes, sockets, counters=counters, tokens=random.SystemRandom())
                sockets.listen(van.watch)
            except SettingsError as error:
                if lanes.explicit:
                    raise
                _log.info("no datagrams, all sums go over TCP: %s", error)
        thread = IoThread(
            Stack(machine, endpoint), van, switch_interval_s=settings.switch_interval_s, name=name
        )
    except BaseException:
        van.shut(0.0)
        raise
    return Driver(machine, endpoint, thread, bound, van)


def _new_van(settings: Settings, counters: Counters, credentials: Credentials | None, dscp: int) -> ZmqVan:
    return ZmqVan(
        max_message_bytes=settings.max_message_bytes,
        link_timeout_s=settings.link_timeout_s,
        counters=counters,
        dscp=dscp,
        credentials=credentials,
        prefers_bbr=settings.congestion == "auto",
        streams=settings.streams,
    )


class VanAhead:
    """The van of a node that joins a job later, with connections to processes that may have its scheduler.

    ZeroMQ's own thread makes them meanwhile: where round trips are long, that takes five of them, of TCP, of
    ZeroMQ's greeting and of its encryption.

    Attributes:
        van: belongs to one thread at a time.
        counters: of the node.
    """

    def __init__(self, settings: Settings) -> None:
        """Begin without connections; `settings`: those that the node is going to have.

        Raises:
            SettingsError: a file of keys cannot be used.
        """
        self.counters: Final = Counters()
        key = None if job_key_of(settings) is None else load_credentials(settings, "")
        self.van: Final = _new_van(settings, self.counters, key, settings.dscp)

    def connect(self, address: str, port: int) -> None:
        """Connect to a numeric address, and say that a session follows later, or none."""
        self.van.open_ahead(address, port, seal(_RESERVE, sequence=0, sent_at=0, payload_crc=None))

    def close(self) -> None:
        """Close the van, if no node has it. Twice does no harm."""
        self.van.shut(0.0)


_RESERVE: Final = encode_body(Reserve())
