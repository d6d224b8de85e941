"""What is in the lane's packets, and how each is encrypted and authenticated. Pure.

A packet of values says which message it belongs to and which bytes of that it has, so packets need no order:
the message's number stands for its key, round, chunk and contributors, which are in the packet of its head.
Each packet is sealed by itself (AES-256-GCM, RFC 5116) under a key that the session has carried. A packet's
number is its nonce, and no number is used twice under a key.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol

from netstorm.errors import FrameError, SettingsError

__all__ = [
    "ACK",
    "DATA",
    "FRAGMENT",
    "HEAD",
    "KEY_BYTES",
    "MOST_RANGES",
    "OVERHEAD",
    "Cipher",
    "Opened",
    "PacketFragment",
    "acknowledgement",
    "addressee",
    "fragment",
    "new_cipher",
    "open_packet",
    "ranges_in",
    "read_fragment",
    "seal_packet",
]

FRAGMENT: Final = 1280
"""Bytes of values in a packet: with all headers 1,357, which passes tunnels whose packets have 1,420."""

HEAD: Final = 0xFFFF_FFFF
"""Stands for the offset of a message's head."""

KEY_BYTES: Final = 32
DATA: Final = 0
ACK: Final = 1
"""Kinds of packets: to the receiver of values, and back. They number their packets apart."""

MOST_RANGES: Final = 64
"""Ranges of numbers in an acknowledgement."""

_CLEAR: Final = struct.Struct("<BIQ")
"""Kind, the addressee's number of the lane, number of the packet."""
_FRAGMENT: Final = struct.Struct("<IIII")
_DELAY: Final = struct.Struct("<I")
_RANGE: Final = struct.Struct("<QI")
_NONCE: Final = struct.Struct("<B3xQ")
_TAG_BYTES: Final = 16
_IP_UDP_BYTES: Final = 28

OVERHEAD: Final = _CLEAR.size + _FRAGMENT.size + _TAG_BYTES + _IP_UDP_BYTES
"""Bytes of a packet besides its values."""


class Cipher(Protocol):
    """An AEAD under one key."""

    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes:
        """Return the encrypted data and its tag."""

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes:
        """Return the data; an exception if the tag is wrong."""


class Opened(NamedTuple):
    """A packet whose tag is right."""

    number: int
    content: bytes


class PacketFragment(NamedTuple):
    """What a packet of values carries."""

    message: int
    """Number of the message on this lane, from 1."""
    floor: int
    """The lowest number that is still wanted: the sender has no message below it any more."""
    offset: int
    """Of the values in the message's payload; `HEAD`: it is the head."""
    total: int
    """Bytes of the payload."""
    values: bytes


def new_cipher(key: bytes) -> Cipher:
    """Return the AEAD of a lane.

    Raises:
        SettingsError: the library is not installed.
    """
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415
    except ImportError as error:
        raise SettingsError(
            "NETSTORM_DATAGRAMS=1 needs the package cryptography, which encrypts packets: "
            "pip install 'netstorm[datagrams]'"
        ) from error
    return AESGCM(key)


def seal_packet(cipher: Cipher, kind: int, lane: int, number: int, content: bytes) -> bytes:
    """Return a packet; `lane` is the addressee's number of it."""
    clear = _CLEAR.pack(kind, lane, number)
    return clear + cipher.encrypt(_NONCE.pack(kind, number), content, clear)


def addressee(packet: bytes) -> tuple[int, int]:
    """Return the kind of a packet, and the addressee's number of its lane.

    Raises:
        FrameError: it is too short, or of no such kind.
    """
    if len(packet) < _CLEAR.size + _TAG_BYTES or packet[0] not in (DATA, ACK):
        raise FrameError(f"{len(packet)} bytes that are no packet of a lane")
    kind, lane, _ = _CLEAR.unpack_from(packet)
    return kind, lane


def open_packet(cipher: Cipher, packet: bytes) -> Opened:
    """Check and decrypt a packet that has an `addressee`.

    Raises:
        FrameError: whoever has made it does not have the key, or it has changed on its way.
    """
    clear = packet[: _CLEAR.size]
    kind, _, number = _CLEAR.unpack(clear)
    try:
        content = cipher.decrypt(_NONCE.pack(kind, number), packet[_CLEAR.size :], clear)
    except Exception as error:  # InvalidTag is the library's, which only a job with lanes imports
        raise FrameError("a packet fails its authentication") from error
    return Opened(number, content)


def fragment(message: int, floor: int, offset: int, total: int, values: bytes) -> bytes:
    """Return the content of a packet of values; see `PacketFragment`."""
    return _FRAGMENT.pack(message, floor, offset, total) + values


def read_fragment(content: bytes) -> PacketFragment:
    """Return what a packet of values carries.

    Raises:
        FrameError: no correct sender sends it.
    """
    if len(content) < _FRAGMENT.size:
        raise FrameError(f"{len(content)} bytes that are no fragment")
    message, floor, offset, total = _FRAGMENT.unpack_from(content)
    read = PacketFragment(message, floor, offset, total, content[_FRAGMENT.size :])
    if read.offset != HEAD and not (
        read.offset % FRAGMENT == 0 and len(read.values) == min(FRAGMENT, read.total - read.offset)
    ):
        raise FrameError(f"{len(read.values)} bytes at {read.offset} of {read.total}: no fragment ends so")
    return read


def acknowledgement(delay_s: float, ranges: Iterable[tuple[int, int]]) -> bytes:
    """Return the content of an acknowledgement.

    Args:
        delay_s: since the packet with the highest number has come.
        ranges: (first, last) of numbers that have come, at most `MOST_RANGES`.
    """
    delay_us = min(0xFFFF_FFFF, max(0, int(delay_s * 1e6)))
    return _DELAY.pack(delay_us) + b"".join(_RANGE.pack(first, last - first + 1) for first, last in ranges)


def ranges_in(content: bytes) -> tuple[float, list[tuple[int, int]]]:
    """Return the delay in s and the ranges of an acknowledgement.

    Raises:
        FrameError: no correct receiver sends it.
    """
    if (len(content) - _DELAY.size) % _RANGE.size or len(content) > _DELAY.size + MOST_RANGES * _RANGE.size:
        raise FrameError(f"{len(content)} bytes that are no acknowledgement")
    (delay_us,) = _DELAY.unpack_from(content)
    ranges = [(first, first + count - 1) for first, count in _RANGE.iter_unpack(content[_DELAY.size :])]
    return delay_us / 1e6, ranges
