"""The job's key: one secret that every process of a job holds, and all that is derived from it; and the key
that only its schedulers hold.

Whoever holds the key can join the job, read its gradients and change them. For each purpose another key is
derived, so no two uses of the secret can interfere.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from netstorm.errors import SettingsError, UsageError
from netstorm.pslite.security.curve import KEY_BYTES, CurveKeys, key_of_text, key_text
from netstorm.pslite.security.key_files import read_secret_file, secret_text, write_secret_file

__all__ = ["JobKey", "SchedulerKey"]

_KIND: Final = "job key"

_SCHEDULER_KIND: Final = "scheduler key"
_PERSON: Final = b"netstorm job 1"
"""Separates these derivations from all others that use BLAKE2b (RFC 7693, personalisation)."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """The key of one job. Its text does not show the secret."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise UsageError(f"a job key of {len(self.secret)} bytes: expected {KEY_BYTES}")

    @classmethod
    def fresh(cls) -> JobKey:
        """Return a key that nobody else has."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def create(cls, path: Path) -> JobKey:
        """Make a fresh key, and its file, which only its owner can read.

        Raises:
            SettingsError: there is such a file, or it cannot be written.
        """
        key = cls.fresh()
        key.write(path)
        return key

    @classmethod
    def load(cls, path: Path) -> JobKey:
        """Return the key of a file.

        Raises:
            SettingsError: it cannot be read, others can read it, or it is no job key.
        """
        return cls(_load(path, _KIND))

    def write(self, path: Path) -> None:
        """Write the key to a new file, which only its owner can read.

        Raises:
            SettingsError: there is such a file, or it cannot be written.
        """
        write_secret_file(path, _KIND, {"secret": key_text(self.secret)})

    def file_text(self) -> str:
        """Return the contents of the key's file, for those who hand it over without one."""
        return secret_text(_KIND, {"secret": key_text(self.secret)})

    def derive(self, purpose: str) -> bytes:
        """Return the key of 32 bytes for one purpose; from it neither the secret nor another key follows."""
        return hashlib.blake2b(
            purpose.encode(), key=self.secret, digest_size=KEY_BYTES, person=_PERSON
        ).digest()

    def curve_keys(self) -> CurveKeys:
        """Return the key pair with which processes that accept connections prove that they hold the key."""
        return CurveKeys.from_secret(self.derive("curve"))


@dataclass(frozen=True, slots=True)
class SchedulerKey:
    """The key of a job's schedulers: with it one of them takes over from another, and no node can."""

    secret: bytes = field(repr=False)

    @classmethod
    def create(cls, path: Path) -> SchedulerKey:
        """Make a fresh key, and its file, which only its owner can read.

        Raises:
            SettingsError: there is such a file, or it cannot be written.
        """
        key = cls(secrets.token_bytes(KEY_BYTES))
        write_secret_file(path, _SCHEDULER_KIND, {"secret": key_text(key.secret)})
        return key

    @classmethod
    def load(cls, path: Path) -> SchedulerKey:
        """Return the key of a file.

        Raises:
            SettingsError: it cannot be read, others can read it, or it is no scheduler key.
        """
        return cls(_load(path, _SCHEDULER_KIND))

    @classmethod
    def fresh(cls) -> SchedulerKey:
        """Return a key that nobody else has."""
        return cls(secrets.token_bytes(KEY_BYTES))


def _load(path: Path, kind: str) -> bytes:
    text = read_secret_file(path, kind, ("secret",))["secret"]
    try:
        return key_of_text(text)
    except ValueError as error:
        raise SettingsError(f"{path}: the secret of the {kind} has {error}; make a new key") from None
