"""The ZeroMQ van: one ROUTER that others connect to, one DEALER for each connection opened here.

A connection never comes back: ZeroMQ's own reconnecting is off, and each DEALER has a fresh random identity (with a
re-used one the new connection's messages vanish). The monitor of a DEALER tells when its connection ends.

Sockets are watched through their file descriptors by one epoll, so idle connections cost nothing. Those descriptors
are edge-triggered: they speak when something new is there, and a send may swallow what they said. So a socket is read
until it is empty, and one that was written to is looked at before anybody waits.

The user's memory is never given to libzmq: payloads are copied at hand-over (9 us for 256 KiB), unless they are frames
that were received, which libzmq counts references of.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import zmq

from netstorm import clock
from netstorm.errors import SettingsError, UsageError
from netstorm.observe.counters import Counters
from netstorm.observe.drops import Drops
from netstorm.protocol.frames import MAX_HEADER_BYTES, Buffer
from netstorm.pslite import zmq_options
from netstorm.pslite.van import Broken, Connection, Received, VanEvent

__all__ = ["ZmqVan"]

_MESSAGES_AT_ONCE: Final = 64
"""Messages that one `poll` returns: some 5 ms of work, after which queues and timers want their turn."""

_MOST_FRAMES: Final = 2
"""A header and a payload."""

_IDENTITY: Final = struct.Struct(">cQ")
"""A letter, since ZeroMQ keeps identities that begin with 0 for itself, and a random number."""

_LETTER: Final = b"N"

_CONNECTING_SLACK_S: Final = 1.0
"""How much longer than ZeroMQ's own time-outs we wait for it to report a failure: some it never does."""

_MONITORED: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MONITOR_EVENT: Final = struct.Struct("=HI")

_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)


class _Link:
    """A connection opened here."""

    __slots__ = ("connected", "connection", "deadline", "host", "monitor", "pending", "port", "socket", "up")

    def __init__(
        self, connection: Connection, host: str, port: int, socket: zmq.Socket[bytes], deadline: float
    ) -> None:
        self.connection = connection
        self.host = host
        self.port = port
        self.socket = socket
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(int(_MONITORED))
        self.deadline = deadline
        """When it counts as failed unless it stands."""
        self.pending: list[tuple[bytes, bytes | None]] | None = None
        """Frames handed over while the host's name is looked up."""
        self.connected = False
        self.up = False

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class ZmqVan:
    """Moves frames over TCP. Implements `pslite.van.Van`; all methods but `wake` belong to one thread."""

    def __init__(
        self,
        *,
        max_message_bytes: int = 64 * 2**20,
        link_timeout_s: float = 10.0,
        counters: Counters | None = None,
    ) -> None:
        """Make a van with nothing to listen to yet.

        Args:
            max_message_bytes: largest frame that is accepted.
            link_timeout_s: sets ZeroMQ's own time-outs (`zmq_options`).
            counters: dropped messages are counted there.
        """
        self._link_timeout_s: Final = link_timeout_s
        self._drops: Final = Drops(counters or Counters())
        self._common: Final = zmq_options.both(
            max_message_bytes=max(max_message_bytes, MAX_HEADER_BYTES), link_timeout_s=link_timeout_s
        )
        self._opening: Final = zmq_options.opening(link_timeout_s=link_timeout_s)
        self._context: Final[zmq.Context[zmq.Socket[bytes]]] = zmq.Context()
        for option in zmq_options.context_options():
            self._context.set(getattr(zmq, option.name), option.value)
        self._epoll: Final = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._wake_fd: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking: Final = threading.Lock()
        self.watch(self._wake_fd, self._woken)
        self._router: zmq.Socket[bytes] | None = None
        self._port = 0
        self._links: dict[Connection, _Link] = {}
        self._not_up: dict[Connection, _Link] = {}
        self._readable: dict[zmq.Socket[bytes], Connection | None] = {}
        """Sockets that may have more to read, in turn; None stands for the ROUTER."""
        self._written: dict[zmq.Socket[bytes], Connection | None] = {}
        """Sockets that were written to since they were last looked at."""
        self._events: list[VanEvent] = []
        self._resolved: list[tuple[Connection, str, str]] = []
        self._shut = False
        _vans.add(self)

    # -------------------------------------------------------------------------------------------------- the van

    def bind(self, host: str, port: int) -> int:
        """Listen; return the port (a free one if `port` is 0).

        Raises:
            SettingsError: the address is not this machine's, or the port is taken.
        """
        self._check_open()
        if self._router is not None:
            raise UsageError(f"this van listens on port {self._port} already")
        router = self._context.socket(zmq.ROUTER)
        for option in (*self._common, *zmq_options.accepting()):
            router.setsockopt(getattr(zmq, option.name), option.value)
        if ":" in host:
            router.setsockopt(zmq.IPV6, 1)
        try:
            router.bind(f"tcp://{_bracketed(host or '*')}:{port or '*'}")
        except zmq.ZMQError as error:
            router.close(0)
            raise SettingsError(
                f"cannot listen on {host or '*'}:{port}: {error.strerror}; NETSTORM_BIND must be an address of this machine "
                "(or *), and NETSTORM_PORT (for the scheduler DMLC_PS_ROOT_PORT) a port that is free (0: any)"
            ) from None
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._router = router
        self._port = int(endpoint.rsplit(":", 1)[1])
        self._watch_socket(router, None)
        return self._port

    def open(self, connection: Connection, host: str, port: int) -> None:
        """Begin to connect under a fresh identity. Frames may be handed over at once."""
        self._check_open()
        if connection <= 0 or connection in self._links:
            raise UsageError(f"connection {connection} is not a new positive number")
        dealer = self._context.socket(zmq.DEALER)
        for option in (*self._common, *self._opening):
            dealer.setsockopt(getattr(zmq, option.name), option.value)
        dealer.setsockopt(zmq.ROUTING_ID, _LETTER + os.urandom(8))
        deadline = clock.monotonic() + self._link_timeout_s + _CONNECTING_SLACK_S
        link = _Link(connection, host, port, dealer, deadline)
        self._links[connection] = self._not_up[connection] = link
        self._watch_socket(dealer, connection)
        self._watch_fd(link.monitor, lambda: self._look_at_monitor(link))
        try:
            self._connect(link, str(ipaddress.ip_address(host)))
        except ValueError:
            link.pending = []
            threading.Thread(
                target=self._resolve, args=(link,), name=f"netstorm-dns-{host}", daemon=True
            ).start()

    def transmit(self, connection: Connection, header: bytes, payload: Buffer | None) -> bool:
        """Hand over a message without blocking; False: not taken, and the connection is or will be `Broken`."""
        if connection > 0:
            link = self._links.get(connection)
            if link is None:
                return False
            if link.pending is not None:
                link.pending.append((header, None if payload is None else bytes(payload)))
                return True
            to = link.socket
            self._written[to] = connection
        elif self._router is not None:
            to = self._router
            self._written[to] = None
        else:
            return False
        try:
            if connection < 0:
                to.send(_IDENTITY.pack(_LETTER, -connection), _MORE)
            if payload is None:
                to.send(header, _NOBLOCK)
            else:
                to.send(header, _MORE)
                to.send(payload, _NOBLOCK, copy=not isinstance(payload, zmq.Frame))
        except zmq.ZMQError as error:
            # EAGAIN: the queue is full; EHOSTUNREACH: the ROUTER knows nobody of that identity (any more)
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            if connection > 0:
                self._events.append(Broken(connection, "it takes no more messages: its queue is full"))
            return False
        return True

    def close(self, connection: Connection) -> None:
        """Forget a connection; unsent frames are dropped. One that others opened is theirs to close."""
        link = self._links.pop(connection, None)
        if link is not None:
            self._not_up.pop(connection, None)
            self._close_link(link, 0)

    def poll(self, timeout_s: float) -> list[VanEvent]:
        """Wait for something to happen, at most `timeout_s`; return everything that has (bounded)."""
        written, self._written = self._written, {}
        for touched, connection in written.items():
            if touched not in self._readable and int(touched.get(zmq.EVENTS)) & zmq.POLLIN:
                self._readable[touched] = connection
        if self._not_up:
            soonest = min(link.deadline for link in self._not_up.values())
            timeout_s = min(timeout_s, soonest - clock.monotonic())
        if self._readable or self._events:
            timeout_s = 0.0
        for fd, _ in self._epoll.poll(max(0.0, timeout_s)):
            handler = self._handlers.get(fd)
            if handler is not None:  # else a handler before it has closed it
                handler()
        if self._not_up:
            self._give_up_late_ones()
        self._read()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """Make a waiting `poll` return. Any thread."""
        with self._waking:  # or the number of a descriptor closed meanwhile might be somebody else's by now
            if not self._shut:
                os.eventfd_write(self._wake_fd, 1)

    def shut(self, linger_s: float) -> None:
        """Close everything, giving frames handed over up to `linger_s` to leave. Twice does no harm."""
        with self._waking:
            if self._shut:
                return
            self._shut = True
        linger_ms = max(0, round(linger_s * 1000))
        for link in self._links.values():
            self._close_link(link, linger_ms)
        if self._router is not None:
            self._router.close(linger_ms)
        self._links.clear()
        self._not_up.clear()
        self._readable.clear()
        self._written.clear()
        self._handlers.clear()
        self._epoll.close()
        os.close(self._wake_fd)
        self._context.term()

    # -------------------------------------------------------------------------------------------- other descriptors

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` from `poll` whenever `fd` is readable, until `unwatch`."""
        self._handlers[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching; a descriptor that is not watched does no harm."""
        if self._handlers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # closed already
                self._epoll.unregister(fd)

    # --------------------------------------------------------------------------------------------------- connecting

    def _connect(self, link: _Link, address: str) -> None:
        if ":" in address:
            link.socket.setsockopt(zmq.IPV6, 1)
        link.socket.connect(f"tcp://{_bracketed(address)}:{link.port}")
        self._written[link.socket] = link.connection

    def _resolve(self, link: _Link) -> None:
        """Look a name up, on a thread of its own: it may take as long as a DNS server is dead."""
        try:
            found = socket.getaddrinfo(link.host, link.port, type=socket.SOCK_STREAM)
            found.sort(key=lambda entry: entry[0] != socket.AF_INET)
            address, problem = str(found[0][4][0]), ""
        except (OSError, UnicodeError) as error:
            address, problem = "", f"no address for the name {link.host!r}: {error}"
        self._resolved.append((link.connection, address, problem))
        self.wake()

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while self._resolved:
            connection, address, problem = self._resolved.pop(0)
            link = self._links.get(connection)
            if link is None:
                continue
            if problem:
                self._break(link, problem)
                continue
            pending, link.pending = link.pending or [], None
            self._connect(link, address)
            for header, payload in pending:
                self.transmit(connection, header, payload)

    def _look_at_monitor(self, link: _Link) -> None:
        while link.connection in self._links:
            try:
                event, _ = _MONITOR_EVENT.unpack(link.monitor.recv_multipart(_NOBLOCK)[0])
            except zmq.Again:
                return
            if event == zmq.EVENT_CONNECTED:
                link.connected = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                link.up = True
                self._not_up.pop(link.connection, None)
            elif event == zmq.EVENT_CLOSED and link.connected:
                pass  # the socket that connected has handed over to the one that talks
            else:
                self._ended(link, event)

    def _ended(self, link: _Link, event: int) -> None:
        # what came in before is still there to be read
        while self._read_from(link.socket, link.connection):
            pass
        if link.up:
            reason = f"the connection to {link.address} was lost"
        elif event == zmq.EVENT_CLOSED and clock.monotonic() < link.deadline - self._link_timeout_s * 0.6:
            reason = f"{link.address} refused the connection, or cannot be reached"
        elif event == zmq.EVENT_CLOSED:
            reason = f"no answer from {link.address}"
        else:
            reason = f"what listens at {link.address} does not speak ZeroMQ's protocol, or hung up"
        self._break(link, reason)

    def _give_up_late_ones(self) -> None:
        now = clock.monotonic()
        for link in [link for link in self._not_up.values() if link.deadline <= now]:
            self._break(link, f"no answer from {link.address}")

    def _break(self, link: _Link, reason: str) -> None:
        self._events.append(Broken(link.connection, reason))
        self.close(link.connection)

    def _close_link(self, link: _Link, linger_ms: int) -> None:
        for watched in (link.socket, link.monitor):
            self._readable.pop(watched, None)
            self._written.pop(watched, None)
            self.unwatch(int(watched.get(zmq.FD)))
        link.socket.disable_monitor()
        link.monitor.close(0)
        link.socket.close(linger_ms)

    # ------------------------------------------------------------------------------------------------------ reading

    def _watch_socket(self, watched: zmq.Socket[bytes], connection: Connection | None) -> None:
        def readable() -> None:
            self._readable[watched] = connection

        self._watch_fd(watched, readable)

    def _watch_fd(self, watched: zmq.Socket[bytes], callback: Callable[[], None]) -> None:
        self.watch(int(watched.get(zmq.FD)), callback)
        callback()  # what happened before nobody will say again

    def _read(self) -> None:
        """Read from everybody in turn, up to the bound."""
        room = _MESSAGES_AT_ONCE
        while self._readable and room > 0:
            readable, connection = next(iter(self._readable.items()))
            del self._readable[readable]
            share = max(1, room // (len(self._readable) + 1))
            for _ in range(share):
                room -= 1
                if not self._read_from(readable, connection):
                    break
            else:
                self._readable[readable] = connection

    def _read_from(self, readable: zmq.Socket[bytes], connection: Connection | None) -> bool:
        """Read one message; False if there is none."""
        recv: Any = readable.recv
        try:
            if connection is None:
                identity = recv(_NOBLOCK)
                header = recv(_NOBLOCK, False)
            else:
                identity = b""
                header = recv(_NOBLOCK, False)
        except zmq.Again:
            return False
        if not header.more:
            frames: tuple[Buffer, ...] = (header.bytes,)
        else:
            payload = recv(_NOBLOCK, False)
            if payload.more:
                self._skip_rest(readable, header)
                return True
            frames = (header.bytes, payload)
        if connection is None:
            if len(identity) != _IDENTITY.size:
                self._drop("identity", header, "its identity is none that a NetStorm process chooses")
                return True
            letter, number = _IDENTITY.unpack(identity)
            if letter != _LETTER or number == 0:
                self._drop("identity", header, "its identity is none that a NetStorm process chooses")
                return True
            connection = Connection(-number)
        self._events.append(Received(connection, frames))
        return True

    def _skip_rest(self, readable: zmq.Socket[bytes], header: zmq.Frame) -> None:
        more = True
        while more:
            more = readable.recv(_NOBLOCK, copy=False).more
        self._drop("frames", header, f"it has more than {_MOST_FRAMES} frames")

    def _drop(self, reason: str, header: zmq.Frame, detail: str) -> None:
        try:
            sender = str(header.get("Peer-Address"))
        except zmq.ZMQError:
            sender = "an unknown address"
        self._drops.note(reason, sender, detail, clock.monotonic())

    # ------------------------------------------------------------------------------------------------------- fork

    def abandon(self) -> None:
        """In a forked child: give up what was inherited, without a word to anybody who is connected.

        A child that kept the connections open would keep them open for a parent that has died.
        """
        self._shut = True
        remotes = {(link.host, link.port) for link in self._links.values()}
        for fd in _inherited_descriptors():
            _close_if_ours(fd, self._port, remotes)
        self._epoll.close()
        os.close(self._wake_fd)

    def _check_open(self) -> None:
        if self._shut:
            raise UsageError("this van has been shut")


_vans: Final[weakref.WeakSet[ZmqVan]] = weakref.WeakSet()


def _abandon_all() -> None:
    for van in list(_vans):
        van.abandon()
    _vans.clear()


os.register_at_fork(after_in_child=_abandon_all)


def _inherited_descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _close_if_ours(fd: int, port: int, remotes: set[tuple[str, int]]) -> None:
    """Close a TCP socket that listens on our port, was accepted there, or was connected by us."""
    try:
        inherited = socket.socket(fileno=fd)
    except OSError:
        return  # no socket
    try:
        ours = False
        if inherited.family in (socket.AF_INET, socket.AF_INET6) and inherited.type == socket.SOCK_STREAM:
            ours = port != 0 and inherited.getsockname()[1] == port
            with contextlib.suppress(OSError):  # not connected
                ours = ours or inherited.getpeername()[:2] in remotes
    finally:
        inherited.detach()
    if ours:
        os.close(fd)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
