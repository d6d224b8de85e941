"""The registry of emulated networks on this machine: a locked file for each that is up.

A network's daemon holds the lock of its file while it lives; the kernel releases it, however the daemon ends.
So a file that is not locked is stale: a crashed network has left it, and its namespaces are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from netstorm.emulation.layout import PREFIX
from netstorm.emulation.namespaces import existing, remove
from netstorm.emulation.reports import NetworkEntry
from netstorm.errors import UsageError

__all__ = ["FOLDER", "KEEP", "Claim", "read_entry", "remove_stale", "running", "socket_path"]

KEEP: Final = b"keep\n"
"""Written to a daemon's standard input: from now on the network outlives the process that started it."""
FOLDER: Final = Path("/run/netstorm-wan")
_LOCK: Final = Path("/run/netstorm-wan.lock")
_NAMESPACE: Final = re.compile(re.escape(PREFIX) + r"(.+)-r\d+")


class Claim:
    """The name of an emulated network, reserved by this process until it ends."""

    def __init__(self, name: str) -> None:
        """Reserve a name, and remove what crashed networks have left.

        Raises:
            UsageError: a network of that name is up.
        """
        self.name: Final = name
        with _registry_lock():
            _remove_stale()
            FOLDER.mkdir(mode=0o700, exist_ok=True)
            if _is_locked(_file(name)):
                raise UsageError(
                    f"an emulated network {name!r} is up already: `netstorm wan down --name {name}` ends it"
                )
            self._descriptor = os.open(_file(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def write(self, entry: NetworkEntry) -> None:
        """Publish the network's entry, for `read_entry` in other processes."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(entry).encode(), 0)

    def release(self) -> None:
        """Release the name, after everything else is removed."""
        with _registry_lock():
            for path in (_file(self.name), socket_path(self.name)):
                path.unlink(missing_ok=True)
            os.close(self._descriptor)
            with contextlib.suppress(OSError):
                FOLDER.rmdir()  # if it is empty


def socket_path(name: str) -> Path:
    """Return the path of the socket of a network's daemon."""
    return FOLDER / f"{name}.sock"


def running() -> list[str]:
    """Return the names of the networks that are up."""
    if not FOLDER.is_dir():
        return []
    return sorted(path.stem for path in FOLDER.glob("*.json") if _is_locked(path))


def read_entry(name: str) -> NetworkEntry:
    """Return the entry of a network that is up.

    Raises:
        UsageError: none of that name is up.
    """
    if not _is_locked(_file(name)):
        names = running()
        hint = (
            f"; up are: {', '.join(names)} (--name)"
            if names
            else "; start it with `netstorm wan up NETWORK.yaml`"
        )
        raise UsageError(f"no emulated network {name!r} is up{hint}")
    try:
        entry: NetworkEntry = json.loads(_file(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(f"the emulated network {name!r} is being made, or taken down; try again") from None
    return entry


def remove_stale() -> list[str]:
    """Remove what crashed networks have left, and return their names."""
    if not FOLDER.is_dir() and not existing(PREFIX):
        return []
    with _registry_lock():
        return _remove_stale()


def _remove_stale() -> list[str]:
    namespaces: dict[str, list[str]] = {}
    for namespace in existing(PREFIX):
        match = _NAMESPACE.fullmatch(namespace)
        if match is not None:
            namespaces.setdefault(match.group(1), []).append(namespace)
    for path in FOLDER.glob("*.json"):
        namespaces.setdefault(path.stem, [])
    stale = [name for name in sorted(namespaces) if not _is_locked(_file(name))]
    for name in stale:
        remove(namespaces[name])
        for path in (_file(name), socket_path(name)):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        FOLDER.rmdir()
    return stale


def _file(name: str) -> Path:
    return FOLDER / f"{name}.json"


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def _registry_lock() -> Iterator[None]:
    # Only who may open a file can lock it. It is never removed, so that all lock the same one.
    descriptor = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
