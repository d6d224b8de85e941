"""SNTP packets (RFC 4330), built and parsed with ntplib. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import ntplib

from netstorm.errors import FrameError

__all__ = ["PACKET_BYTES", "Answer", "answer", "new_nonce", "read_answer", "request"]

PACKET_BYTES: Final = 48
"""Without the optional authenticator."""

_CLIENT: Final = 3
_SERVER: Final = 4
_VERSION: Final = 4
_UNSYNCHRONISED: Final = 3
_LOCAL_CLOCK: Final = 0x7F7F0100
"""127.127.1.0: NTP's address of an undisciplined local clock."""

_LOCAL_STRATUM: Final = 10
"""Stratum of such a clock, by convention: any real time server is preferred to it. Each hop adds one."""

_WORST_STRATUM: Final = 15
_MOST_ERROR_S: Final = 16.0
"""A clock that may be off by more is not used (RFC 5905's MAXDISP)."""
_PRECISION: Final = -20
"""Log2 s: ntplib's times are doubles, whose last bit is half a microsecond."""

_NONCE_FRACTION: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer. Times are in s on its clock, since the Unix epoch."""

    nonce: float
    """From the request."""
    received: float
    """When the request arrived."""
    transmitted: float
    """When the answer left."""
    hops: int
    """Between the server's clock and the cluster clock."""
    error: float
    """Largest error of the server's clock relative to the cluster clock, as it says itself; s."""


def new_nonce(bits: int) -> float:
    """Return a number for a request, made of 52 random bits.

    It is sent instead of the client's time, which servers only copy. So the client's clock is not disclosed,
    and a forged answer does not match.
    """
    return (bits >> 20 & 0xFFFFFFFF) + (bits & _NONCE_FRACTION - 1) / _NONCE_FRACTION


def request(nonce: float) -> bytes:
    """Return a client's request."""
    return bytes(ntplib.NTPPacket(version=_VERSION, mode=_CLIENT, tx_timestamp=nonce).to_data())


def answer(data: bytes, *, received: float, transmitted: float, hops: int = 0, error: float = 0.0) -> bytes:
    """Return a server's answer to a request.

    Args:
        data: the request.
        received: when it arrived, in seconds since the Unix epoch on the cluster clock.
        transmitted: when the answer leaves.
        hops: between the server's clock and the cluster clock: 0 at the scheduler.
        error: largest error of the server's clock relative to the cluster clock, in s; infinite: it does not
            know the time, and the answer says so.

    Raises:
        FrameError: `data` is not a request.
    """
    asked = _parse(data)
    if asked.mode != _CLIENT or not 1 <= asked.version <= _VERSION:
        raise FrameError(f"an SNTP packet of mode {asked.mode}, version {asked.version}: no client's request")
    reply = ntplib.NTPPacket(version=asked.version, mode=_SERVER)
    knows = error < _MOST_ERROR_S
    reply.leap = 0 if knows else _UNSYNCHRONISED
    reply.stratum = min(_LOCAL_STRATUM + hops, _WORST_STRATUM)
    reply.root_dispersion = error if knows else _MOST_ERROR_S
    reply.poll = asked.poll
    reply.precision = _PRECISION
    reply.ref_id = _LOCAL_CLOCK
    reply.ref_timestamp = ntplib.system_to_ntp_time(received)
    reply.orig_timestamp = asked.tx_timestamp
    reply.recv_timestamp = ntplib.system_to_ntp_time(received)
    reply.tx_timestamp = ntplib.system_to_ntp_time(transmitted)
    try:
        return bytes(reply.to_data())
    except ntplib.NTPException as problem:  # a clock before 1900 or after 2036
        raise FrameError(f"the time {received} cannot be expressed in SNTP: {problem}") from None


def read_answer(data: bytes) -> Answer:
    """Parse a server's answer.

    Raises:
        FrameError: it is not an answer, or its server does not know the time.
    """
    packet = _parse(data)
    if packet.mode != _SERVER:
        raise FrameError(f"an SNTP packet of mode {packet.mode}: no server's answer")
    if packet.leap == _UNSYNCHRONISED or not 1 <= packet.stratum <= _WORST_STRATUM or not packet.tx_timestamp:
        raise FrameError(
            f"an SNTP server that does not know the time (stratum {packet.stratum}, leap {packet.leap})"
        )
    return Answer(
        nonce=packet.orig_timestamp,
        received=ntplib.ntp_to_system_time(packet.recv_timestamp),
        transmitted=ntplib.ntp_to_system_time(packet.tx_timestamp),
        hops=max(0, packet.stratum - _LOCAL_STRATUM),
        error=packet.root_dispersion,
    )


def _parse(data: bytes) -> ntplib.NTPPacket:
    packet = ntplib.NTPPacket()
    try:
        packet.from_data(data)
    except ntplib.NTPException:
        raise FrameError(f"an SNTP packet of {len(data)} bytes; it has at least {PACKET_BYTES}") from None
    return packet
