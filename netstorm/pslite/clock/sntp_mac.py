"""SNTP packets that prove that their sender holds the job's key. Pure.

A packet is followed by a number that names the key, and a digest of the packet under that key: the symmetric
authentication of RFC 5905, section 7.3, whose sizes these are, with BLAKE2b (RFC 7693) in place of MD5. An
answer repeats the request's nonce, which the digest covers. So an answer of an earlier request is of no use,
nor is a packet sent back to its sender, since the digest covers also whether it is a request or an answer.
Somebody on the way can still hold packets up, which the error of an exchange accounts for: half of its round
trip.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from netstorm.errors import FrameError
from netstorm.pslite.clock.sntp import PACKET_BYTES

__all__ = ["MAC_BYTES", "PacketKey", "Unauthenticated"]

_NAME_BYTES: Final = 4
_DIGEST_BYTES: Final = 20

MAC_BYTES: Final = _NAME_BYTES + _DIGEST_BYTES
"""How much longer packets are. An answer is as long as its request, so forged requests gain nobody bytes."""

_PERSON: Final = b"netstorm sntp"
_NAME_PERSON: Final = b"netstorm sntp id"


class Unauthenticated(FrameError):
    """A packet whose sender does not prove that it holds the key.

    Attributes:
        reason: one word for a counter: no_mac, other_key or forged.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason: Final = reason


class PacketKey:
    """The key of a job's SNTP packets."""

    __slots__ = ("_key", "_name")

    def __init__(self, key: bytes) -> None:
        """Take a secret of up to 64 bytes."""
        self._key: Final = key
        self._name: Final = hashlib.blake2b(key=key, digest_size=_NAME_BYTES, person=_NAME_PERSON).digest()

    def seal(self, packet: bytes) -> bytes:
        """Return a packet with its digest."""
        return packet + self._name + self._digest(packet)

    def open(self, data: bytes) -> bytes:
        """Return the packet in what was received.

        Raises:
            Unauthenticated: no holder of the key has sent it.
        """
        if len(data) != PACKET_BYTES + MAC_BYTES:
            raise Unauthenticated(
                "no_mac", f"an SNTP packet of {len(data)} bytes: expected {PACKET_BYTES + MAC_BYTES}"
            )
        packet, name = data[:PACKET_BYTES], data[PACKET_BYTES : PACKET_BYTES + _NAME_BYTES]
        if name != self._name:
            raise Unauthenticated("other_key", f"an SNTP packet under the key {name.hex()}, of another job")
        if not hmac.compare_digest(data[PACKET_BYTES + _NAME_BYTES :], self._digest(packet)):
            raise Unauthenticated("forged", "an SNTP packet that was changed, or forged")
        return packet

    def _digest(self, packet: bytes) -> bytes:
        return hashlib.blake2b(packet, key=self._key, digest_size=_DIGEST_BYTES, person=_PERSON).digest()
