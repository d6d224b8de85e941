"""Payloads by reference, between the processes of one user on one machine.

Who sends a payload puts it into memory of its own, which the receiver has mapped, and sends a reference:
where it is, and a *lease*, one byte of that memory that says that the receiver still uses it. The receiver
clears the byte once nothing refers to the payload any more; then its place is used again. So nothing is
copied through the kernel, and the message itself, its order, its repetition and its acknowledgement stay what
they are. A sum that begins with such a payload is made in the reader's own memory (`SharedPayloads.room`): it
goes on from there without a copy. So do values that a frontend has put there itself
(`SharedPayloads.staging`).

The memory is anonymous (memfd), and reached through the descriptor of its process in /proc: it has no name
that could be left behind, takes nothing of /dev/shm, and the kernel keeps it from other users. A process in
another PID namespace does not see it: then payloads go through the connection, as they also do when there is
no room. The memory is sealed, so its owner cannot shrink it under a reader.

A reader holds a lock on its owner's memory, which the kernel takes away when the process ends: so the leases
of one that has died come back, but those of one that is stopped, or only disconnected, do not.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import mmap
import os
import secrets
import struct
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from netstorm.observe.log import Counters
from netstorm.protocol.frames import Buffer, LentPayload, StagedValues, constant_payload, is_constant
from netstorm.protocol.messages import SharedMemory
from netstorm.pslite.host_pipes import SLOT_BYTES, SLOTS, HostPipes
from netstorm.pslite.van import Connection

__all__ = ["SharedPayloads"]


_SIZE: Final = 256 * 2**20
"""Bytes of one process's payloads under way. Pages that were never used take no memory."""

_STAGING: Final = 16 * 2**30
"""Bytes of its staging buffers, of which again only used pages exist: more than MXNet's models have."""

_MOST_MAPPED: Final = 1024
"""Memories of peers that are mapped at a time: 17 TB of 128 TB of addresses."""

_TOKEN_BYTES: Final = 16
_LEASES: Final = 8192
_PIPES_BEGIN: Final = 8448
"""Where it is said which pipes there are (`host_pipes`): after the token, by which a reader knows that it has
the right memory, and leases."""
_BEGIN: Final = 16384
"""Where payloads begin."""

_LEAST: Final = 16 * 1024
"""Bytes of a payload for which a reference costs less than copies through the kernel."""

_ALIGNED: Final = 4096

_REFERENCE: Final = struct.Struct("<QQI?")
"""Offset, bytes, lease, whether the payload is constant."""

_LOCK: Final = struct.Struct("hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, begin, length, process."""

_LOCKED_FROM: Final = 2**40
"""Readers lock the byte with the number of their connection, beyond the memory itself."""

_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_NAME: Final = "netstorm"
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedPayloads:
    """A process's own memory for payloads, and those of its peers that it reads. All methods belong to one
    thread; payloads may die on any.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        most_bytes: int,
        nbytes: int = _SIZE,
        staging_bytes: int = _STAGING,
        pipes: HostPipes | None = None,
    ) -> None:
        """Begin without memory: `nbytes` are taken for the first peer.

        Args:
            counters: count payloads that went by reference, and those for which there was no room.
            most_bytes: of a payload.
            nbytes: of the memory, without staging buffers.
            staging_bytes: of these.
            pipes: for the messages between the same processes; None: these go over connections.
        """
        self._pipes: Final = pipes
        self._counters: Final = counters
        self._nbytes: Final = nbytes
        self._staging_bytes: Final = staging_bytes
        self._most_bytes: Final = most_bytes
        self._own: _OwnMemory | None = None
        self._unavailable = False
        self._shared: Final[set[Connection]] = set()
        self._borrowed: Final[dict[Connection, _PeersMemory]] = {}
        self._mapped: Final[weakref.WeakSet[mmap.mmap]] = weakref.WeakSet()
        """Memory of peers, also of those that are gone, whose payloads are used."""

    def lend(self, connection: Connection) -> SharedMemory | None:
        """Return where payloads over a connection that is opened here may lie; None: the system has no such
        memory.
        """
        own = self._made()
        if own is None:
            return None
        if self._pipes is not None:
            self._pipes.offer(connection, own.slot(connection))
        return own.described(connection)

    def share(self, connection: Connection) -> None:
        """Send payloads over a connection by reference from now on: its peer has the memory."""
        self._shared.add(connection)
        if self._pipes is not None:
            self._pipes.opened(connection)

    def shares(self, connection: Connection) -> bool:
        """Return whether payloads over a connection opened here go by reference."""
        return connection in self._shared

    def borrow(self, connection: Connection, memory: SharedMemory) -> bool:
        """Map the memory of the process that has opened a connection; return whether that worked. A peer that
        has more than this process, or again and again another one, would take all of its address space.
        """
        if memory.nbytes > self._nbytes + self._staging_bytes or len(self._mapped) >= _MOST_MAPPED:
            return False
        with contextlib.suppress(OSError, ValueError):
            borrowed = self._borrowed[connection] = _PeersMemory(memory, self.room)
            self._mapped.add(borrowed.map)
            if self._pipes is not None:
                slot = borrowed.slot(memory.number)
                self._pipes.accept(connection, memory.number, memory.process, slot)
            return True
        return False

    def reference(self, connection: Connection, payload: Buffer) -> bytes | None:
        """Return a reference to a payload, which may change from now on; None: it is to go itself."""
        if connection not in self._shared or memoryview(payload).nbytes < _LEAST:
            return None
        assert self._own is not None
        reference = self._own.reference(connection, payload)
        self._counters.add("payloads_without_memory" if reference is None else "payloads_in_shared_memory")
        return reference

    def room(self, nbytes: int) -> Buffer | None:
        """Return memory for a payload that is made here, and then goes by reference as it is, once it is
        constant; None: nobody reads it, or there is no room.
        """
        if not self._shared or self._own is None:
            return None
        return self._own.room(nbytes)

    def staging(self, nbytes: int) -> Buffer | None:
        """Return memory for values that go by reference as they are (`StagedValues`); None: copies cost less,
        or there is none. It belongs to the caller for as long as he refers to it.
        """
        own = self._made() if nbytes >= _LEAST else None
        return None if own is None else own.staging(nbytes)

    def payload(self, connection: Connection, reference: Buffer) -> Buffer | None:
        """Return the payload that a peer refers to, writable unless it is constant; None: no process of a job
        sends such.
        """
        memory = self._borrowed.get(connection)
        if memory is None or len(reference) != _REFERENCE.size:
            return None
        offset, nbytes, lease, constant = _REFERENCE.unpack(reference)
        payload = memory.payload(offset, nbytes, lease) if 0 < nbytes <= self._most_bytes else None
        return constant_payload(payload) if constant and payload is not None else payload

    def closed(self, connection: Connection) -> None:
        """Note that a connection is gone. What came over it stays valid for as long as it is used."""
        if self._pipes is not None:
            self._pipes.close(connection)
        self._borrowed.pop(connection, None)
        if connection in self._shared:
            self._shared.remove(connection)
            assert self._own is not None
            self._own.closed(connection)

    def close(self) -> None:
        """Give up all memory; payloads that are still used stay valid. In a forked child, too."""
        self._shared.clear()
        self._borrowed.clear()
        if self._own is not None:
            self._own.close()
            self._own = None
        self._unavailable = True

    def _made(self) -> _OwnMemory | None:
        """Return this process's memory; None: the system has no such memory."""
        sizes = (self._staging_bytes, 0)  # the first is more than a limit of addresses (ulimit -v) may allow
        for staging_bytes in sizes if self._own is None and not self._unavailable else ():
            with contextlib.suppress(OSError):
                self._own = _OwnMemory(self._nbytes, staging_bytes)
                break
        self._unavailable = self._own is None
        return self._own


class _Place:
    """Where one payload lies, and how many readers have it."""

    __slots__ = ("area", "begin", "end", "key", "leases", "source")

    def __init__(self, area: _Area, begin: int, end: int) -> None:
        self.area: Final = area
        self.begin: Final = begin
        self.end: Final = end
        self.leases = self.key = 0
        self.source: weakref.ref[Any] | None = None
        """The constant payload that it is a copy of, or what was made here: it may go to several peers."""

    def is_copy_of(self, payload: Buffer) -> bool:
        """Return whether it has the values of a constant payload."""
        return self.source is not None and self.source() is payload

    @property
    def is_used(self) -> bool:
        """Whether somebody reads it, or may be about to."""
        return self.leases > 0 or (self.source is not None and self.source() is not None)


class _Area:
    """Free places of a part of the memory."""

    def __init__(self, begin: int, end: int) -> None:
        self.size = end - begin
        self._free: Final = [(begin, end)]
        """Ascending, never side by side."""

    def take(self, nbytes: int) -> _Place | None:
        """Take the first place that is large enough: so as few pages as possible are ever touched."""
        size = -(-nbytes // _ALIGNED) * _ALIGNED
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                if end - begin == size:
                    del self._free[index]
                else:
                    self._free[index] = (begin + size, end)
                return _Place(self, begin, begin + size)
        return None

    def give_back(self, place: _Place) -> None:
        """Have a place that was taken used again."""
        begin, end = place.begin, place.end
        index = bisect.bisect(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))


class _OwnMemory:
    """The memory of this process's payloads under way."""

    def __init__(self, payload_bytes: int, staging_bytes: int) -> None:
        size = payload_bytes + staging_bytes
        self._descriptor: Final = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, size)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._map: Final = _mapped(self._descriptor, size)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._token: Final = secrets.token_bytes(_TOKEN_BYTES)
        self._map[:_TOKEN_BYTES] = self._token
        self._bytes: Final = np.frombuffer(self._map, np.uint8)
        self._address: Final = _address(self._bytes)
        self._payloads: Final = _Area(_BEGIN, payload_bytes)
        self._staging: Final = _Area(payload_bytes, size)
        self._staged: Final[list[_Place]] = []
        """Places of staging buffers, ascending."""
        self._unstaged: Final[deque[_Place]] = deque()
        """Those whose owner has dropped them, on whatever thread."""
        self._free_leases: Final = list(range(_LEASES, 0, -1))
        self._lent: Final[deque[tuple[int, Connection, _Place]]] = deque()
        """Leases under way, in the order in which they began."""
        self._copies: Final[dict[int, _Place]] = {}
        """By the identity of a constant payload: the place of its copy."""
        self._rooms: Final[dict[int, _Place]] = {}
        """By their address: places of what is made here."""
        self._rooms_bytes = 0
        self._idle: Final[dict[_Place, None]] = {}
        """Places that nobody reads, whose source lives."""
        self._gone: Final[set[Connection]] = set()
        """Connections that are gone, and may have leases."""

    def described(self, connection: Connection) -> SharedMemory:
        """Return what a peer needs to find it."""
        return SharedMemory(
            process=os.getpid(),
            descriptor=self._descriptor,
            nbytes=len(self._map),
            token=self._token,
            number=int(connection),
        )

    def slot(self, connection: Connection) -> memoryview:
        """Return where its pipes are named."""
        return _slot(self._map, int(connection))

    def reference(self, connection: Connection, payload: Buffer) -> bytes | None:
        """See `SharedPayloads.reference`."""
        self._collect()
        if not self._free_leases and not self._find_room():
            return None
        staged = self._staged_at(payload) if isinstance(payload, StagedValues) else None
        place = staged or self._place_of(payload)
        if place is None:
            return None
        begin = place.begin if staged is None else _address(payload) - self._address
        lease = self._free_leases.pop()
        self._map[_TOKEN_BYTES + lease] = 1
        place.leases += 1
        self._lent.append((lease, connection, place))
        return _REFERENCE.pack(begin, memoryview(payload).nbytes, lease, place.source is not None)

    def room(self, nbytes: int) -> Buffer | None:
        """See `SharedPayloads.room`."""
        self._collect()
        if self._rooms_bytes + nbytes > self._payloads.size // 2:
            return None  # the other half is for copies
        place = self._payloads.take(nbytes)
        if place is None:
            return None
        values = self._bytes[place.begin : place.begin + nbytes]
        place.source, place.key = weakref.ref(values), _address(values)
        self._rooms[place.key] = place
        self._idle[place] = None
        self._rooms_bytes += place.end - place.begin
        return values.data

    def staging(self, nbytes: int) -> Buffer | None:
        """See `SharedPayloads.staging`."""
        self._collect()
        self._find_room()
        place = self._staging.take(nbytes)
        if place is None:
            return None
        values = self._bytes[place.begin : place.begin + nbytes]
        place.source = weakref.ref(values, lambda _: self._unstaged.append(place))
        bisect.insort(self._staged, place, key=_begin)
        return values.data

    def closed(self, connection: Connection) -> None:
        """Note that a connection is gone."""
        self._gone.add(connection)

    def close(self) -> None:
        """Give it up; what others have mapped stays theirs."""
        os.close(self._descriptor)

    def _place_of(self, payload: Buffer) -> _Place | None:
        """Copy a payload, unless it is there already; None: there is no room."""
        place = self._copies.get(id(payload))
        if place is not None and place.is_copy_of(payload):
            return place
        values = np.frombuffer(payload, np.uint8)
        if is_constant(payload) and (room := self._rooms.get(_address(values))) is not None:
            return room
        place = self._payloads.take(len(values))
        if place is None and self._find_room():
            place = self._payloads.take(len(values))
        if place is None:
            return None
        np.copyto(self._bytes[place.begin : place.begin + len(values)], values)
        if is_constant(payload):
            place.source, place.key = weakref.ref(payload), id(payload)
            self._copies[place.key] = place
        return place

    def _give_back(self, place: _Place) -> None:
        if self._copies.get(place.key) is place:
            del self._copies[place.key]
        elif self._rooms.get(place.key) is place:
            del self._rooms[place.key]
            self._rooms_bytes -= place.end - place.begin
        elif place.area is self._staging:
            self._staged.remove(place)
        place.area.give_back(place)

    def _staged_at(self, values: StagedValues) -> _Place | None:
        """Return the staging buffer that values lie in; None: they are a copy, or lie in none of this
        memory's.
        """
        begin = _address(values) - self._address
        index = bisect.bisect(self._staged, begin, key=_begin)
        place = self._staged[index - 1] if index else None
        return place if place is not None and begin + values.nbytes <= place.end else None

    def _collect(self) -> None:
        """Take back the oldest leases that have ended."""
        lent, table = self._lent, self._map
        while lent and not table[_TOKEN_BYTES + lent[0][0]]:
            self._end(*lent.popleft())
        for place in list(self._idle):
            self._settle(place)
        while self._unstaged:
            place = self._unstaged.popleft()
            if place in self._staged:  # or it has come back with its last lease
                self._settle(place)

    def _find_room(self) -> bool:
        """Take back whatever has ended, in any order, and what dead processes had. Return whether there was
        any.
        """
        dead = {connection for connection in self._gone if not self._is_read(connection)}
        self._gone.difference_update(dead)
        before, table = len(self._lent), self._map
        for _ in range(before):
            lease, connection, place = self._lent.popleft()
            if table[_TOKEN_BYTES + lease] and connection not in dead:
                self._lent.append((lease, connection, place))
            else:
                self._end(lease, connection, place)
        return len(self._lent) < before

    def _end(self, lease: int, connection: Connection, place: _Place) -> None:
        self._free_leases.append(lease)
        place.leases -= 1
        self._settle(place)

    def _settle(self, place: _Place) -> None:
        self._idle.pop(place, None)
        if not place.is_used:
            self._give_back(place)
        elif not place.leases and place.area is self._payloads:
            self._idle[place] = None

    def _is_read(self, connection: Connection) -> bool:
        """Return whether the process at the other end of a connection that is gone still has the memory."""
        lock = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _LOCKED_FROM + int(connection), 1, 0)
        answer = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, lock)
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class _PeersMemory:
    """The memory of another process, mapped for one connection that it has opened."""

    def __init__(self, memory: SharedMemory, room: Callable[[int], Buffer | None]) -> None:
        """Map it.

        Args:
            memory: what its owner says of it.
            room: where readers put sums that begin with its payloads (`room_beside`).

        Raises:
            OSError: it cannot be reached.
            ValueError: it is not what its owner says.
        """
        path = Path(f"/proc/{memory.process}/fd/{memory.descriptor}")
        if not str(path.readlink()).startswith(f"/memfd:{_NAME} "):
            raise ValueError(f"{path} is no memory for payloads")
        self._descriptor: Final = os.open(path, _FLAGS)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self._process: Final = os.getpid()
        self._room: Final = room
        about = os.fstat(self._descriptor)
        seals = fcntl.fcntl(self._descriptor, fcntl.F_GET_SEALS)
        if about.st_uid != os.geteuid() or about.st_size != memory.nbytes or seals & _SEALS != _SEALS:
            raise ValueError(f"{path} is not this user's, has another size, or could be shrunk")
        if not 0 < memory.number < _LOCKED_FROM:
            raise ValueError(f"{memory.number} is no number of a connection that its side has opened")
        lock = _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _LOCKED_FROM + memory.number, 1, 0)
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, lock)
        # A mapping keeps a descriptor of its own, and with the same one a forked child would hold the lock.
        mapped = os.open(path, _FLAGS)
        try:
            self.map: Final = _mapped(mapped, memory.nbytes)
        finally:
            os.close(mapped)
        if self.map[:_TOKEN_BYTES] != memory.token:
            raise ValueError(f"{path} is another process's memory")

    def slot(self, number: int) -> memoryview:
        """Return where its owner names the pipes of a connection, by its number there."""
        return _slot(self.map, number)

    def payload(self, offset: int, nbytes: int, lease: int) -> Buffer | None:
        """See `SharedPayloads.payload`."""
        if not (_BEGIN <= offset <= offset + nbytes <= len(self.map) and 0 < lease <= _LEASES):
            return None
        values = np.frombuffer(self.map, np.uint8, nbytes, offset).view(LentPayload)
        values.room = self._room
        weakref.finalize(values, self._end, lease).atexit = False
        return values.data

    def _end(self, lease: int) -> None:
        if os.getpid() == self._process:  # a forked child has a copy of what refers to the payload
            self.map[_TOKEN_BYTES + lease] = 0


def _address(values: np.ndarray[Any, Any]) -> int:
    return int(values.__array_interface__["data"][0])


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    """Map a memory. A core dump leaves it out: it would fill all of its pages."""
    memory = mmap.mmap(descriptor, size)
    memory.madvise(mmap.MADV_DONTDUMP)
    return memory


def _begin(place: _Place) -> int:
    return place.begin


def _slot(memory: mmap.mmap, number: int) -> memoryview:
    begin = _PIPES_BEGIN + number % SLOTS * SLOT_BYTES
    return memoryview(memory)[begin : begin + SLOT_BYTES]
