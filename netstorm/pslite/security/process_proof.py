"""Proves that who opens a connection holds the job's key, and means the key pair of its own. Pure.

Every process has a key pair of its own; CURVE proves that it has it. That it may use it in this job is proved
by a digest of the pair's public key, under a key that is derived from the job's. The digest also covers a
random number, so that each connection has a proof of its own, which is its name. It is sent encrypted, before
any message. Who repeats another process's proof gains nothing: it has not got that process's key pair.

CURVE also requires that who connects knows the public key of the job's pair, which is never sent. This is not
relied on: some builds of ZeroMQ accept points of small order, for which no key is needed (RFC 7748, section
6.1).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

from netstorm.pslite.security.job_key import JobKey

__all__ = ["NUMBER_BYTES", "PROOF_BYTES", "ProcessProof", "fresh_number"]

NUMBER_BYTES: Final = 8
"""Of the random number of a connection."""

_DIGEST_BYTES: Final = 16
"""Each guess takes a connection and a handshake."""

PROOF_BYTES: Final = NUMBER_BYTES + _DIGEST_BYTES
"""Size of a proof: a number, and the digest."""

_PERSON: Final = b"netstorm process"


def fresh_number() -> bytes:
    """Return a number that no other connection has."""
    return secrets.token_bytes(NUMBER_BYTES)


class ProcessProof:
    """Makes and checks the proofs of one job."""

    __slots__ = ("_key",)

    def __init__(self, key: JobKey) -> None:
        self._key: Final = key.derive("processes")

    def fresh(self, public: bytes) -> bytes:
        """Return a proof for one connection of the process that has a public key."""
        number = fresh_number()
        return number + self._digest(number, public)

    def is_valid(self, proof: bytes, public: bytes) -> bool:
        """Return whether a proof comes from a holder of the job's key, and is about a public key."""
        number = proof[:NUMBER_BYTES]
        return len(proof) == PROOF_BYTES and hmac.compare_digest(
            proof[NUMBER_BYTES:], self._digest(number, public)
        )

    def _digest(self, number: bytes, public: bytes) -> bytes:
        return hashlib.blake2b(
            number + public, key=self._key, digest_size=_DIGEST_BYTES, person=_PERSON
        ).digest()
