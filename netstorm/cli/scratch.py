"""A temporary folder for a command; folders of killed commands are removed first.

A command locks its folder while it lives; the kernel releases the lock, however the command ends. So a folder
that is not locked is stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["PREFIX", "scratch_folder"]

PREFIX: Final = "netstorm-scratch-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make an empty folder among the system's temporary ones, and remove it at the end."""
    _remove_stale(Path(tempfile.gettempdir()))
    folder, lock = _made_and_locked()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _made_and_locked() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = _locked(folder, wait=True)
        if lock is not None:
            return folder, lock


def _locked(folder: Path, *, wait: bool) -> int | None:
    """Return the descriptor that locks a folder; None: another process holds the lock, or the folder is gone.

    Another process may remove the folder between its making and the lock; then its name no longer exists once
    the lock is held.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.path.samestat(os.fstat(descriptor), folder.lstat()):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):  # another user's, or gone by now
            if folder.lstat().st_uid != os.geteuid():
                continue
            lock = _locked(folder, wait=False)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
