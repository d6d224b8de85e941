"""A TCP proxy on loopback that injects a WAN's faults: resets, silence, delay, flipped bits.

with TcpProxy("127.0.0.1", port) as proxy:
    connect_to(proxy.host, proxy.port)
    proxy.cut()
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from netstorm import clock

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's own is newer than Python 3.10

__all__ = ["TcpProxy"]

_READ_BYTES: Final = 65_536
_BACKLOG_BYTES: Final = 4 * 2**20
"""Bytes in flight in one direction beyond which nothing more is read: a path has a bounded capacity."""

_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER that makes `close` send a reset, as a router that has lost its state does."""


class _Flow:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, target: socket.socket, *, inwards: bool) -> None:
        self.inwards = inwards
        """It carries data of the side that connected."""
        self.refused = False
        self.source = source
        self.target = target
        self.in_flight: deque[tuple[float, bytes]] = deque()
        """Data to be written, and when."""
        self.bytes = 0
        self.reading = True
        self.ended = False
        """The source has closed the connection; what is in flight still arrives."""
        self.over = False
        """The target has everything, or accepts no more."""
        self.blocked = False
        """The target's buffer is full."""


class _ProxiedConnection:
    """A connection accepted here and the one made for it."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.flows = (_Flow(near, far, inwards=True), _Flow(far, near, inwards=False))

    @property
    def over(self) -> bool:
        return all(flow.over for flow in self.flows)


class TcpProxy:
    """Forwards connections to one address. Attributes may be changed at any time, from any thread.

    Attributes:
        host: where it listens.
        port: where it listens.
        delay_s: added to the time of everything that is forwarded.
        flip_probability: that one bit of a piece of data (at most 64 KiB) changes.
        connections: number of connections accepted so far.
        refuses: called with data of the side that connected; True resets that connection.
        alters: called with each piece of data, returns what is forwarded in its place, as an attacker would.
    """

    def __init__(self, target_host: str, target_port: int, *, seed: int = 0) -> None:
        """Listen on a free port of 127.0.0.1."""
        self.delay_s = 0.0
        self.flip_probability = 0.0
        self.connections = 0
        self.refuses: Callable[[bytes], bool] | None = None
        self.alters: Callable[[bytes], bytes] | None = None
        self._target: Final = (target_host, target_port)
        self._random: Final = random.Random(seed)
        self._listener: Final = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.host, self.port = self._listener.getsockname()
        self._selector: Final = selectors.DefaultSelector()
        self._connections: list[_ProxiedConnection] = []
        self._cut = threading.Event()
        self._done: threading.Event | None = None
        self._paused = False
        self._refusing = False
        self._stopping = False
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread: Final = threading.Thread(target=self._run, name="netstorm-tcp-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def cut(self) -> None:
        """Reset all connections now; new ones are accepted."""
        self._cut.set()
        self._wake()

    def pause(self) -> None:
        """Forward nothing until `resume`; connections stay open."""
        self._paused = True
        self._wake()

    def resume(self) -> None:
        """Forward again, beginning with what waits."""
        self._paused = False
        self._wake()

    def refuse(self, *, refuse: bool = True) -> None:
        """Reset new connections at once, until called with False."""
        self._refusing = refuse

    def close(self) -> None:
        """End the proxy and all its connections. A second call does nothing."""
        if self._stopping:
            return
        self._stopping = True
        self._wake()
        self._thread.join()
        for thing in (self._listener, self._wake_in, self._wake_out):
            thing.close()
        self._selector.close()

    # ---------------------------------------------------------------------------------------- its own thread

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(self._timeout()):
                self._handle(key)
            if self._cut.is_set():
                self._cut.clear()
                self._reset_all()
            if not self._paused:
                now = clock.monotonic()
                for connection in self._connections:
                    self._forward(connection, now)
            self._connections = [connection for connection in self._connections if not connection.over]
        self._reset_all()

    def _timeout(self) -> float | None:
        due = [
            flow.in_flight[0][0]
            for connection in self._connections
            for flow in connection.flows
            if flow.in_flight
        ]
        return None if self._paused or not due else max(0.001, min(due) - clock.monotonic())

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._wake_out:
            with contextlib.suppress(BlockingIOError):
                self._wake_out.recv(4096)
        elif key.fileobj is self._listener:
            self._accept()
        else:
            self._read(key.data)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        self.connections += 1
        try:
            far = None if self._refusing else socket.create_connection(self._target)
        except OSError:
            far = None
        if far is None:
            _reset(near)
            return
        connection = _ProxiedConnection(near, far)
        for flow in connection.flows:
            flow.source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            flow.source.setblocking(False)
            self._selector.register(flow.source, selectors.EVENT_READ, flow)
        self._connections.append(connection)

    def _read(self, flow: _Flow) -> None:
        try:
            data = flow.source.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            flow.ended = True
        elif flow.inwards and self.refuses is not None and self.refuses(data):
            flow.refused = True
            return
        elif self.alters is not None:
            data = self.alters(data)
            if not data:  # an empty piece would mean the end
                return
        elif self.flip_probability and self._random.random() < self.flip_probability:
            changed = bytearray(data)
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
            data = bytes(changed)
        flow.in_flight.append((clock.monotonic() + self.delay_s, data))
        flow.bytes += len(data)
        if flow.ended or flow.bytes > _BACKLOG_BYTES:
            self._selector.unregister(flow.source)
            flow.reading = False

    def _forward(self, connection: _ProxiedConnection, now: float) -> None:
        if connection.flows[0].refused:
            self._reset(connection)
            return
        for flow in connection.flows:
            flow.blocked = False
            while flow.in_flight and flow.in_flight[0][0] <= now and not (flow.over or flow.blocked):
                self._forward_one(flow)
            if not (flow.over or flow.reading or flow.ended) and flow.bytes <= _BACKLOG_BYTES:
                self._selector.register(flow.source, selectors.EVENT_READ, flow)
                flow.reading = True
        if connection.over:
            for flow in connection.flows:
                self._stop_reading(flow)
                flow.source.close()

    def _forward_one(self, flow: _Flow) -> None:
        due, data = flow.in_flight.popleft()
        if not data:
            flow.over = True
            with contextlib.suppress(OSError):
                flow.target.shutdown(socket.SHUT_WR)  # not a reset: it would overtake the data
            return
        try:
            sent = flow.target.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            flow.over = True
            return
        flow.bytes -= sent
        flow.blocked = sent < len(data)
        if flow.blocked:
            flow.in_flight.appendleft((due, data[sent:]))

    def _stop_reading(self, flow: _Flow) -> None:
        if flow.reading:
            self._selector.unregister(flow.source)
            flow.reading = False

    def _reset(self, connection: _ProxiedConnection) -> None:
        for flow in connection.flows:
            flow.over = True
            self._stop_reading(flow)
            _reset(flow.source)

    def _reset_all(self) -> None:
        for connection in self._connections:
            self._reset(connection)
        self._connections.clear()


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()
