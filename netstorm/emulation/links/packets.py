"""Packets of a TUN device with IFF_VNET_HDR: a header of 10 bytes, then IPv4 or IPv6.

With TSO offload on, one packet may hold up to 64 KiB of TCP segments that share its header (a super-packet).
Traffic and losses are counted in segments. Pure. Source: Linux, virtio_net.h, and
RFC 1071 for the checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

__all__ = ["FRAME_BYTES", "HEADER_BYTES", "LARGEST", "destination", "measure", "source", "split"]

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
