"""The names of connections on the wire: what a DEALER calls itself, and the ROUTER calls it.

Each connection has a fresh one. With a job's key it is the proof that its opener holds the key
(`security.process_proof`), else a random number.
"""

from __future__ import annotations

from typing import Final

from netstorm.pslite.security.process_proof import NUMBER_BYTES, PROOF_BYTES
from netstorm.pslite.van.interface import Connection

__all__ = ["LETTER", "connection_of", "identity_of", "is_identity"]

LETTER: Final = b"N"
"""First byte of every identity: ZeroMQ reserves those that begin with 0."""

_SIZES: Final = (1 + NUMBER_BYTES, 1 + PROOF_BYTES)


def is_identity(identity: bytes) -> bool:
    """Return whether a connection's identity can be that of a process of NetStorm."""
    return len(identity) in _SIZES and identity[:1] == LETTER


def connection_of(identity: bytes) -> Connection:
    """Return the number of a connection that another process has opened: all its bytes, so that no table is
    needed, which strangers could fill by connecting.
    """
    return Connection(-int.from_bytes(identity, "big"))


def identity_of(connection: Connection) -> bytes:
    """Return the identity of a connection that another process has opened."""
    number = -connection
    return number.to_bytes((number.bit_length() + 7) // 8, "big")
