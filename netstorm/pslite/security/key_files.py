"""Files that hold a secret: made for their owner alone, and refused if others can read them.

A file is a JSON object that says what it is, so that one kind of key is never taken for another one, and a
later version is refused by name. Messages about a file never repeat its contents.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from netstorm.errors import SettingsError
from netstorm.observe.private_files import is_readable_by_others

__all__ = ["read_secret_file", "secret_text", "write_secret_file"]

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
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        os.fchmod(descriptor, 0o600)  # whatever the umask says
        file.write(text)


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
        found = json.loads(content)
    except ValueError:
        found = None
    what = found.get("netstorm") if isinstance(found, dict) else None
    if not isinstance(found, dict) or what != kind:
        is_other = (
            f"it is a {what}" if what in ("job key", "node key", "scheduler key") else "it is something else"
        )
        raise SettingsError(f"{path}: expected a {kind} as `netstorm keys new` makes it, but {is_other}")
    if found.get("version") != _VERSION:
        raise SettingsError(
            f"{path}: version {found.get('version')!r} of a {kind}: expected {_VERSION}, which this release "
            "of NetStorm reads"
        )
    missing = [name for name in fields if not isinstance(found.get(name), str)]
    if missing:
        raise SettingsError(f"{path}: the {kind} has no text under {', '.join(missing)}: make a new one")
    return {name: found[name] for name in fields}
