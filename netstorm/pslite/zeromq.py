"""The ZeroMQ van: one ROUTER that others connect to, and one DEALER for each connection opened here.

Where losses slow a connection down it gets more DEALERs: a stream each, with a window of its own in TCP. To
the ROUTER their identities differ in the first byte alone, so what comes over them is of one connection.

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

import contextlib
import ctypes
import ipaddress
import math
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import zmq

from netstorm import clock
from netstorm.addresses import bracketed, host_port
from netstorm.errors import SettingsError, UsageError
from netstorm.observe.log import Counters, Drops
from netstorm.protocol.frames import MAX_HEADER_BYTES, Buffer, is_constant
from netstorm.pslite.admission import Admission, Credentials
from netstorm.pslite.guard import (
    MESSAGE_OVERHEAD,
    Guard,
    connection_of,
    identity_of,
    is_identity,
    is_stream,
    main_of,
    of_stream,
    raise_descriptor_limit,
)
from netstorm.pslite.host_addresses import is_own_address, source_towards
from netstorm.pslite.host_pipes import HostPipes, PipeMessage
from netstorm.pslite.proofs import Mismatch, reason_of_opener
from netstorm.pslite.rates import TcpProgress
from netstorm.pslite.shared_memory import SharedPayloads
from netstorm.pslite.system import abandon_after_fork, close_inherited
from netstorm.pslite.tcp_info import (
    Backlog,
    answers_late,
    descriptor_of,
    is_acknowledged,
    loses,
    of_streams,
    progress_of,
    restart_bbr,
    shut_down,
    use_bbr,
)
from netstorm.pslite.van import MOST_LINK_TIMEOUTS, Broken, Connection, Received, VanEvent, Widened

__all__ = ["SocketOption", "ZmqVan", "accepting", "both", "context_options", "opening"]


_MESSAGES_AT_ONCE: Final = 16
"""Most messages that one `poll` returns: about 1 ms of work, before acknowledgements and queues get their
turn."""

_FULL: Final = "the connection's queue is full: its peer has stopped reading"

_ALL_READ_TURNS: Final = 64
"""After so many each connection's first message has been read, though some send without end: ZeroMQ takes one
of each in turn."""

_LOOK_BYTES: Final = 2**20
"""So much a connection carries between two looks for losses."""

_POLLIN: Final = int(zmq.POLLIN)
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)


class ZmqVan:
    """Moves frames over TCP. Implements `Van`; all methods but `wake` belong to one thread.

    Attributes:
        accepted: connections that others have opened.
        unmarked: host and port to which packets are not marked.
    """

    def __init__(
        self,
        *,
        max_message_bytes: int = 64 * 2**20,
        link_timeout_s: float = 10.0,
        counters: Counters | None = None,
        dscp: int = 0,
        unmarked: tuple[str, int] | None = None,
        credentials: Credentials | None = None,
        prefers_bbr: bool = False,
        streams: int = 1,
    ) -> None:
        """Make a van that does not listen yet.

        Args:
            max_message_bytes: largest frame that is accepted.
            link_timeout_s: sets ZeroMQ's own time-outs (`SocketOption`).
            counters: dropped messages are counted there.
            dscp: differentiated services code point of all packets; 0: none.
            unmarked: see above.
            credentials: this process's keys; None: connections are plain.
            prefers_bbr: connections to other machines use BBR, where the kernel lets this process choose it.
            streams: most of a connection to another machine that loses packets.

        Raises:
            SettingsError: the allow list cannot be used.
        """
        admission = None if credentials is None else Admission(credentials)
        self.unmarked = unmarked
        self._marking: Final = marking(dscp)
        self._link_timeout_s: Final = link_timeout_s
        self._prefers_bbr: Final = prefers_bbr
        self._streams: Final = streams
        self._kernel_silence_s: Final = 3.0 * keepalive_s(link_timeout_s)
        """The kernel asks after a third of that, if nothing else is sent, and again after two thirds."""
        overhead = 0 if credentials is None else MESSAGE_OVERHEAD
        largest = max(max_message_bytes, MAX_HEADER_BYTES) + overhead
        common = both(max_message_bytes=largest, link_timeout_s=link_timeout_s)
        self._accepting: Final = (*common, *accepting(), *self._marking)
        self._opening: Final = (*common, *opening(link_timeout_s=link_timeout_s))
        self._sending: Final = (*self._opening, *sending_only())
        self._context: Final[zmq.Context[zmq.Socket[bytes]]] = zmq.Context()
        for option in context_options():
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
        self.accepted: Final = self._guard.accepted
        self._resolved: deque[tuple[ZmqLink, str, str]] = deque()
        """Finished name look-ups: the link, the address or "", the error or ""."""
        self._descriptors: Final = DescriptorPoller(self._connect_resolved)
        self._pipes: Final = HostPipes(self._descriptors, counters, most_bytes=max_message_bytes)
        self.memory: Final = SharedPayloads(counters, most_bytes=max_message_bytes, pipes=self._pipes)
        """Of payloads between processes of this machine."""
        self._drops: Final = Drops(counters)
        self._reader: Final = ZmqReader(self._drops, self._guard, self.memory)
        self._router: zmq.Socket[bytes] | None = None
        self._port = 0
        self._links: dict[Connection, ZmqLink] = {}
        self._ahead: Final[dict[tuple[str, int], ZmqLink]] = {}
        """Connections that were opened ahead, and have no number yet."""
        self._not_up: dict[Connection, ZmqLink] = {}
        self._written: dict[zmq.Socket[bytes], Connection | None] = {}
        """Sockets that were written to since they were last checked; None stands for the ROUTER."""
        self._events: list[VanEvent] = []
        self._unread_turns = 0
        """One after the other that have left messages to the next."""
        self._shut = False
        self.on_shut: Callable[[], None] = lambda: None
        """Closes what else belongs to the process's transport."""
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
        """Begin to connect under a fresh identity. Frames may be handed over at once.

        A connection that was opened ahead to this address is used instead, if it has not ended.
        """
        self._check_open()
        if connection <= 0 or connection in self._links:
            raise UsageError(f"connection {connection} is not a new positive number")
        ahead = self._take_ahead(host, port)
        try:
            link = ahead or self._new_link(connection, host, port, self._opening)
        except zmq.ZMQError as error:  # no descriptors left
            reason = (
                f"no socket to connect to {host_port(host, port)}: {error.strerror}; does `ulimit -n` allow "
                "enough?"
            )
            self._events.append(Broken(connection, reason))
            return
        link.connection = connection
        self._links[connection] = self._not_up[connection] = link
        self._watch_socket(link.socket, connection)
        self._watch_fd(link.monitor, lambda: self._check_monitor(link))
        if ahead is not None:
            return
        try:
            self._connect(link, str(ipaddress.ip_address(host)))
        except ValueError:
            threading.Thread(
                target=self._resolve, args=(link,), name=f"netstorm-dns-{host}", daemon=True
            ).start()

    def open_ahead(self, address: str, port: int, header: bytes) -> None:
        """Begin to connect to a numeric address for a later `open`, which then waits for no handshake.

        Args:
            address, port: of a process whose packets need no marks.
            header: the message by which the other side knows what the connection is for.
        """
        self._check_open()
        if (address, port) in self._ahead:
            return
        with contextlib.suppress(zmq.ZMQError):  # no descriptors left: `open` says so if it is needed
            link = self._new_link(Connection(0), address, port, self._opening, marked=False)
            self._ahead[address, port] = link
            link.pending = None
            link.connect(address)
            link.socket.send(header, _NOBLOCK)

    def close_ahead(self) -> None:
        """Close the connections that were opened ahead and not used."""
        for link in self._ahead.values():
            link.close(0)
        self._ahead.clear()

    def transmit(
        self, connection: Connection, header: bytes, payload: Buffer | None, stream: int = 0
    ) -> bool:
        """Hand over a message without blocking; False: not taken, and the connection is or will be
        `Broken`.
        """
        if connection in self._pipes:
            reference = None if payload is None else self.memory.reference(connection, payload)
            return self._pipes.put(connection, header, payload, reference)
        link = self._links.get(connection)
        if link is not None and link.pending is not None:
            link.pending.append((header, None if payload is None else bytes(payload)))
            return True
        reference = None if payload is None else self.memory.reference(connection, payload)
        to = self._way(connection, payload, stream)
        if to is None or self._is_full(connection, header, payload if reference is None else reference):
            return False
        try:
            if connection < 0:
                to.send(identity_of(connection), _MORE)
            if payload is None:
                to.send(header, _NOBLOCK)
            elif reference is not None:
                to.send(header, _MORE)
                to.send(b"", _MORE)
                to.send(reference, _NOBLOCK)
            else:
                to.send(header, _MORE)
                frame = payload.obj if is_constant(payload) else payload
                if isinstance(frame, zmq.Frame) and len(frame) == memoryview(payload).nbytes:
                    to.send(frame, _NOBLOCK, copy=False)
                else:
                    to.send(payload, _NOBLOCK)
        except zmq.ZMQError as error:
            # EAGAIN: the queue is full; EHOSTUNREACH: the ROUTER has no peer of that identity (any more)
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            if connection > 0:
                self._check_monitor(self._links[connection])  # a connection that has just ended says so, too
                if connection in self._links:
                    self._events.append(Broken(connection, _FULL))
            return False
        return True

    def _is_full(self, connection: Connection, header: bytes, rest: Buffer | None) -> bool:
        """Return whether no more fits in a connection's queue, and have it broken then."""
        nbytes = len(header) + (0 if rest is None else memoryview(rest).nbytes)
        if connection < 0:
            is_full = self.accepted.is_full(connection, nbytes)
            if is_full:
                self.refuse(connection, _FULL)
            return is_full
        link = self._links[connection]
        is_full = link.backlog.is_full(nbytes, lambda: [one.descriptor for one in (link, *link.streams)])
        if is_full:
            self._events.append(Broken(connection, _FULL))
        return is_full

    def close(self, connection: Connection) -> None:
        """Close a connection; unsent frames are dropped. Connections that others opened are theirs to close,
        within the link time-out.
        """
        self.memory.closed(connection)
        if connection < 0:
            self.accepted.left(connection, clock.monotonic())
        link = self._links.pop(connection, None)
        if link is not None:
            self._close_link(link, 0)

    def admit(self, connection: Connection) -> None:
        """See `Transmitter`."""
        self.accepted.admitted(connection)

    def refuse(self, connection: Connection, reason: str) -> None:
        """See `Transmitter`."""
        self.accepted.refuse(connection, "message", reason, clock.monotonic())

    def poll(self, timeout_s: float) -> list[VanEvent]:
        """Wait for events, at most `timeout_s`; return a bounded number of those that have happened."""
        self._pipes.flush()
        self._check_written()
        if self._not_up:
            soonest = min(link.deadline for link in self._not_up.values())
            timeout_s = min(timeout_s, soonest - clock.monotonic())
        if self._reader or self._pipes or self._events:
            timeout_s = 0.0
        self._descriptors.poll(self.accepted.until_check(timeout_s))
        if self._not_up:
            self._break_overdue()
        self._events += self._guard.expelled()
        if self._pipes:
            self._came(self._pipes.read(_MESSAGES_AT_ONCE))
        self._reader.read(self._events, _MESSAGES_AT_ONCE)
        for ended in self._reader.take_ended():
            self._came(self._pipes.drain(ended.connection))
            self._events.append(ended)
        self._unread_turns = self._unread_turns + 1 if self._reader else 0
        if self.accepted and (not self._reader or self._unread_turns >= _ALL_READ_TURNS):
            self.accepted.check(clock.monotonic())
        events, self._events = self._events, []
        return events

    def progress(self, connection: Connection) -> TcpProgress | None:
        """Return how much a connection that was opened here has delivered; None: unknown."""
        link = self._links.get(connection)
        if link is None or self.memory.shares(connection):
            return None  # the kernel delivers references alone
        each = [progress_of(stream.descriptor) for stream in (link, *link.streams)]
        return None if None in each else of_streams([one for one in each if one is not None])

    def acknowledges(self, connection: Connection) -> bool:
        """Return whether the kernel at the other end of a connection acknowledges."""
        return is_acknowledged(self._descriptor(connection), self._kernel_silence_s)

    def answers_late(self, connection: Connection) -> bool:
        """Return whether it acknowledges later than it could, because of the link."""
        return answers_late(self._descriptor(connection))

    def _descriptor(self, connection: Connection) -> int:
        if connection < 0:
            return self.accepted.descriptor(connection)
        link = self._links.get(connection)
        return -1 if link is None else link.descriptor

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
        self._pipes.close_all()
        self.close_ahead()
        for link in list(self._links.values()):
            self._close_link(link, linger_ms)
        self._links.clear()
        self._guard.unprotect()
        if self._router is not None:
            self._router.close(linger_ms)
        self._guard.close()
        self._descriptors.close()
        self.on_shut()
        self._context.term()
        self.memory.close()

    # ------------------------------------------------------------------------------------ other descriptors

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` from `poll` whenever `fd` is readable, until `unwatch`."""
        self._descriptors.watch(fd, callback)

    def unwatch(self, fd: int) -> None:
        """Stop watching; a descriptor that is not watched is ignored."""
        self._descriptors.unwatch(fd)

    def abandon(self) -> None:
        """In a forked child: give up what was inherited (`close_inherited`)."""
        if self._shut:
            return  # the numbers of its descriptors may belong to other files by now
        self._shut = True
        self._pipes.abandon()
        self.memory.close()
        links = (*self._links.values(), *self._ahead.values())
        close_inherited(self._port, {(link.address, link.port) for link in links})
        self._descriptors.close()
        self.on_shut()

    # --------------------------------------------------------------------------------------------- connecting

    def _way(self, connection: Connection, payload: Buffer | None, stream: int) -> zmq.Socket[bytes] | None:
        """Return the socket by which a message leaves, and note that it is written to; None: there is
        none.
        """
        if connection < 0:
            if self._router is not None:
                self._written[self._router] = None
            return self._router
        link = self._links.get(connection)
        if link is None:
            return None
        if payload is not None and self._streams > 1:
            link.handed += memoryview(payload).nbytes
            if link.handed >= link.look_at:
                self._look_for_losses(link)
        if stream:
            return link.streams[stream - 1].socket
        self._written[link.socket] = connection
        return link.socket

    def _new_link(
        self,
        connection: Connection,
        host: str,
        port: int,
        options: Iterable[SocketOption],
        *,
        identity: bytes = b"",
        marked: bool = True,
    ) -> ZmqLink:
        if marked and (host, port) != self.unmarked:
            options = (*options, *self._marking)
        return ZmqLink(
            self._context,
            options,
            connection,
            identity=identity or self._guard.fresh_identity(),
            host=host,
            port=port,
            link_timeout_s=self._link_timeout_s,
            guard=self._guard,
            prefers_bbr=self._prefers_bbr,
        )

    def _look_for_losses(self, link: ZmqLink) -> None:
        """Give a connection more streams, once, if losses slow it down. This machine's own lose nothing."""
        link.look_at = link.handed + _LOOK_BYTES
        if is_own_address(link.address):
            link.look_at = math.inf
        elif link.up and loses(link.descriptor):
            self.widen(link.connection)

    def widen(self, connection: Connection) -> None:
        """Open more streams for a connection that was opened here, and is up. `Widened` follows with each
        that the other side admits; one that it does not is closed.
        """
        link = self._links[connection]
        link.look_at = math.inf
        for number in range(1, self._streams):
            identity = of_stream(link.identity, number)
            with contextlib.suppress(zmq.ZMQError):  # no descriptors left: one stream goes on
                stream = self._new_link(connection, link.host, link.port, self._sending, identity=identity)
                link.not_used.append(stream)
                self._watch_fd(stream.monitor, partial(self._check_stream, link, stream))
                self._watch_fd(stream.socket, partial(self._check_stream, link, stream))
                stream.connect(link.address)
                stream.socket.send(b"", _NOBLOCK)

    def _check_stream(self, link: ZmqLink, stream: ZmqLink) -> None:
        """Use a stream once the other side has answered its first message, an empty one."""
        reason = stream.read_monitor()
        if stream in link.streams:
            if reason is not None:
                self._end(link, reason)
        elif reason is not None:
            link.not_used.remove(stream)
            self._close_sockets(stream, 0)
        else:
            with contextlib.suppress(zmq.Again):
                stream.socket.recv(_NOBLOCK)
                link.not_used.remove(stream)
                link.streams.append(stream)
                self._events.append(Widened(link.connection, 1 + len(link.streams)))

    def _take_ahead(self, host: str, port: int) -> ZmqLink | None:
        """Return the connection that was opened ahead to an address; None: there is none that may be used."""
        link = self._ahead.pop((host, port), None)
        if link is not None and (link.read_monitor() is not None or link.is_overdue(clock.monotonic())):
            link.close(0)
            return None
        return link

    def _connect(self, link: ZmqLink, address: str) -> None:
        link.connect(address)
        pending, link.pending = link.pending or [], None
        self._written[link.socket] = link.connection
        for header, payload in pending:
            self.transmit(link.connection, header, payload)

    def _resolve(self, link: ZmqLink) -> None:
        """Look up a name, on a thread of its own: without an answer from the DNS server that takes long."""
        try:
            entries = socket.getaddrinfo(link.host, link.port, type=socket.SOCK_STREAM)
            entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
            addresses = [str(entry[4][0]) for entry in entries]
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
            self._end(link, reason)

    def _end(self, link: ZmqLink, reason: str) -> None:
        """Break a connection, after what has arrived before the end."""
        while self._reader.read_one(link.socket, link.connection, self._events):
            pass
        self._came(self._pipes.drain(link.connection))
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
        for stream in (link, *link.streams, *link.not_used):
            self._close_sockets(stream, linger_ms)

    def _close_sockets(self, link: ZmqLink, linger_ms: int) -> None:
        for watched in (link.socket, link.monitor):
            self.unwatch(int(watched.getsockopt(zmq.FD)))
        link.close(linger_ms)

    # ------------------------------------------------------------------------------------------------ reading

    def _came(self, messages: Iterable[tuple[Connection, PipeMessage | None]]) -> None:
        """Take what has come through pipes, from each until it is damaged."""
        damaged: set[Connection] = set()
        for connection, message in messages:
            if connection in damaged:
                continue
            if message is None:
                self._drop_pipe(connection, "what has come is no message")
                continue
            payload: Buffer | None = message.payload
            if message.reference is not None:
                payload = self.memory.payload(connection, message.reference)
                if payload is None:
                    self._drop_pipe(connection, "it refers to a payload that is not there")
                    damaged.add(connection)
                    continue
            frames = (message.header,) if payload is None else (message.header, payload)
            self._events.append(Received(connection, frames))

    def _drop_pipe(self, connection: Connection, detail: str) -> None:
        """End a connection whose pipe brings what no van sends."""
        self._drops.note("frames", f"the pipe of connection {connection}", detail, clock.monotonic())
        self._events.append(Broken(connection, f"its pipe is damaged: {detail}"))
        self.refuse(connection, detail)
        self.close(connection)

    def _watch_socket(self, watched: zmq.Socket[bytes], connection: Connection | None) -> None:
        self._watch_fd(watched, lambda: self._reader.mark(watched, connection))

    def _watch_fd(self, watched: zmq.Socket[bytes], callback: Callable[[], bool | None]) -> None:
        descriptor = int(watched.getsockopt(zmq.FD))
        self._descriptors.watch(descriptor, callback)
        self._descriptors.call(descriptor)  # events before this are not reported again

    def _accepted_ended(self, connection: Connection) -> None:
        self._reader.ended[connection] = None
        if self._router is not None:
            self._reader.mark(self._router, None)  # what has arrived before the end comes first

    def _check_written(self) -> None:
        written, self._written = self._written, {}
        for touched, connection in written.items():
            if touched not in self._reader and int(touched.getsockopt(zmq.EVENTS)) & _POLLIN:
                self._reader.mark(touched, connection)

    def _check_open(self) -> None:
        if self._shut:
            raise UsageError("this van has been shut")


_MONITORED: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MECHANISM_MISMATCH: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_EVENT: Final = struct.Struct("=HI")
_SLACK_S: Final = 1.0
"""Time beyond ZeroMQ's own time-outs after which a connection counts as failed: ZeroMQ does not report all
failures."""


class ZmqLink:
    """One connection opened here, or a further stream of one: a DEALER under a fresh identity, and the
    monitor that reports its state. It does not come back once it has ended.

    Attributes:
        pending: frames handed over while the host's name is looked up; None once it is connecting.
        address: the host's address.
        descriptor: the number of its TCP socket, which libzmq owns; -1: it has none yet.
        up: messages can flow.
        refused: no process listens at the address.
        streams: further streams, in the order in which they can be used.
        not_used: those that the other side has not answered yet.
        backlog: what waits in its queue.
        handed: bytes of payloads that were handed over.
        look_at: so many bytes after which losses are looked for.
        deadline: when it counts as failed unless it is up by then, on the local clock.
    """

    __slots__ = (
        "_connected",
        "_guard",
        "_prefers_bbr",
        "_started",
        "address",
        "backlog",
        "connection",
        "deadline",
        "descriptor",
        "handed",
        "host",
        "identity",
        "look_at",
        "monitor",
        "not_used",
        "pending",
        "port",
        "refused",
        "socket",
        "streams",
        "up",
    )

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        options: Iterable[SocketOption],
        connection: Connection,
        *,
        identity: bytes,
        host: str,
        port: int,
        link_timeout_s: float,
        guard: Guard,
        prefers_bbr: bool,
    ) -> None:
        """Make the sockets. `guard` encrypts the connection, if there is a key; `prefers_bbr`: see `ZmqVan`.

        Raises:
            zmq.ZMQError: there are no descriptors left.
        """
        self.connection = connection
        self.identity: Final = identity
        self.host: Final = host
        self.port: Final = port
        self._guard: Final = guard
        self._prefers_bbr: Final = prefers_bbr
        self.socket: Final = context.socket(zmq.DEALER)
        try:
            for option in options:
                self.socket.setsockopt(getattr(zmq, option.name), option.value)
            self.socket.setsockopt(zmq.ROUTING_ID, identity)
            if guard.authenticator is not None:
                guard.authenticator.encrypt_opening(self.socket)
            self.monitor: Final = self.socket.get_monitor_socket(int(_MONITORED))
        except BaseException:
            self.socket.close(0)  # a socket left open keeps its context from ending
            raise
        self.pending: list[tuple[bytes, bytes | None]] | None = []
        self.address = ""
        self.streams: Final[list[ZmqLink]] = []
        self.not_used: Final[list[ZmqLink]] = []
        self.backlog: Final = Backlog()
        self.handed = 0
        self.look_at: float = _LOOK_BYTES
        self.descriptor = -1
        self.up = False
        self.refused = False
        self._started = clock.monotonic()
        self.deadline: Final = self._started + MOST_LINK_TIMEOUTS * link_timeout_s + _SLACK_S
        self._connected = False

    def connect(self, address: str) -> None:
        """Connect to a numeric address."""
        self.address = address
        if ":" in address:
            self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.connect(f"tcp://{host_port(address, self.port)}")

    def read_monitor(self) -> str | None:
        """Process the monitor's events; if the connection has ended, return why, for a person."""
        while True:
            try:
                event, value = _EVENT.unpack(self.monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return None
            if event == zmq.EVENT_CONNECTED:
                self._connected, self.descriptor = True, int(value)
                if self._prefers_bbr and not is_own_address(self.address):
                    use_bbr(self.descriptor)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.up = True
                self._guard.mismatches.pop((self.host, self.port), None)
            elif event != zmq.EVENT_CLOSED or not self._connected:  # connecting has ended
                return self._reason(event, value)

    def is_overdue(self, now: float) -> bool:
        """Return whether it has failed: it is not up, though it should be."""
        return not self.up and now >= self.deadline

    def close(self, linger_ms: int) -> None:
        """Close both sockets."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)

    def no_answer_text(self) -> str:
        """Return the reason of a connection that was not answered."""
        return f"no answer from {self._address_text} for {clock.monotonic() - self._started:.1f} s"

    @property
    def _address_text(self) -> str:
        return host_port(self.host, self.port)

    def _reason(self, event: int, value: int) -> str:
        if self.up:
            return f"the connection to {self._address_text} was lost"
        mismatch = self._mismatch(event, value)
        if mismatch is not None:
            own = self._guard.authenticator
            return reason_of_opener(
                self._address_text, mismatch, has_key=own is not None, name="" if own is None else own.name
            )
        if event != zmq.EVENT_CLOSED:
            return f"{self._address_text} does not speak ZeroMQ's protocol, or has closed the connection"
        timeout_s = int(self.socket.getsockopt(zmq.CONNECT_TIMEOUT)) / 1000
        if clock.monotonic() - self._started >= timeout_s:
            return self.no_answer_text()
        self.refused = True
        return f"{self._address_text} refuses connections, or cannot be reached"

    def _mismatch(self, event: int, value: int) -> Mismatch | None:
        """Return which keys do not match; None: that is not why the handshake has failed."""
        seen = self._guard.mismatches
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
            seen[self.host, self.port] = Mismatch.MECHANISM
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            seen[self.host, self.port] = Mismatch.NOT_ADMITTED
        elif event == zmq.EVENT_CLOSED:
            return None
        if self._guard.authenticator is None:
            return seen.get((self.host, self.port))
        # With another key the other side cannot read the first message, and closes the connection.
        return seen.get((self.host, self.port), Mismatch.KEY)


class ZmqReader:
    """Reads messages from ZeroMQ sockets, from each in turn, and drops those that no van sends.

    Attributes:
        ended: connections that others have opened, and whose end is to be told, in order. The ROUTER may hold
            messages that came before, and is to be read first.
    """

    def __init__(self, drops: Drops, guard: Guard, memory: SharedPayloads) -> None:
        """Begin without sockets.

        Args:
            drops: counts what is dropped.
            guard: knows who has sent a message, and whose are dropped; it is told of connections over which
                messages come.
            memory: has the payloads that references stand for.
        """
        self._drops: Final = drops
        self._memory: Final = memory
        self._guard: Final = guard
        self._accepted: Final = guard.accepted
        self._senders: Final = guard.senders
        self._users: Final = guard.users
        self._readable: dict[zmq.Socket[bytes], Connection | None] = {}
        """In the order of their turns; None stands for the ROUTER."""
        self.ended: dict[Connection, None] = {}

    def __bool__(self) -> bool:
        return bool(self._readable)

    def __contains__(self, socket: zmq.Socket[bytes]) -> bool:
        return socket in self._readable

    def mark(self, socket: zmq.Socket[bytes], connection: Connection | None) -> None:
        """Note that a socket may have something to read; None: it is the ROUTER."""
        self._readable[socket] = connection

    def forget(self, socket: zmq.Socket[bytes]) -> None:
        """Never read a socket again."""
        self._readable.pop(socket, None)

    def take_ended(self) -> list[Broken]:
        """Return the ends of connections that others have opened. All their messages were read."""
        if not self.ended or None in self._readable.values():
            return []
        ended, self.ended = self.ended, {}
        return [Broken(connection, "the other side has ended the connection") for connection in ended]

    def read(self, events: list[VanEvent], room: int) -> None:
        """Append up to `room` messages to `events`, a fair share of each socket; those that have more stay
        marked.
        """
        while self._readable and room > 0:
            socket, connection = next(iter(self._readable.items()))
            del self._readable[socket]
            share = max(1, room // (len(self._readable) + 1))
            for _ in range(share):
                room -= 1
                if not self.read_one(socket, connection, events):
                    break
            else:
                self._readable[socket] = connection

    def read_one(
        self, socket: zmq.Socket[bytes], connection: Connection | None, events: list[VanEvent]
    ) -> bool:
        """Append one message to `events`, unless no van sends such; False if there is nothing to read."""
        recv: Any = socket.recv
        identity, user = b"", ""
        try:
            if connection is None:
                identity = recv(_NOBLOCK)
            header = recv(_NOBLOCK, False)
        except zmq.Again:
            return False
        payload: zmq.Frame | None = None
        reference: zmq.Frame | None = None
        if header.more:
            payload = recv(_NOBLOCK, False)
            if payload.more:
                reference = recv(_NOBLOCK, False)
        if connection is None:
            sender = self._sender(socket, identity, header)
            if sender is None:
                return True
            connection, user = sender
        if payload is None:
            events.append(Received(connection, (header.bytes,), user))
        elif reference is None:
            events.append(Received(connection, (header.bytes, payload), user))
        else:
            shared = self._shared_payload(socket, header, payload, reference, connection)
            if shared is not None:
                events.append(Received(connection, (header.bytes, shared), user))
        return True

    def _sender(
        self, router: zmq.Socket[bytes], identity: bytes, header: zmq.Frame
    ) -> tuple[Connection, str] | None:
        """Return the connection of a message to the ROUTER, and the text of its sender's key; None: the
        message is dropped.
        """
        user = ""
        if self._senders is not None:
            user = self._senders.of(identity, header)
            if not user:
                return None
        if not is_identity(identity):
            self._drop("identity", header, "its identity is not one of a NetStorm process")
            shut_down(descriptor_of(header), self._accepted.port)
            return None
        connection = connection_of(identity)
        if not self._accepted.knows(connection):
            self._guard.heard(connection, header, user)
            if is_stream(identity) and self._accepted.is_in_use(connection):
                with contextlib.suppress(zmq.ZMQError):  # it has ended by now
                    router.send_multipart([identity, b""], _NOBLOCK)
        if self._users is not None and not self._users.admits(user, connection, header):
            self._drop("expelled", header, "the key of its sender is not admitted any more")
            return None
        if is_stream(identity):
            return (main_of(connection), user) if len(header) else None
        return connection, user

    def _shared_payload(
        self,
        socket: zmq.Socket[bytes],
        header: zmq.Frame,
        empty: zmq.Frame,
        reference: zmq.Frame,
        connection: Connection,
    ) -> Buffer | None:
        """Return the payload of a message whose frames after the first are an empty one and a reference."""
        last = reference
        while last.more:
            last = socket.recv(_NOBLOCK, copy=False)
        payload = None
        if not len(empty) and last is reference:
            payload = self._memory.payload(connection, reference.bytes)
        if payload is None:
            self._drop("frames", header, "its third frame is no reference to a payload that is there")
        return payload

    def _drop(self, reason: str, header: zmq.Frame, detail: str) -> None:
        try:
            sender = str(header.get("Peer-Address"))
        except zmq.ZMQError:
            sender = "an unknown address"
        self._drops.note(reason, sender, detail, clock.monotonic())


# Waits for file descriptors, and can be woken by any thread.

_write_eventfd: Final = ctypes.PyDLL(None).eventfd_write
"""Adds to an eventfd, as `os.eventfd_write`, but keeps the interpreter lock meanwhile. Otherwise the woken
thread takes the lock at once, and the caller gets it back only after a switch interval."""
_write_eventfd.argtypes = (ctypes.c_int, ctypes.c_uint64)


class DescriptorPoller:
    """Calls a callback for each descriptor that is readable. All methods but `wake` belong to one thread."""

    def __init__(self, woken: Callable[[], None]) -> None:
        """`woken` is called from `poll` after each `wake`."""
        self._woken: Final = woken
        self._callbacks: Final[dict[int, Callable[[], bool | None]]] = {}
        self._unfinished: dict[int, None] = {}
        """Those that are to be called again."""
        self._epoll: Final = select.epoll()
        self._wake_fd: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock: Final = threading.Lock()
        self._closed = False
        self.watch(self._wake_fd, self._read_wake_ups)

    def watch(self, fd: int, callback: Callable[[], bool | None], events: int = select.EPOLLIN) -> None:
        """Call `callback` from `poll` whenever `fd` is ready, by default readable, until `unwatch`; and in
        the next `poll` if it returns True: it has left something, so that others have their turn.
        """
        self._callbacks[fd] = callback
        self._epoll.register(fd, events)

    def unwatch(self, fd: int) -> None:
        """Stop watching; a descriptor that is not watched is ignored."""
        if self._callbacks.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # already closed
                self._epoll.unregister(fd)

    def poll(self, timeout_s: float) -> None:
        """Wait until a descriptor is readable, at most `timeout_s`; call the callbacks of those that are."""
        ready, self._unfinished = self._unfinished, {}
        ready.update((fd, None) for fd, _ in self._epoll.poll(0.0 if ready else max(0.0, timeout_s)))
        for descriptor in ready:
            self.call(descriptor)

    def call(self, fd: int) -> None:
        """Call the callback of a descriptor now; nothing happens if that is not watched any more."""
        callback = self._callbacks.get(fd)
        if callback is not None and callback():
            self._unfinished[fd] = None

    def wake(self) -> None:
        """Make a waiting `poll` return. May be called by any thread."""
        with self._lock:  # otherwise the descriptor could be closed, and its number belong to another file
            if not self._closed:
                _write_eventfd(self._wake_fd, 1)

    def stop_waking(self) -> None:
        """Ignore `wake` from now on."""
        with self._lock:
            self._closed = True

    def close(self) -> None:
        """Close the poller's own descriptors; call `stop_waking` first, except in a forked child."""
        self._closed = True  # without the lock: in a forked child a thread that is gone may hold it
        self._epoll.close()
        os.close(self._wake_fd)

    def _read_wake_ups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        self._woken()


# ZeroMQ's options: all that the van relies on, also defaults, each with its reason.


@dataclass(frozen=True, slots=True)
class SocketOption:
    """One option of a socket."""

    name: str
    """As in the `zmq` module."""
    value: int
    reason: str


def both(*, max_message_bytes: int, link_timeout_s: float) -> tuple[SocketOption, ...]:
    """Return the options of every socket that reaches another process."""
    longest_s = MOST_LINK_TIMEOUTS * link_timeout_s
    probe_s = keepalive_s(link_timeout_s)
    return (
        SocketOption("LINGER", 0, "closing a connection must not wait for a peer that is gone"),
        SocketOption(
            "SNDHWM",
            65_536,
            "messages; far above the window, so a full queue means that the peer has stopped reading",
        ),
        SocketOption(
            "RCVHWM",
            1_024,
            "messages; what a process is too slow to read waits in TCP and at the sender, not in its memory",
        ),
        SocketOption(
            "MAXMSGSIZE", max_message_bytes, "bytes; a peer that sends a larger frame is disconnected"
        ),
        SocketOption(
            "HEARTBEAT_IVL",
            0,
            "off: libzmq's thread does not answer in a process that is stopped, whose kernel does",
        ),
        SocketOption("TCP_KEEPALIVE", 1, "the kernel finds out that the other machine is gone"),
        SocketOption("TCP_KEEPALIVE_IDLE", probe_s, "s without traffic until it asks"),
        SocketOption("TCP_KEEPALIVE_INTVL", probe_s, "s between two questions"),
        SocketOption(
            "TCP_KEEPALIVE_CNT",
            max(2, round(longest_s / probe_s) - 1),
            "questions without an answer, which may wait in a queue, until the connection is broken; what is "
            "to be known sooner is not left to this (`is_acknowledged`, `QueryTimer`)",
        ),
        SocketOption(
            "HANDSHAKE_IVL",
            max(1, round(longest_s * 1000)),
            "ms; as long as an attempt may take. What sends nothing (a port scan) is closed sooner (`Guard`)",
        ),
        SocketOption("SNDBUF", -1, "bytes; the kernel sizes TCP's buffers by the bandwidth-delay product"),
        SocketOption("RCVBUF", -1, "bytes; left to the kernel, as SNDBUF"),
        SocketOption("IPV6", 0, "switched on only for IPv6 addresses"),
    )


def keepalive_s(link_timeout_s: float) -> int:
    """Return the time between two probes of an idle connection, in whole seconds, as the kernel counts. After
    three of them its peer counts as silent, and almost half of the link time-out is left for a new one.
    """
    return max(1, round(link_timeout_s / 5))


def accepting() -> tuple[SocketOption, ...]:
    """Return the further options of the ROUTER."""
    return (
        SocketOption("ROUTER_MANDATORY", 1, "a message to a peer that is gone is an error, not silence"),
        SocketOption("ROUTER_HANDOVER", 0, "no peer can take over a connection by using its identity"),
        SocketOption("BACKLOG", 1_024, "a whole large job connects at once when it starts"),
    )


def opening(*, link_timeout_s: float) -> tuple[SocketOption, ...]:
    """Return the further options of a DEALER."""
    return (
        SocketOption(
            "RECONNECT_IVL",
            24 * 3600 * 1000,
            "ms; a connection that broke stays broken: the session opens the next one, under a new identity. "
            "With -1, what arrived before the end would be dropped unless this process has read it by then",
        ),
        SocketOption(
            "CONNECT_TIMEOUT",
            max(1, round(link_timeout_s * 500)),
            "ms; TCP's own is minutes; half the link time-out, so that there is a second attempt",
        ),
        SocketOption(
            "IMMEDIATE",
            0,
            "Hello may be handed over before the connection is up; all else waits for the Welcome",
        ),
    )


def sending_only() -> tuple[SocketOption, ...]:
    """Return the further options of a DEALER over which nothing but an empty message comes back."""
    return (
        SocketOption("RCVHWM", 1, "messages; what nobody reads takes no memory"),
        SocketOption("MAXMSGSIZE", 4096, "bytes; commands of ZeroMQ's handshake have less"),
    )


def marking(dscp: int) -> tuple[SocketOption, ...]:
    """Return the option that marks packets with a differentiated services code point; 0: none."""
    if not dscp:
        return ()
    reason = "the code point is the upper six bits of the IPv4 TOS and IPv6 traffic class byte (RFC 2474)"
    return (SocketOption("TOS", dscp << 2, reason),)


def context_options() -> tuple[SocketOption, ...]:
    """Return the options of the context."""
    return (
        SocketOption("IO_THREADS", 1, "one moves 6 GB/s; more would take cores from training"),
        SocketOption(
            "MAX_SOCKETS",
            65_535,
            "a connection opened here takes three (itself and both ends of its monitor)",
        ),
        SocketOption("BLOCKY", 0, "sockets that were not closed do not keep the process from ending"),
    )
