"""Proves to a node that a process is a scheduler of its job, which the job's key alone does not. Pure.

A job's schedulers have a secret that no node has. From it follows a key for each node, which the node gets
when it joins. A scheduler that comes back, or takes the job over, answers the node with a digest under that
node's key. So a node can check schedulers, but cannot pose as one to another node: it has only its own key.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import msgspec

from netstorm.protocol.messages import HiddenKey, Member

__all__ = [
    "Mismatch",
    "SchedulerSecret",
    "is_about_keys",
    "is_proof",
    "proof_for_offer",
    "proof_for_resume",
    "reason_of_opener",
]


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


class Mismatch(Enum):
    """What ZeroMQ reports of a handshake that has failed."""

    MECHANISM = auto()
    """One side wants encryption and the other one does not."""
    KEY = auto()
    """The other side's key is not the expected one."""
    NOT_ADMITTED = auto()
    """The other side knows the job's key, but does not admit this process's own key."""


_ABOUT_KEYS: Final = ("NETSTORM_KEY_FILE", "NETSTORM_ALLOW")


def reason_of_opener(address: str, mismatch: Mismatch, *, has_key: bool, name: str = "") -> str:
    """Return why this process cannot connect.

    Args:
        address: to which it connects.
        mismatch: what ZeroMQ says.
        has_key: whether this process has a key.
        name: of this node's own key; empty: it has none.
    """
    if mismatch is Mismatch.MECHANISM:
        if has_key:
            return (
                f"{address} is not encrypted, but this process has a key (NETSTORM_KEY_FILE): start all "
                "processes of the job with the same key, or none"
            )
        return (
            f"{address} requires a key, and this process has none: set NETSTORM_KEY_FILE to a copy of the "
            "job's key file"
        )
    if mismatch is Mismatch.NOT_ADMITTED:
        which = f"this node's own key, {name!r}," if name else "this process, which has no NETSTORM_NODE_KEY:"
        return f"{address} does not admit {which} by its list of nodes (NETSTORM_ALLOW)"
    return (
        f"{address} has closed the connection: it has another key than this process (NETSTORM_KEY_FILE), or "
        "none, or is no process of NetStorm"
    )


def is_about_keys(reason: str) -> bool:
    """Return whether a reason is one of `reason_of_opener`: trying again will not help."""
    return any(variable in reason for variable in _ABOUT_KEYS)
