"""TCP packets as a TUN device hands them over, made by hand."""

from __future__ import annotations

import struct

HEADERS = 52
MSS = 1448
IPV6 = (b"\xfd\x4e" + bytes(13) + b"\1", b"\xfd\x4e" + bytes(13) + b"\2")


def tcp(
    payload: bytes, *, mss: int = MSS, flags: int = 0x18, sequence: int = 1000, ipv6: bool = False
) -> bytes:
    """Return a TCP packet with timestamps; a super-packet if the payload is more than a segment."""
    big = len(payload) > mss
    ip_bytes = 40 if ipv6 else 20
    headers = ip_bytes + 32
    kind = 4 if ipv6 else 1
    front = struct.pack(
        "=BBHHHH", 1, kind if big else 0, headers if big else 0, mss if big else 0, ip_bytes, 16
    )
    if ipv6:
        ip = struct.pack(">IHBB16s16s", 6 << 28, 32 + len(payload), 6, 64, *IPV6)
    else:
        ip = struct.pack(
            ">BBHHHBBH4s4s",
            0x45,
            0,
            HEADERS + len(payload),
            7,
            0x4000,
            64,
            6,
            0,
            b"\n\x4e\0\1",
            b"\n\x4e\0\2",
        )
    head = struct.pack(">HHIIBBHHH", 5000, 6000, sequence & 0xFFFFFFFF, 1, 8 << 4, flags, 500, 0, 0)
    return front + ip + head + bytes(12) + payload


def udp(size: int) -> bytes:
    """Return a packet that is no super-packet."""
    front = struct.pack("=BBHHHH", 0, 0, 0, 0, 0, 0)
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 28 + size, 7, 0, 64, 17, 0, b"\n\x4e\0\1", b"\n\x4e\0\2")
    return front + ip + bytes(8 + size)


def words(data: bytes) -> int:
    """Return the ones' complement sum of 16-bit words, word by word (RFC 1071)."""
    total = 0
    for place in range(0, len(data), 2):
        total += int.from_bytes(data[place : place + 2], "big")
        total = (total & 0xFFFF) + (total >> 16)
    return total
