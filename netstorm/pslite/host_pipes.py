"""Messages between two processes of one user and machine: through a pair of pipes, instead of sockets.

A message over a ZeroMQ connection wakes a thread of libzmq at its sender and one at its receiver, besides the
one that wants it, and each frame is a call into libzmq. Through a pipe all that a turn of the I/O thread has
for one peer is one `write`, which wakes the thread that wants it.

The process that opens a connection makes the pipes, and writes their numbers into the memory that it lends
for payloads (`shared_memory`). Its peer, which has mapped that, opens them through /proc, and says so in the
same place. From then on the peer sends through its pipe; the opener, which has sent nothing but its Hello,
does from the Welcome on. So no message overtakes another. The connection itself stays: its end is theirs.

    offset  size  before each message, little-endian
    0       4     bytes of its header
    4       4     bytes that follow: those of the payload, or of a reference to it
    8       1     what follows: 0 nothing, 1 a payload, 2 a reference
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import stat
import struct
import sys
import termios
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from netstorm.observe.log import Counters
from netstorm.protocol.frames import MAX_HEADER_BYTES, Buffer
from netstorm.pslite.tcp_info import MOST_WAITING_BYTES
from netstorm.pslite.van import Connection

__all__ = ["SLOTS", "SLOT_BYTES", "Descriptors", "HostPipes", "PipeMessage"]


SLOTS: Final = 256
"""Connections that a process may offer pipes for at a time; one in whose place another one is has none."""

_SLOT: Final = struct.Struct("<QII?7x")
"""Number of the connection, descriptor to read from, descriptor to write to, whether the peer has both."""
SLOT_BYTES: Final = _SLOT.size
_HAS_BOTH: Final = 16
"""Offset of the last of these."""

_PREFIX: Final = struct.Struct("<IIB")
_ALONE: Final = 0
_PAYLOAD: Final = 1
_REFERENCE: Final = 2

_PIECE: Final = 65_536
"""Bytes of one call: as much as a pipe holds by default."""

_MOST_HELD: Final = 2**20
"""Bytes of payloads, referred to in what was handed over, with which it leaves at once: its peer reads them
while the next ones are copied. The rest of a turn's messages are one write."""

_MOST_WAITING: Final = 65_536
"""Pieces that wait for room, far above what sessions have under way: the peer has stopped reading. So it has
if `MOST_WAITING_BYTES` wait."""

_OPEN: Final = os.O_NONBLOCK | os.O_CLOEXEC
_REACH: Final = _OPEN | os.O_NOCTTY
"""Whatever a peer says is its pipe: a terminal would become this process's, and end it by SIGHUP."""

# A pipe's read and write never wait here, so they keep the interpreter lock: to get it back may take long.
_libc: Final = ctypes.PyDLL(None, use_errno=True)
_read: Final = _libc.read
_read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_read.restype = ctypes.c_ssize_t
_write: Final = _libc.write
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


def _bytes_in(pipe: int) -> int:
    """Return how many bytes a pipe holds."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


class Descriptors(Protocol):
    """Waits for file descriptors."""

    def watch(self, fd: int, callback: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """Have `callback` called whenever `fd` is ready, until `unwatch`."""

    def unwatch(self, fd: int) -> None:
        """Stop watching."""


class PipeMessage(NamedTuple):
    """A message that has come."""

    header: bytes
    payload: bytearray | None
    reference: bytes | None
    """To the payload, instead of it."""


class HostPipes:
    """The pipes of one process. All methods belong to one thread."""

    def __init__(self, descriptors: Descriptors, counters: Counters, *, most_bytes: int) -> None:
        """Begin without any.

        Args:
            descriptors: tell when a pipe can be read or written.
            counters: count what is written at once.
            most_bytes: of a payload.
        """
        self._descriptors: Final = descriptors
        self._counters: Final = counters
        self._most_bytes: Final = most_bytes
        self._offered: Final[dict[Connection, _Offer]] = {}
        self._pipes: Final[dict[Connection, _WayOut]] = {}
        """Those that messages go through."""
        self._incoming: Final[dict[Connection, _WayIn]] = {}
        self._readable: Final[dict[Connection, None]] = {}
        """In the order of their turns."""
        self._written: Final[dict[Connection, _WayOut]] = {}
        """Those with something to write."""
        self._buffer: Final = ctypes.create_string_buffer(_PIECE)
        self._guarded = 0
        """The thread in which a pipe without a reader is an error, and no signal."""

    def __bool__(self) -> bool:
        """Return whether there may be something to read."""
        return bool(self._readable)

    # --------------------------------------------------------------------------------------------- opening

    def offer(self, connection: Connection, slot: memoryview) -> None:
        """Make pipes for a connection that is opened here, and say in `slot`, which its peer can see, where
        they are; not if another connection is named there, or there are no descriptors left.
        """
        if connection in self._offered or _SLOT.unpack(slot)[0]:
            return
        with contextlib.suppress(OSError):
            there = os.pipe2(_OPEN)
            try:
                back = os.pipe2(_OPEN)
            except OSError:
                os.close(there[0])
                os.close(there[1])
                return
            self._offered[connection] = _Offer(there, back, slot)
            slot[:] = _SLOT.pack(int(connection), there[0], back[1], False)
            self._listen(connection, back[0])

    def opened(self, connection: Connection) -> None:
        """Send through the pipes of a connection that is opened here, if its peer has opened them."""
        offer = self._offered.get(connection)
        if offer is None:
            return
        os.close(offer.there[0])
        os.close(offer.back[1])
        self._offered[connection] = offer._replace(there=(-1, -1), back=(-1, -1))
        if offer.slot[_HAS_BOTH]:
            self._pipes[connection] = _WayOut(offer.there[1])
        else:
            os.close(offer.there[1])
            self._forget(connection)

    def accept(self, connection: Connection, number: int, process: int, slot: memoryview) -> None:
        """Use the pipes that the process at the other end of a connection offers for the one that has this
        number there, if they can be reached.
        """
        offered, to_read, to_write, _ = _SLOT.unpack(slot)
        if offered != number or connection in self._pipes:
            return
        with contextlib.suppress(OSError):
            read = os.open(f"/proc/{process}/fd/{to_read}", os.O_RDONLY | _REACH)
            try:
                write = os.open(f"/proc/{process}/fd/{to_write}", os.O_WRONLY | _REACH)
            except OSError:
                os.close(read)
                return
            if not (stat.S_ISFIFO(os.fstat(read).st_mode) and stat.S_ISFIFO(os.fstat(write).st_mode)):
                os.close(read)
                os.close(write)
                return
            self._pipes[connection] = _WayOut(write)
            self._listen(connection, read)
            slot[_HAS_BOTH] = 1

    def close(self, connection: Connection) -> None:
        """Close the pipes of a connection. What was handed over leaves, as far as there is room for it; what
        has come and was not read is dropped.
        """
        pipes = self._pipes.pop(connection, None)
        if pipes is not None:
            if connection in self._written:
                self._write_out(connection, pipes)
            self._descriptors.unwatch(pipes.descriptor)
            os.close(pipes.descriptor)
        offer = self._offered.pop(connection, None)
        if offer is not None:
            offer.slot[:] = bytes(SLOT_BYTES)
            for descriptor in (*offer.there, offer.back[1]):
                if descriptor >= 0:
                    os.close(descriptor)
        self._forget(connection)

    def close_all(self) -> None:
        """Close all pipes."""
        for connection in {**self._offered, **self._pipes, **self._incoming}:
            self.close(connection)

    def abandon(self) -> None:
        """In a forked child: close what was inherited, and change nothing that others see."""
        for pipes in self._pipes.values():
            os.close(pipes.descriptor)
        for incoming in self._incoming.values():
            os.close(incoming.descriptor)
        for offer in self._offered.values():
            for descriptor in (*offer.there, offer.back[1]):
                if descriptor >= 0:
                    os.close(descriptor)
        for table in (self._pipes, self._incoming, self._offered, self._readable, self._written):
            table.clear()

    # --------------------------------------------------------------------------------------------- sending

    def __contains__(self, connection: Connection) -> bool:
        """Return whether messages over a connection go through a pipe."""
        return connection in self._pipes

    def put(
        self, connection: Connection, header: bytes, payload: Buffer | None, reference: bytes | None
    ) -> bool:
        """Hand over a message, with its payload or a reference to that; it leaves with `flush`, or at once if
        much is referred to. False: nobody reads the pipe any more.
        """
        pipes = self._pipes[connection]
        if pipes.is_broken or len(pipes.pieces) > _MOST_WAITING or pipes.waiting > MOST_WAITING_BYTES:
            return False
        if not pipes.waits:
            self._written[connection] = pipes
        if reference is not None:
            pipes.add(_PREFIX.pack(len(header), len(reference), _REFERENCE) + header + reference)
            pipes.held += 0 if payload is None else memoryview(payload).nbytes
            if pipes.held >= _MOST_HELD and not pipes.waits:
                self._write_out(connection, pipes)
        elif payload is None:
            pipes.add(_PREFIX.pack(len(header), 0, _ALONE) + header)
        else:
            values = memoryview(payload).cast("B")
            pipes.add(_PREFIX.pack(len(header), len(values), _PAYLOAD) + header)
            for begin in range(0, len(values), _PIECE):
                pipes.add(bytes(values[begin : begin + _PIECE]))
        return True

    def flush(self) -> None:
        """Write all that was handed over, as far as there is room."""
        if not self._written:
            return
        for connection, pipes in list(self._written.items()):
            self._write_out(connection, pipes)

    def _write_out(self, connection: Connection, pipes: _WayOut) -> None:
        if self._guarded != threading.get_ident():
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGPIPE,))  # a script may want to end by it
            self._guarded = threading.get_ident()
        pieces = pipes.pieces
        pipes.held = 0
        while pieces:
            size = len(pieces[0])
            taken = [pieces.popleft()]
            while pieces and size + len(pieces[0]) <= _PIECE:
                size += len(pieces[0])
                taken.append(pieces.popleft())
            data = taken[0] if len(taken) == 1 else b"".join(taken)
            written = _write(pipes.descriptor, data, size)
            self._counters.add("pipe_writes")
            pipes.waiting -= max(0, written)
            if written < 0 and ctypes.get_errno() == errno.EPIPE:
                pipes.is_broken = True
                pieces.clear()
            elif written < size:
                pieces.appendleft(data[max(0, written) :])
                pipes.waits = True
                self._descriptors.watch(
                    pipes.descriptor, lambda: self._has_room(connection, pipes), select.EPOLLOUT
                )
                break
        self._written.pop(connection, None)

    def _has_room(self, connection: Connection, pipes: _WayOut) -> None:
        self._descriptors.unwatch(pipes.descriptor)
        pipes.waits = False
        self._written[connection] = pipes

    # --------------------------------------------------------------------------------------------- reading

    def read(self, room: int) -> list[tuple[Connection, PipeMessage | None]]:
        """Return up to about `room` messages, each connection in turn; None: no van sends such."""
        messages: list[tuple[Connection, PipeMessage | None]] = []
        while self._readable and len(messages) < room:
            connection = next(iter(self._readable))
            del self._readable[connection]
            self._read_one(connection, messages, max(1, room // (len(self._readable) + 1)))
        return messages

    def drain(self, connection: Connection) -> list[tuple[Connection, PipeMessage | None]]:
        """Return all that has come over a connection, which has ended: what its pipe holds now. Its peer may
        go on writing.
        """
        messages: list[tuple[Connection, PipeMessage | None]] = []
        incoming = self._incoming.get(connection)
        if incoming is None:
            return messages
        left = _bytes_in(incoming.descriptor)
        while left > 0 and (count := self._fill(incoming)):
            left -= count
        while incoming.has_whole() and (not messages or messages[-1][1] is not None):
            self._read_one(connection, messages, _PIECE)
        self._readable.pop(connection, None)
        return messages

    def _read_one(
        self, connection: Connection, messages: list[tuple[Connection, PipeMessage | None]], room: int
    ) -> None:
        incoming = self._incoming[connection]
        if not incoming.has_whole():
            self._fill(incoming)
        while room > 0:
            try:
                message = incoming.take(self._most_bytes)
            except ValueError:
                messages.append((connection, None))
                return
            if message is None:
                return
            messages.append((connection, message))
            room -= 1
        self._readable[connection] = None

    def _fill(self, incoming: _WayIn) -> int:
        """Read what there is, at most a pipe's size; return how many bytes there were."""
        if incoming.ended:
            return 0
        count = int(_read(incoming.descriptor, self._buffer, _PIECE))
        if count > 0:
            incoming.bytes += memoryview(self._buffer)[:count]
            return count
        if count == 0:  # the other side has closed it, and soon the connection
            incoming.ended = True
            self._descriptors.unwatch(incoming.descriptor)
        return 0

    def _listen(self, connection: Connection, descriptor: int) -> None:
        self._incoming[connection] = _WayIn(descriptor)
        self._descriptors.watch(descriptor, lambda: self._mark(connection))

    def _mark(self, connection: Connection) -> None:
        self._readable[connection] = None

    def _forget(self, connection: Connection) -> None:
        incoming = self._incoming.pop(connection, None)
        if incoming is not None:
            self._readable.pop(connection, None)
            self._descriptors.unwatch(incoming.descriptor)
            os.close(incoming.descriptor)


class _Offer(NamedTuple):
    """Pipes made here, by what `os.pipe` returns: to the peer, and back; -1: not ours any more."""

    there: tuple[int, int]
    back: tuple[int, int]
    slot: memoryview


class _WayOut:
    """The way out of a connection."""

    __slots__ = ("descriptor", "held", "is_broken", "pieces", "waiting", "waits")

    def __init__(self, descriptor: int) -> None:
        self.descriptor: Final = descriptor
        self.pieces: Final[deque[bytes]] = deque()
        """What was handed over and not written yet."""
        self.waiting = 0
        """Bytes of these."""
        self.held = 0
        """Bytes of payloads that these refer to."""
        self.waits = False
        """For room."""
        self.is_broken = False
        """Nobody reads it any more."""

    def add(self, piece: bytes) -> None:
        """Add what is to be written next."""
        self.pieces.append(piece)
        self.waiting += len(piece)


class _WayIn:
    """The way in."""

    __slots__ = ("bytes", "descriptor", "ended")

    def __init__(self, descriptor: int) -> None:
        self.descriptor: Final = descriptor
        self.bytes = bytearray()
        self.ended = False

    def has_whole(self) -> bool:
        """Return whether a whole message is here, or what is none."""
        if len(self.bytes) < _PREFIX.size:
            return False
        header, after, _ = _PREFIX.unpack_from(self.bytes)
        return bool(header > MAX_HEADER_BYTES or len(self.bytes) >= _PREFIX.size + header + after)

    def take(self, most_bytes: int) -> PipeMessage | None:
        """Return the next message, if it is here.

        Raises:
            ValueError: what is here is none.
        """
        got = self.bytes
        if len(got) < _PREFIX.size:
            return None
        header_bytes, after, kind = _PREFIX.unpack_from(got)
        if header_bytes > MAX_HEADER_BYTES or after > most_bytes or kind > _REFERENCE:
            raise ValueError("no message of a van")
        begin = _PREFIX.size + header_bytes
        if len(got) < begin + after:
            return None
        header = bytes(memoryview(got)[_PREFIX.size : begin])
        rest = got[begin : begin + after]
        del got[: begin + after]
        return PipeMessage(
            header,
            rest if kind == _PAYLOAD else None,
            bytes(rest) if kind == _REFERENCE else None,
        )
