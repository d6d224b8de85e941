"""Keys of a job and of its processes, and the files that hold them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from netstorm.errors import SettingsError, UsageError
from netstorm.observe.private_files import is_readable_by_others

__all__ = [
    "KEY_BYTES",
    "CurveKeys",
    "JobKey",
    "NodeKey",
    "SchedulerKey",
    "check_name",
    "key_of_text",
    "key_text",
    "secret_text",
]


# The job's key: one secret that every process of a job holds, and all that is derived from it; and the key
# that only its schedulers hold.
#
# Whoever holds the key can join the job, read its gradients and change them. For each purpose another key is
# derived, so no two uses of the secret can interfere.

_JOB_KIND: Final = "job key"

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
        return cls(_load(path, _JOB_KIND))

    def write(self, path: Path) -> None:
        """Write the key to a new file, which only its owner can read.

        Raises:
            SettingsError: there is such a file, or it cannot be written.
        """
        write_secret_file(path, _JOB_KIND, {"secret": key_text(self.secret)})

    def file_text(self) -> str:
        """Return the contents of the key's file, for those who hand it over without one."""
        return secret_text(_JOB_KIND, {"secret": key_text(self.secret)})

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


# A node's own key: it has a name, and an allow list can admit it or not.

_NODE_KIND: Final = "node key"

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> str:
    """Return the name of a node's key, if it can be one.

    Raises:
        ValueError: it cannot; the message shows what was expected.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r}: expected a name of 1 to 64 letters, digits, dots, dashes or underscores")
    return name


@dataclass(frozen=True, slots=True)
class NodeKey:
    """The key of one node. Its text does not show the secret."""

    name: str
    keys: CurveKeys = field(repr=False)

    @property
    def line(self) -> str:
        """The line of an allow list that admits this key."""
        return f"{self.name} {key_text(self.keys.public)}"

    @classmethod
    def create(cls, path: Path, name: str) -> NodeKey:
        """Make a fresh key, and its file, which only its owner can read.

        Raises:
            UsageError: `name` cannot be a name.
            SettingsError: there is such a file, or it cannot be written.
        """
        try:
            key = cls(check_name(name), CurveKeys.fresh())
        except ValueError as error:
            raise UsageError(f"--node {error}") from None
        write_secret_file(path, _NODE_KIND, {"name": name, "secret": key_text(key.keys.secret)})
        return key

    @classmethod
    def load(cls, path: Path) -> NodeKey:
        """Return the key of a file.

        Raises:
            SettingsError: it cannot be read, others can read it, or it is no node key.
        """
        fields = read_secret_file(path, _NODE_KIND, ("name", "secret"))
        try:
            return cls(check_name(fields["name"]), CurveKeys.from_secret(key_of_text(fields["secret"])))
        except ValueError as error:
            raise SettingsError(f"{path}: the {_NODE_KIND} has {error}; make a new key") from None


# Key pairs of CURVE, ZeroMQ's encryption on elliptic curves (RFC 26, curvezmq.org).

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


# Files that hold a secret: made for their owner alone, and refused if others can read them.
#
# A file is a JSON object that says what it is, so that one kind of key is never taken for another one, and a
# later version is refused by name. Messages about a file never repeat its contents.

_VERSION: Final = 1

_MOST_BYTES: Final = 4096
"""A key file has about 200; what is larger is some other file."""


def write_secret_file(path: Path, kind: str, fields: Mapping[str, str]) -> None:
    """Write a new file that only its owner can read. An existing one is never replaced: a job may need it.

    Raises:
        SettingsError: there is such a file, or it cannot be written.
    """
    text = secret_text(kind, fields)
    try:
        # O_EXCL also refuses a link that somebody else has put there.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise SettingsError(
            f"{path}: there is such a file; a key is never overwritten: name another file, or remove it"
        ) from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot write the key: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)  # whatever the umask says
            file.write(text)
    except OSError as error:  # the disk is full
        path.unlink()
        raise SettingsError(f"{path}: cannot write the key: {error.strerror}") from None


def secret_text(kind: str, fields: Mapping[str, str]) -> str:
    """Return the contents of a file."""
    return json.dumps({"netstorm": kind, "version": _VERSION, **fields}, indent=1) + "\n"


_piped: dict[tuple[int, int], bytes] = {}
"""What was read from pipes, by device and inode: a pipe can be read once, and several parts need the key."""


def read_secret_file(path: Path, kind: str, fields: tuple[str, ...]) -> dict[str, str]:
    """Return the fields of a file. It may be a pipe, such as /dev/stdin or /dev/fd/3.

    Raises:
        SettingsError: it cannot be read, others can read it, or it is no file of this kind.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot read the {kind}: {error.strerror}; `netstorm keys new` makes one"
        ) from None
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if is_readable_by_others(state):
            raise SettingsError(
                f"{path}: mode {stat.S_IMODE(state.st_mode):04o} lets others read the {kind}: expected 0600 "
                f"(or 0440, of root, with a group of this process): `chmod 600 {path}`, and make a new key "
                "if others may have read this one"
            )
        try:
            content = _piped.get((state.st_dev, state.st_ino)) or file.read(_MOST_BYTES)
        except OSError as error:
            raise SettingsError(f"{path}: cannot read the {kind}: {error.strerror}") from None
        if stat.S_ISFIFO(state.st_mode):
            _piped[state.st_dev, state.st_ino] = content
    return _fields_of(content, path, kind, fields)


def _fields_of(content: bytes, path: Path, kind: str, fields: tuple[str, ...]) -> dict[str, str]:
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    what = document.get("netstorm") if isinstance(document, dict) else None
    if not isinstance(document, dict) or what != kind:
        is_other = (
            f"it is a {what}" if what in ("job key", "node key", "scheduler key") else "it is something else"
        )
        raise SettingsError(f"{path}: expected a {kind} as `netstorm keys new` makes it, but {is_other}")
    if document.get("version") != _VERSION:
        raise SettingsError(
            f"{path}: version {document.get('version')!r} of a {kind}: expected {_VERSION}, which this "
            "release of NetStorm reads"
        )
    missing = [name for name in fields if not isinstance(document.get(name), str)]
    if missing:
        raise SettingsError(f"{path}: the {kind} has no text under {', '.join(missing)}: make a new one")
    return {name: document[name] for name in fields}
