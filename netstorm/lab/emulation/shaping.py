"""One direction of an emulated link as a queue on virtual time, and the packets that pass it. Pure."""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Final

__all__ = [
    "BUFFER_S",
    "FRAME_BYTES",
    "HEADER_BYTES",
    "LARGEST",
    "LEAST_BUFFER",
    "PriorityShaper",
    "Shaper",
    "buffer_bytes",
    "code_point",
    "destination",
    "measure",
    "source",
    "split",
]


# One direction of a link as a queue on virtual time: rate, latency, loss and a bounded buffer.
#
# A packet waits until those before it have left, takes bytes / rate to leave, and arrives after the
# latency. So the state of the queue is the time at which it will be empty; a packet's arrival is computed
# once, when it is offered.

BUFFER_S: Final = 0.1
"""Capacity of a queue, in time at the link's rate: as in routers of such links; both bbr and cubic need it.
"""
LEAST_BUFFER: Final = 70_000
"""Bytes: one super-packet, which else would never pass a slow link whole."""
_NEVER: Final = 1 << 60


def buffer_bytes(rate: float) -> int:
    """Return the bytes that the queue of a link of `rate` bit/s holds."""
    return max(LEAST_BUFFER, int(rate / 8 * BUFFER_S))


class Shaper:
    """One direction of a link, or an access cap. Times are in seconds of any monotonic clock."""

    __slots__ = (
        "_buffer",
        "_bytes_per_s",
        "_free_at",
        "_latency",
        "_loss",
        "_random",
        "_till_loss",
        "carried",
        "dropped",
        "lost",
        "queue",
        "wire_bytes",
    )

    def __init__(self, *, rate: float, latency: float, loss: float, random: Random) -> None:
        """Begin empty. `rate` in bit/s, `latency` in s, `loss` as a fraction of segments."""
        self.queue: Final[deque[tuple[float, bytes, int]]] = deque()
        """(when it arrives at the other end, packet, bytes on the wire), in order."""
        self.carried = 0
        """Segments that arrived, or are in flight."""
        self.wire_bytes = 0
        """Bytes of those segments on the wire."""
        self.dropped = 0
        """Segments for which the queue had no room."""
        self.lost = 0
        """Segments lost by chance."""
        self._random: Final = random
        self._free_at = 0.0
        self._bytes_per_s = rate / 8
        self._buffer = buffer_bytes(rate)
        self._latency = latency
        self._loss = loss
        self._till_loss = self._next_loss()

    def change(
        self,
        now: float,
        *,
        rate: float | None = None,
        latency: float | None = None,
        loss: float | None = None,
    ) -> None:
        """Change values from `now` on. Queued packets leave at the new rate; packets in flight stay as they
        are.
        """
        if rate is not None and rate / 8 != self._bytes_per_s:
            factor = self._bytes_per_s / (rate / 8)
            retimed = []
            for due, packet, size in self.queue:
                leaves = due - self._latency
                new_due = now + (leaves - now) * factor + self._latency if leaves > now else due
                retimed.append((new_due, packet, size))
            self.queue.clear()
            self.queue.extend(retimed)
            if self._free_at > now:
                self._free_at = now + (self._free_at - now) * factor
            self._bytes_per_s = rate / 8
            self._buffer = buffer_bytes(rate)
        if latency is not None:
            self._latency = latency
        if loss is not None:
            self._loss = loss
            self._till_loss = self._next_loss()

    def offer(self, packet: bytes, now: float) -> None:
        """Queue a packet that arrives now, whole or in part, or drop it."""
        segments, size = measure(packet)
        free_at = self._free_at
        free_at = max(free_at, now)
        room = self._buffer - (free_at - now) * self._bytes_per_s
        if size > room:
            packet = self._fit(packet, segments, size, room)
            if not packet:
                return
            segments, size = measure(packet)
        self._leave(packet, segments, size, free_at)

    def _fit(self, packet: bytes, segments: int, size: int, room: float) -> bytes:
        """Return what a queue has room for of a packet; empty: nothing. The rest is dropped."""
        fitting = max(0, int(room * segments // size))
        self.dropped += segments - fitting
        pieces = split(packet, [True] * fitting + [False] * (segments - fitting)) if fitting else []
        if not pieces:
            self.dropped += fitting
            return b""
        return pieces[0][0]

    def _leave(self, packet: bytes, segments: int, size: int, at: float) -> None:
        """Have a packet leave the queue, beginning at a time."""
        self._free_at = free_at = at + size / self._bytes_per_s
        if self._till_loss >= segments:
            self._till_loss -= segments
            self.carried += segments
            self.wire_bytes += size
            # After a change to a shorter latency, a packet must not overtake those in flight.
            due = free_at + self._latency
            queue = self.queue
            if queue and queue[-1][0] > due:
                due = queue[-1][0]
            queue.append((due, packet, size))
        else:
            self._lose(packet, segments, free_at + self._latency)

    def _lose(self, packet: bytes, segments: int, due: float) -> None:
        keep = self._draw(segments)
        gone = segments - sum(keep)
        pieces = split(packet, keep) if segments > 1 else []
        self.lost += gone if pieces else segments
        if self.queue:
            due = max(due, self.queue[-1][0])
        for piece, count in pieces:
            _, size = measure(piece)
            self.carried += count
            self.wire_bytes += size
            self.queue.append((due, piece, size))

    def _draw(self, segments: int) -> Sequence[bool]:
        keep = [True] * segments
        place = self._till_loss
        while place < segments:
            keep[place] = False
            place += 1 + self._next_loss()
        self._till_loss = place - segments
        return keep

    def _next_loss(self) -> int:
        """Return the number of segments until the next loss: geometric."""
        if self._loss <= 0:
            return _NEVER
        return int(math.log(1.0 - self._random.random()) / math.log1p(-self._loss))


# The same with the queues of a switch as MLT sets it up (Wang et al., NSDI 2024, 4.2): strict priorities by
# code point, and unimportant packets are dropped while a queue is short.
#
# Classes of assured forwarding (RFC 2597) are queues, AF4 the first; a drop precedence of 3 says unimportant.
# All else, as TCP's results and acknowledgements, goes first: MLT has a priority for control packets, too.

_QUEUES: Final = 5
_UNIMPORTANT: Final = (1.0, 0.2, 0.25, 0.3, 0.35)
"""Share of the buffer that may be taken when an unimportant packet of each queue comes. Front layers, whose
queues are the first, have the lower thresholds, as in MLT: what is lost of them costs the least."""

_AF_CLASSES: Final = range(1, 5)


def code_point(packet: bytes) -> int:
    """Return the differentiated services code point (RFC 2474) of an IPv4 or IPv6 packet."""
    first, second = packet[HEADER_BYTES], packet[HEADER_BYTES + 1]
    return ((first & 15) << 4 | second >> 4) >> 2 if first >> 4 == 6 else second >> 2


class PriorityShaper(Shaper):
    """A `Shaper` with a queue for each class. Call `advance` when the time that it returns has come."""

    __slots__ = ("_queues", "_waiting")

    def __init__(self, *, rate: float, latency: float, loss: float, random: Random) -> None:
        """Begin empty; see `Shaper`."""
        super().__init__(rate=rate, latency=latency, loss=loss, random=random)
        self._queues: Final[tuple[deque[tuple[float, bytes]], ...]] = tuple(deque() for _ in range(_QUEUES))
        """(When it came, packet)."""
        self._waiting = 0
        """Bytes in them."""

    def offer(self, packet: bytes, now: float) -> None:
        """Queue a packet that arrives now, whole or in part, or drop it."""
        self.advance(now)
        segments, size = measure(packet)
        mark = code_point(packet)
        queue = _QUEUES - (mark >> 3) if mark >> 3 in _AF_CLASSES and not mark & 1 else 0
        unimportant = mark & 6 == 6 and queue > 0
        room = self._buffer * (_UNIMPORTANT[queue] if unimportant else 1.0) - self._waiting
        if size > room:
            packet = self._fit(packet, segments, size, room)
            if not packet:
                return
            _, size = measure(packet)
        self._queues[queue].append((now, packet))
        self._waiting += size
        self.advance(now)

    def advance(self, now: float) -> float:
        """Let packets leave whose turn has come; return when the next one's will, a large number if none
        waits.
        """
        while self._waiting:
            if self._free_at > now:
                return self._free_at
            came, packet = next(queue for queue in self._queues if queue).popleft()
            segments, size = measure(packet)
            self._waiting -= size
            self._leave(packet, segments, size, max(self._free_at, came))
        return float(_NEVER)


# Packets of a TUN device with IFF_VNET_HDR: a header of 10 bytes, then IPv4 or IPv6.
#
# With TSO offload on, one packet may hold up to 64 KiB of TCP segments that share its header (a
# super-packet). Traffic and losses are counted in segments. Pure. Source: Linux, virtio_net.h, and
# RFC 1071 for the checksum.

HEADER_BYTES: Final = 10
"""virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset."""
FRAME_BYTES: Final = 14
"""Counted with each packet, as tc counts on Ethernet: so that a rate means the same in both backends."""
LARGEST: Final = HEADER_BYTES + 65535

_HEADER: Final = struct.Struct("=BBHHHH")
_NEEDS_CSUM: Final = 1
_TCPV4: Final = 1
_TCPV6: Final = 4
_IPV6_BYTES: Final = 40
"""Linux's own TCP has no extension headers."""
_KIND: Final = 0x7F  # without the ECN bit
_FIN_PSH: Final = 0x09
_CWR: Final = 0x80
_TCP: Final = 6


def measure(packet: bytes) -> tuple[int, int]:
    """Return (segments, bytes on the wire) of a packet: IP and TCP headers and a frame for each segment."""
    length = len(packet) - HEADER_BYTES
    if not packet[1] & _KIND:
        return 1, length + FRAME_BYTES
    size = packet[4] | packet[5] << 8
    header = packet[2] | packet[3] << 8
    if packet[1] & _KIND in {_TCPV4, _TCPV6}:
        ip_bytes = _ip_bytes(packet)
        header = ip_bytes + (packet[HEADER_BYTES + ip_bytes + 12] >> 4) * 4
    segments = -(-(length - header) // size) or 1
    return segments, length + (segments - 1) * header + segments * FRAME_BYTES


def source(packet: bytes) -> bytes:
    """Return the bytes of the source address: 4 of IPv4, 16 of IPv6."""
    return packet[18:34] if packet[HEADER_BYTES] >> 4 == 6 else packet[22:26]


def destination(packet: bytes) -> bytes:
    """Return the bytes of the destination address: 4 of IPv4, 16 of IPv6."""
    return packet[34:50] if packet[HEADER_BYTES] >> 4 == 6 else packet[26:30]


def split(packet: bytes, keep: Sequence[bool]) -> list[tuple[bytes, int]]:
    """Return what remains of a super-packet when some of its segments are lost.

    Args:
        packet: TCP over IPv4 or IPv6, with its header.
        keep: for each segment, whether it arrives.

    Returns:
        (packet, segments) of each unbroken run of kept segments. Nothing for a super-packet of another
        protocol, which cannot be split here; the devices are opened so that there are none.
    """
    if packet[1] & _KIND not in {_TCPV4, _TCPV6}:
        return []
    is_ipv6 = packet[1] & _KIND == _TCPV6
    size = packet[4] | packet[5] << 8
    ip_bytes = _ip_bytes(packet)
    header = ip_bytes + (packet[HEADER_BYTES + ip_bytes + 12] >> 4) * 4
    begin = HEADER_BYTES + header
    (identification,) = struct.unpack_from(">H", packet, HEADER_BYTES + 4)
    (sequence,) = struct.unpack_from(">I", packet, HEADER_BYTES + ip_bytes + 4)
    made = []
    for first, after in _runs(keep):
        payload = packet[begin + first * size : begin + after * size]
        head = bytearray(packet[HEADER_BYTES:begin])
        if is_ipv6:
            struct.pack_into(">H", head, 4, header - ip_bytes + len(payload))
        else:
            struct.pack_into(">H", head, 2, header + len(payload))
            struct.pack_into(">H", head, 4, identification + first & 0xFFFF)
            struct.pack_into(">H", head, 10, 0)
            struct.pack_into(">H", head, 10, ~_sum(head[:ip_bytes]) & 0xFFFF)
        struct.pack_into(">I", head, ip_bytes + 4, sequence + first * size & 0xFFFFFFFF)
        if after < len(keep):  # these flags belong to the last segment
            head[ip_bytes + 13] &= ~_FIN_PSH
        if first > 0:  # and this one to the first
            head[ip_bytes + 13] &= ~_CWR
        # The receiver's kernel completes the checksum; the field holds the pseudo header's sum.
        addresses = bytes(head[8:40] if is_ipv6 else head[12:20])
        # Of IPv6 the length has four bytes; its upper two are 0 here.
        pseudo = addresses + struct.pack(">HH", _TCP, header - ip_bytes + len(payload))
        struct.pack_into(">H", head, ip_bytes + 16, _sum(pseudo))
        single = len(payload) <= size
        front = _HEADER.pack(
            _NEEDS_CSUM,
            0 if single else packet[1],
            0 if single else header,
            0 if single else size,
            ip_bytes,
            16,
        )
        made.append((front + bytes(head) + payload, after - first))
    return made


def _ip_bytes(packet: bytes) -> int:
    first = packet[HEADER_BYTES]
    return _IPV6_BYTES if first >> 4 == 6 else (first & 15) * 4


def _runs(keep: Sequence[bool]) -> list[tuple[int, int]]:
    """Return (first, after the last) of each unbroken run of True."""
    runs = []
    place = 0
    while place < len(keep):
        if keep[place]:
            first = place
            while place < len(keep) and keep[place]:
                place += 1
            runs.append((first, place))
        else:
            place += 1
    return runs


def _sum(data: bytes | bytearray) -> int:
    """Return the ones' complement sum of 16-bit words (RFC 1071); `data` has an even length."""
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
