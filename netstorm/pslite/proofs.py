"""Proves to a node that a process is a scheduler of its job, which the job's key alone does not. Pure.

A job's schedulers have a secret that no node has. From it follows a key for each node, which the node gets
when it joins. A scheduler that comes back, or takes the job over, answers the node with a digest under that
node's key. So a node can check schedulers, but cannot pose as one to another node: it has only its own key.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Final

import msgspec

from netstorm.protocol.messages import HiddenKey, Member

__all__ = ["SchedulerSecret", "is_proof", "proof_for_offer", "proof_for_resume"]

_KEY_BYTES: Final = 32

_PERSON: Final = b"netstorm schedul"
"""Separates these digests from all others (RFC 7693, personalisation: 16 bytes)."""


@dataclass(frozen=True, slots=True)
class SchedulerSecret:
    """What the schedulers of a job have, and nobody else. Empty: a job without a key."""

    secret: bytes = field(default=b"", repr=False)

    def __bool__(self) -> bool:
        return bool(self.secret)

    def key_for(self, job: str, member: Member) -> bytes:
        """Return the key of one node's process, by which it recognises schedulers; empty: it has joined
        without a key, so there is none.
        """
        if not self.secret or not member.user:
            return b""
        return _digest(self.secret, job, member.incarnation, member.user)

    def hidden(self) -> HiddenKey:
        """Return the secret as a log of the job holds it."""
        return HiddenKey(self.secret)


def proof_for_resume(key: bytes, number: int) -> bytes:
    """Return the answer to a node's `Resume` of a number, which the node uses once. `key`: of the node."""
    return _digest(key, "resume", number) if key else b""


def proof_for_offer(key: bytes, host: str, port: int) -> bytes:
    """Return what goes with an offer to take the job over at an address. `key`: of the node that is asked."""
    return _digest(key, "offer", host, port) if key else b""


def is_proof(proof: bytes, expected: bytes) -> bool:
    """Return whether a proof is the expected one. Nothing is a proof where none can be expected."""
    return bool(expected) and hmac.compare_digest(proof, expected)


def _digest(key: bytes, *content: str | int) -> bytes:
    # MessagePack says where each part ends, so no two contents have the same bytes.
    return hashlib.blake2b(
        msgspec.msgpack.encode(content), key=key, digest_size=_KEY_BYTES, person=_PERSON
    ).digest()
