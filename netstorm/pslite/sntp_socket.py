"""The cluster clock over UDP: sockets of a server and of a client, for a thread that watches descriptors.

Arrival times are the kernel's (SO_TIMESTAMPNS). Otherwise, while a busy training loop keeps the thread from
running, the measured delay would be that of the interpreter and not that of the network.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Final, Protocol

from netstorm import clock
from netstorm.addresses import host_port
from netstorm.errors import FrameError, SettingsError
from netstorm.observe.log import Counters
from netstorm.pslite import sntp
from netstorm.pslite.admission import job_key_of
from netstorm.pslite.host_addresses import udp_address, udp_socket
from netstorm.pslite.sntp import Address, ClockSource, ClockSync, PacketKey, Unauthenticated
from netstorm.pslite.system import TimerFd
from netstorm.settings import Settings

__all__ = ["SntpClient", "SntpServer", "Watcher", "packet_key"]

_SO_TIMESTAMPNS: Final = 35
"""Linux's number on all architectures but PA-RISC and SPARC; Python has no name for it."""

_TIMESPEC: Final = struct.Struct("@ll")
_DATAGRAMS_AT_ONCE: Final = 64
"""Most datagrams that are read before the thread's other sockets get a turn."""

_LONGEST_WAIT_S: Final = 10.0
"""A datagram that seems to have waited longer shows that the wall clock was set."""


class Watcher(Protocol):
    """A thread that watches descriptors, such as `IoThread`."""

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `fd` is readable."""

    def unwatch(self, fd: int) -> None:
        """Stop watching."""


def packet_key(settings: Settings) -> PacketKey | None:
    """Return the key of this process's packets; None: the job has no key.

    Raises:
        SettingsError: the file of the job's key cannot be used.
    """
    key = job_key_of(settings)
    return None if key is None else PacketKey(key.derive("sntp"))


class SntpServer:
    """Answers requests for the cluster's time."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        now: Callable[[], float] = clock.wall,
        quality: Callable[[], tuple[int, float]] = lambda: (0, 0.0),
        counters: Counters | None = None,
        key: PacketKey | None = None,
    ) -> None:
        """Listen on UDP.

        Args:
            host: address to listen on; "" or "*" for all of them.
            port: 0: any that is free.
            now: the cluster clock, in seconds since the Unix epoch.
            quality: of `now`: hops from the cluster clock, and its largest error in s.
            counters: requests and errors are counted there.
            key: only its holders get an answer; None: everybody does.

        Raises:
            SettingsError: the address or port cannot be listened on.
        """
        self.counters: Final = counters or Counters()
        self._now: Final = now
        self._quality: Final = quality
        self._key: Final = key
        self._socket: Final = _timestamping(udp_socket(host))
        try:
            self._socket.bind(udp_address(host, port, self._socket.family))
        except OSError as error:
            self._socket.close()
            place = host_port(host or "*", port)
            raise SettingsError(
                f"cannot tell the time at UDP {place}: {os.strerror(error.errno or 0)}; "
                "NETSTORM_SNTP_PORT must be a UDP port that is free (0: the number of DMLC_PS_ROOT_PORT), "
                "and NETSTORM_BIND an address of this machine (or *)"
            ) from None
        self.port: Final = int(self._socket.getsockname()[1])

    def start(self, watcher: Watcher) -> None:
        """Begin to answer."""
        watcher.watch(self._socket.fileno(), self._readable)

    def stop(self, watcher: Watcher) -> None:
        """Stop answering, and close the socket. A second call does nothing."""
        if self._socket.fileno() >= 0:
            watcher.unwatch(self._socket.fileno())
            self._socket.close()

    def _readable(self) -> None:
        """Answer all requests. Nothing that a client sends raises an exception."""
        for data, address, waited in _datagrams(self._socket):
            try:
                now, (hops, error) = self._now(), self._quality()
                asked = data if self._key is None else self._key.open(data)
                reply = sntp.answer(asked, received=now - waited, transmitted=now, hops=hops, error=error)
                sealed = reply if self._key is None else self._key.seal(reply)
            except FrameError as problem:
                _count(self.counters, problem)
                continue
            with contextlib.suppress(OSError):  # full buffer or unreachable client: it asks again
                self._socket.sendto(sealed, address)
            self.counters.add("sntp_answers")


class SntpClient:
    """Follows the cluster clock on the thread of a `Watcher`; `now_ns` may be called by any thread."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        scheduler: Callable[[], Address | None] = lambda: None,
        parent: Callable[[], Address | None] = lambda: None,
        counters: Counters | None = None,
        key: PacketKey | None = None,
    ) -> None:
        """Prepare to ask; nothing is sent yet.

        Args:
            host: address of the scheduler at first.
            port: its UDP port.
            scheduler: returns the present scheduler's server; None: it is that one.
            parent: returns the server to ask instead, as long as it answers; None: no other.
            counters: requests and errors are counted there.
            key: only answers of its holders are believed; None: all are.
        """
        self.counters: Final = counters or Counters()
        self.sync: Final = ClockSync(seed=secrets.randbits(64))
        self._source: Final = ClockSource((host, port))
        self._scheduler: Final = scheduler
        self._parent: Final = parent
        self._key: Final = key
        self._asked: Address | None = None
        self._socket = _timestamping(udp_socket())
        self._watcher: Watcher | None = None
        self._wall_offset_ns: Final = clock.wall_ns() - clock.monotonic_ns()
        with contextlib.suppress(OSError):  # no route yet: later polls try again
            self._connect((host, port))
        self._timer: Final = TimerFd()
        self._timer.arm(0.0)

    def start(self, watcher: Watcher) -> None:
        """Begin to ask."""
        self._watcher = watcher
        watcher.watch(self._socket.fileno(), self._readable)
        watcher.watch(self._timer.fileno(), self._due)

    def stop(self, watcher: Watcher) -> None:
        """Stop asking, and close everything. A second call does nothing."""
        if self._socket.fileno() >= 0:
            watcher.unwatch(self._timer.fileno())
            watcher.unwatch(self._socket.fileno())
            self._timer.close()
            self._socket.close()

    def _due(self) -> None:
        if self._timer.take() and clock.monotonic() >= self.sync.next_poll():
            self._ask()
        self._timer.arm(self.sync.next_poll() - clock.monotonic())

    def _ask(self) -> None:
        self.counters.add("sntp_requests")
        now = clock.monotonic()
        self._source.scheduler = self._scheduler() or self._source.scheduler
        self._source.set_parent(self._parent())
        server = self._source.next_server(now)
        request = self.sync.poll(now)
        if self._key is not None:
            request = self._key.seal(request)
        try:
            self._connect(server)
            self._socket.send(request)
        except (OSError, UnicodeError, OverflowError, TypeError):  # not there (yet), or no address at all
            # An ICMP error of the last packet shows here, too.
            self.counters.add("sntp_unreachable")

    def _connect(self, server: Address) -> None:
        """Send to this address; from now on the kernel drops datagrams of others."""
        if server == self._asked:
            return
        address = udp_address(*server, self._socket.family)
        if self._asked is not None:  # a socket keeps the source address of its first server
            fresh = _timestamping(udp_socket())
            if self._watcher is not None:
                self._watcher.unwatch(self._socket.fileno())
                self._watcher.watch(fresh.fileno(), self._readable)
            self._socket.close()
            self._socket, self._asked = fresh, None
        self._socket.connect(address)
        self._asked = server

    def _readable(self) -> None:
        """Process all answers. Nothing that a server sends raises an exception."""
        for data, _, waited in _datagrams(self._socket):
            try:
                answer = data if self._key is None else self._key.open(data)
                self.sync.receive(answer, clock.monotonic() - waited)
            except FrameError as problem:
                _count(self.counters, problem)
                continue
            self._source.answered()
            self.counters.add("sntp_exchanges")
        self._timer.arm(self.sync.next_poll() - clock.monotonic())  # sooner, if a clock has been set

    def now_ns(self) -> int:
        """Return the cluster clock in ns; until it is known, this host's own time."""
        local = clock.monotonic_ns()
        if not self.sync.synchronised:
            return local + self._wall_offset_ns
        return local + round(self.sync.offset(local / 1e9) * 1e9)

    def quality(self) -> tuple[int, float]:
        """Return how many exchanges lie between this clock and the scheduler's, and its largest error in
        s.
        """
        return self.sync.hops, self.sync.error_bound(clock.monotonic())


def _count(counters: Counters, problem: FrameError) -> None:
    counters.add(f"sntp_{problem.reason}" if isinstance(problem, Unauthenticated) else "sntp_garbage")


def _timestamping(made: socket.socket) -> socket.socket:
    made.setblocking(False)
    with contextlib.suppress(OSError):  # elsewhere the time of reading is used
        made.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return made


def _datagrams(source: socket.socket) -> list[tuple[bytes, tuple[object, ...], float]]:
    """Read all datagrams: data, sender, and for how many seconds each has waited in the kernel."""
    datagrams = []
    for _ in range(_DATAGRAMS_AT_ONCE):
        try:
            data, ancillary, _, address = source.recvmsg(512, socket.CMSG_SPACE(_TIMESPEC.size))
        except BlockingIOError:
            break
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:  # nobody listened at the last request
                continue
            break
        waited = 0.0
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(content) >= _TIMESPEC.size:
                seconds, nanoseconds = _TIMESPEC.unpack_from(content)
                waited = (clock.wall_ns() - seconds * 1_000_000_000 - nanoseconds) / 1e9
        if not 0.0 <= waited <= _LONGEST_WAIT_S:
            waited = 0.0
        datagrams.append((data, address, waited))
    return datagrams
