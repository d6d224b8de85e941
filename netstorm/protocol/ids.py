"""Identifiers of peers, and sets of ranks as bits. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType

__all__ = ["SCHEDULER", "Peer", "bits_from_wire", "bits_of", "bits_to_wire", "ranks_in"]

Peer = NewType("Peer", int)
"""The other end of a session: a node's rank (0 and up) or `SCHEDULER`. At the scheduler, before ranks are
assigned: a number in the order of arrival."""

SCHEDULER = Peer(-1)


def bits_of(ranks: Iterable[int]) -> int:
    """Return the bit set of `ranks`."""
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


def ranks_in(bits: int) -> tuple[int, ...]:
    """Return the ranks of a bit set in increasing order."""
    return tuple(rank for rank in range(bits.bit_length()) if bits >> rank & 1)


def bits_to_wire(bits: int) -> bytes:
    """Return a bit set as little-endian bytes: MessagePack's integers have at most 64 bits, a job may have
    more ranks.
    """
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def bits_from_wire(data: bytes) -> int:
    """Return the bit set in `data` (the reverse of `bits_to_wire`)."""
    return int.from_bytes(data, "little")
