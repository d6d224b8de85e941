"""Identifiers of peers, and sets of ranks as bits. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NewType

from netstorm.errors import ProtocolViolation

__all__ = ["SCHEDULER", "UNKNOWN", "Peer", "bits_from_wire", "bits_of", "bits_to_wire", "ranks_in"]

Peer = NewType("Peer", int)
"""The other end of a session: a node's rank (0 and up) or `SCHEDULER`. At the scheduler, before ranks are
assigned: a number in the order of arrival."""

SCHEDULER = Peer(-1)

UNKNOWN = Peer(-2)
"""This number and those below it: the process at an address, whatever its rank. A scheduler that takes a job
over knows nodes by no more than that."""

_MOST_BIT_BYTES: Final = 1024
"""Of a bit set that comes from a peer, for twice as many ranks as a network file may have. Work on a larger
one, even to say that it is wrong, would take long."""


def bits_of(ranks: Iterable[int]) -> int:
    """Return the bit set of `ranks`."""
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


def ranks_in(bits: int) -> tuple[int, ...]:
    """Return the ranks of a bit set in increasing order."""
    return tuple(
        8 * place + bit
        for place, byte in enumerate(bits.to_bytes((bits.bit_length() + 7) // 8, "little"))
        for bit in range(8)
        if byte >> bit & 1
    )


def bits_to_wire(bits: int) -> bytes:
    """Return a bit set as little-endian bytes: MessagePack's integers have at most 64 bits, a job may have
    more ranks.
    """
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def bits_from_wire(data: bytes) -> int:
    """Return the bit set in `data` (the reverse of `bits_to_wire`).

    Raises:
        ProtocolViolation: a set that no job can have.
    """
    if len(data) > _MOST_BIT_BYTES:
        raise ProtocolViolation(f"a set of ranks has {len(data)} bytes: expected at most {_MOST_BIT_BYTES}")
    return int.from_bytes(data, "little")
