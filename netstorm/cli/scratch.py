"""A folder for what a command needs while it runs; what killed commands have left is removed first.

A folder is locked as long as its command lives, and the kernel lets the lock go however that ends. So what is
not locked is stale, whatever process ids say.
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
    """Return the descriptor that locks a folder; None: it is locked by others, or gone.

    Whoever makes a folder and whoever removes it may meet between the making and the lock; the folder's name
    then leads nowhere once the lock is had.
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
        with contextlib.suppress(OSError):  # another one's, or gone by now
            if folder.lstat().st_uid != os.geteuid():
                continue
            lock = _locked(folder, wait=False)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
