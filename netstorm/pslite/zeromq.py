"""The ZeroMQ van: one ROUTER that others connect to, and one DEALER for each connection opened here.

A connection never comes back: ZeroMQ's own reconnection is off, and each DEALER has a fresh random identity,
since with a re-used one the new connection's messages vanish. Its monitor reports when it ends.

One epoll watches all sockets through their file descriptors, so idle connections cost nothing. These
descriptors are edge-triggered: they are readable only when something new has happened, and a send may consume
that event. So a socket is read until it is empty, and a socket that was written to is checked before the
thread waits.

The user's memory is never given to libzmq: payloads are copied at hand-over (9 us for 256 KiB), unless they
are received frames, whose references libzmq counts.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from netstorm import clock
from netstorm.addresses import bracketed, host_port
from netstorm.errors import SettingsError, UsageError
from netstorm.observe.log import Counters, Drops
from netstorm.protocol.frames import MAX_HEADER_BYTES, Buffer
from netstorm.pslite.measurement.tcp_progress import Progress
from netstorm.pslite.security.admission import Admission
from netstorm.pslite.security.credentials import Credentials
from netstorm.pslite.system.addresses import source_towards
from netstorm.pslite.system.after_fork import abandon_after_fork, close_inherited
from netstorm.pslite.van.interface import Broken, Connection, VanEvent
from netstorm.pslite.zeromq import options as zmq_options
from netstorm.pslite.zeromq.authenticator import MESSAGE_OVERHEAD
from netstorm.pslite.zeromq.descriptors import DescriptorPoller
from netstorm.pslite.zeromq.guard import Guard
from netstorm.pslite.zeromq.identities import identity_of
from netstorm.pslite.zeromq.link import ZmqLink
from netstorm.pslite.zeromq.reader import ZmqReader
from netstorm.pslite.zeromq.tcp_info import is_acknowledged, progress_of, restart_bbr
from netstorm.pslite.zeromq.waiting_connections import raise_descriptor_limit

__all__ = ["ZmqVan"]

_MESSAGES_AT_ONCE: Final = 16
"""Most messages that one `poll` returns: about 1 ms of work, before acknowledgements and queues get their
turn."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)


class ZmqVan:
    """Moves frames over TCP. Implements `Van`; all methods but `wake` belong to one thread."""

    def __init__(
        self,
        *,
        max_message_bytes: int = 64 * 2**20,
        link_timeout_s: float = 10.0,
        counters: Counters | None = None,
        dscp: int = 0,
        unmarked: tuple[str, int] | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Make a van that does not listen yet.

        Args:
            max_message_bytes: largest frame that is accepted.
            link_timeout_s: sets ZeroMQ's own time-outs (`zmq_options`).
            counters: dropped messages are counted there.
            dscp: differentiated services code point of all packets; 0: none.
            unmarked: host and port to which packets are not marked.
            credentials: this process's keys; None: connections are plain.

        Raises:
            SettingsError: the allow list cannot be used.
        """
        admission = None if credentials is None else Admission(credentials)
        self._unmarked: Final = unmarked
        self._marking: Final = zmq_options.marking(dscp)
        self._link_timeout_s: Final = link_timeout_s
        self._kernel_silence_s: Final = 3.0 * zmq_options.keepalive_s(link_timeout_s)
        """The kernel asks after a third of that, if nothing else is sent: then an answer should have come."""
        overhead = 0 if credentials is None else MESSAGE_OVERHEAD
        largest = max(max_message_bytes, MAX_HEADER_BYTES) + overhead
        common = zmq_options.both(max_message_bytes=largest, link_timeout_s=link_timeout_s)
        self._accepting: Final = (*common, *zmq_options.accepting(), *self._marking)
        self._opening: Final = (*common, *zmq_options.opening(link_timeout_s=link_timeout_s))
        self._context: Final[zmq.Context[zmq.Socket[bytes]]] = zmq.Context()
        for option in zmq_options.context_options():
            self._context.set(getattr(zmq, option.name), option.value)
        counters = counters or Counters()
        raise_descriptor_limit()
        self._guard: Final = Guard(
            self._context,
            credentials,
            admission,
            counters,
            link_timeout_s=link_timeout_s,
            max_message_bytes=largest,
        )
        self._reader: Final = ZmqReader(Drops(counters), self._guard)
        self._reader.is_open = self._guard.is_open
        self._router: zmq.Socket[bytes] | None = None
        self._port = 0
        self._links: dict[Connection, ZmqLink] = {}
        self._not_up: dict[Connection, ZmqLink] = {}
        self._written: dict[zmq.Socket[bytes], Connection | None] = {}
        """Sockets that were written to since they were last checked; None stands for the ROUTER."""
        self._events: list[VanEvent] = []
        self._resolved: deque[tuple[ZmqLink, str, str]] = deque()
        """Finished name look-ups: the link, the address or "", the error or ""."""
        self._shut = False
        self._descriptors: Final = DescriptorPoller(self._connect_resolved)
        self._guard.watch(self._watch_fd)
        abandon_after_fork(self)

    # --------------------------------------------------------------------------------------------------- van

    def bind(self, host: str, port: int) -> int:
        """Listen; return the port (a free one if `port` is 0).

        Raises:
            SettingsError: the address is not this machine's, or the port is taken.
        """
        self._check_open()
        if self._router is not None:
            raise UsageError(f"this van already listens on port {self._port}")
        router = self._context.socket(zmq.ROUTER)
        for option in self._accepting:
            router.setsockopt(getattr(zmq, option.name), option.value)
        # On all addresses: of both families. libzmq takes IPv4's alone where there is no IPv6.
        router.setsockopt(zmq.IPV6, ":" in host or host in {"", "*"})
        self._guard.protect(router)
        try:
            router.bind(f"tcp://{bracketed(host or '*')}:{port or '*'}")
        except zmq.ZMQError as error:
            self._guard.unprotect()
            router.close(0)
            place = host_port(host or "*", port)
            raise SettingsError(
                f"cannot listen on {place}: {error.strerror}; NETSTORM_BIND must be an address of this "
                "machine (or *), and NETSTORM_PORT (the scheduler's: DMLC_PS_ROOT_PORT) a free port"
            ) from None
        self._router = router
        self._port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._watch_socket(router, None)
        self._guard.listening(self._port, self._watch_fd, self._accepted_ended)
        return self._port

    def open(self, connection: Connection, host: str, port: int) -> None:
        """Begin to connect under a fresh identity. Frames may be handed over at once."""
        self._check_open()
        if connection <= 0 or connection in self._links:
            raise UsageError(f"connection {connection} is not a new positive number")
        socket_options, limit_s = self._opening, self._link_timeout_s
        if (host, port) != self._unmarked:
            socket_options += self._marking
        try:
            link = ZmqLink(
                self._context,
                socket_options,
                connection,
                host=host,
                port=port,
                limit_s=limit_s,
                guard=self._guard,
            )
        except zmq.ZMQError as error:  # no descriptors left
            reason = (
                f"no socket to connect to {host_port(host, port)}: {error.strerror}; does `ulimit -n` allow "
                "enough?"
            )
            self._events.append(Broken(connection, reason))
            return
        self._links[connection] = self._not_up[connection] = link
        self._watch_socket(link.socket, connection)
        self._watch_fd(link.monitor, lambda: self._check_monitor(link))
        try:
            self._connect(link, str(ipaddress.ip_address(host)))
        except ValueError:
            threading.Thread(
                target=self._resolve, args=(link,), name=f"netstorm-dns-{host}", daemon=True
            ).start()

    def transmit(self, connection: Connection, header: bytes, payload: Buffer | None) -> bool:
        """Hand over a message without blocking; False: not taken, and the connection is or will be
        `Broken`.
        """
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
                to.send(identity_of(connection), _MORE)
            if payload is None:
                to.send(header, _NOBLOCK)
            else:
                to.send(header, _MORE)
                to.send(payload, _NOBLOCK, copy=not isinstance(payload, zmq.Frame))
        except zmq.ZMQError as error:
            # EAGAIN: the queue is full; EHOSTUNREACH: the ROUTER has no peer of that identity (any more)
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            if connection > 0:
                self._check_monitor(self._links[connection])  # a connection that has just ended says so, too
                if connection in self._links:
                    self._events.append(Broken(connection, "the connection's queue is full"))
            return False
        return True

    def close(self, connection: Connection) -> None:
        """Close a connection; unsent frames are dropped. Connections that others opened are theirs to close,
        within the link time-out.
        """
        if connection < 0:
            self._guard.waiting.left(connection, clock.monotonic())
        link = self._links.pop(connection, None)
        if link is not None:
            self._close_link(link, 0)

    def admit(self, connection: Connection) -> None:
        """See `Transmitter`."""
        self._guard.waiting.admitted(connection)

    def refuse(self, connection: Connection, reason: str) -> None:
        """See `Transmitter`."""
        self._guard.waiting.refuse(connection, "message", reason, clock.monotonic())

    def poll(self, timeout_s: float) -> list[VanEvent]:
        """Wait for events, at most `timeout_s`; return a bounded number of those that have happened."""
        self._check_written()
        if self._not_up:
            soonest = min(link.deadline for link in self._not_up.values())
            timeout_s = min(timeout_s, soonest - clock.monotonic())
        if self._reader or self._events:
            timeout_s = 0.0
        self._descriptors.poll(self._guard.waiting.until_check(timeout_s))
        if self._not_up:
            self._break_overdue()
        self._events += self._guard.expelled()
        self._reader.read(self._events, _MESSAGES_AT_ONCE)
        self._events += self._reader.take_ended()
        if self._guard.waiting and not self._reader:
            self._guard.waiting.check(clock.monotonic())
        events, self._events = self._events, []
        return events

    def progress(self, connection: Connection) -> Progress | None:
        """Return how much a connection that was opened here has delivered; None: unknown."""
        link = self._links.get(connection)
        return None if link is None or not link.up else progress_of(link.descriptor)

    def acknowledges(self, connection: Connection) -> bool:
        """Return whether the kernel at the other end of a connection acknowledges."""
        if connection < 0:
            descriptor = self._reader.descriptor(connection)
        else:
            link = self._links.get(connection)
            descriptor = -1 if link is None else link.descriptor
        return is_acknowledged(descriptor, self._kernel_silence_s)

    def restart_bbr(self, connection: Connection) -> bool:
        """Restart BBR on a connection that was opened here; return whether that worked."""
        link = self._links.get(connection)
        return link is not None and link.up and restart_bbr(link.descriptor)

    def wake(self) -> None:
        """Make a waiting `poll` return. May be called by any thread."""
        self._descriptors.wake()

    def shut(self, linger_s: float) -> None:
        """Close everything; frames handed over have up to `linger_s` to leave. A second call does nothing."""
        if self._shut:
            return
        self._shut = True
        self._descriptors.stop_waking()
        linger_ms = max(0, round(linger_s * 1000))
        for link in list(self._links.values()):
            self._close_link(link, linger_ms)
        self._links.clear()
        self._guard.unprotect()
        if self._router is not None:
            self._router.close(linger_ms)
        self._guard.close()
        self._descriptors.close()
        self._context.term()

    # ------------------------------------------------------------------------------------ other descriptors

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` from `poll` whenever `fd` is readable, until `unwatch`."""
        self._descriptors.watch(fd, callback)

    def unwatch(self, fd: int) -> None:
        """Stop watching; a descriptor that is not watched is ignored."""
        self._descriptors.unwatch(fd)

    def abandon(self) -> None:
        """In a forked child: give up what was inherited (`after_fork`)."""
        if self._shut:
            return  # the numbers of its descriptors may belong to other files by now
        self._shut = True
        close_inherited(self._port, {(link.address, link.port) for link in self._links.values()})
        self._descriptors.close()

    # --------------------------------------------------------------------------------------------- connecting

    def _connect(self, link: ZmqLink, address: str) -> None:
        link.connect(address)
        pending, link.pending = link.pending or [], None
        self._written[link.socket] = link.connection
        for header, payload in pending:
            self.transmit(link.connection, header, payload)

    def _resolve(self, link: ZmqLink) -> None:
        """Look up a name, on a thread of its own: without an answer from the DNS server that takes long."""
        try:
            found = socket.getaddrinfo(link.host, link.port, type=socket.SOCK_STREAM)
            found.sort(key=lambda entry: entry[0] != socket.AF_INET)
            addresses = [str(entry[4][0]) for entry in found]
            self._resolved.append((link, next(filter(source_towards, addresses), addresses[0]), ""))
        except (OSError, UnicodeError) as error:
            self._resolved.append((link, "", f"no address for the name {link.host!r}: {error}"))
        self.wake()

    def _connect_resolved(self) -> None:
        """Connect the links whose names have been looked up."""
        while self._resolved:
            link, address, problem = self._resolved.popleft()
            if link.connection not in self._links:
                continue
            if problem:
                self._break(link, problem)
            else:
                self._connect(link, address)

    def _check_monitor(self, link: ZmqLink) -> None:
        reason = link.read_monitor()
        if link.up:
            self._not_up.pop(link.connection, None)
        if reason is not None:
            while self._reader.read_one(link.socket, link.connection, self._events):
                pass  # what arrived before the end
            self._break(link, reason)

    def _break_overdue(self) -> None:
        now = clock.monotonic()
        for link in [link for link in self._not_up.values() if link.deadline <= now]:
            self._break(link, link.no_answer_text())

    def _break(self, link: ZmqLink, reason: str) -> None:
        self._events.append(Broken(link.connection, reason, refused=link.refused))
        self.close(link.connection)

    def _close_link(self, link: ZmqLink, linger_ms: int) -> None:
        self._not_up.pop(link.connection, None)
        self._written.pop(link.socket, None)
        self._reader.forget(link.socket)
        for watched in (link.socket, link.monitor):
            self.unwatch(int(watched.getsockopt(zmq.FD)))
        link.close(linger_ms)

    # ------------------------------------------------------------------------------------------------ reading

    def _watch_socket(self, watched: zmq.Socket[bytes], connection: Connection | None) -> None:
        self._watch_fd(watched, lambda: self._reader.mark(watched, connection))

    def _watch_fd(self, watched: zmq.Socket[bytes], callback: Callable[[], None]) -> None:
        self.watch(int(watched.getsockopt(zmq.FD)), callback)
        callback()  # events before this are not reported again

    def _accepted_ended(self, descriptor: int) -> None:
        if self._reader.ended(descriptor) and self._router is not None:
            self._reader.mark(self._router, None)  # what has arrived before the end comes first

    def _check_written(self) -> None:
        written, self._written = self._written, {}
        for touched, connection in written.items():
            if touched not in self._reader and int(touched.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._reader.mark(touched, connection)

    def _check_open(self) -> None:
        if self._shut:
            raise UsageError("this van has been shut")
