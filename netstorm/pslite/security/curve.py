"""Key pairs of CURVE, ZeroMQ's encryption on elliptic curves (RFC 26, curvezmq.org)."""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass, field
from typing import Final

import zmq
from zmq.utils import z85

from netstorm.errors import UsageError

__all__ = ["KEY_BYTES", "CurveKeys", "key_of_text", "key_text"]

KEY_BYTES: Final = 32
"""Size of a public or a secret key of Curve25519."""

_KEY_LETTERS: Final = KEY_BYTES * 5 // 4


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair. Its text shows neither half: only members of a job know the public one of its pair."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def from_secret(cls, secret: bytes) -> CurveKeys:
        """Return the pair of a secret key of 32 bytes.

        Curve25519 itself clears and sets the bits that a scalar must have (RFC 7748, section 5).
        """
        if len(secret) != KEY_BYTES:
            raise UsageError(f"a secret key of {len(secret)} bytes: expected {KEY_BYTES}")
        return cls(public=z85.decode(zmq.curve_public(z85.encode(secret))), secret=secret)

    @classmethod
    def fresh(cls) -> CurveKeys:
        """Return a pair that nobody else has."""
        return cls.from_secret(secrets.token_bytes(KEY_BYTES))


def key_text(key: bytes) -> str:
    """Return a key as 40 printable characters (Z85, ZeroMQ's RFC 32)."""
    return z85.encode(key).decode("ascii")


def key_of_text(text: str) -> bytes:
    """Return a key that is written as 40 characters of Z85.

    Raises:
        ValueError: it is no such text. The error does not repeat the text, which may be a secret.
    """
    if len(text) == _KEY_LETTERS:
        try:
            return z85.decode(text)
        except (ValueError, KeyError, struct.error):
            pass
    raise ValueError(f"{len(text)} characters that are no key: expected {_KEY_LETTERS} characters of Z85")
