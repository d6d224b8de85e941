"""Files that only the owner of the process can read: what is known of a job is not for all users."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["open_private", "write_private"]

_MODE: Final = 0o600
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def open_private(path: Path, flags: int) -> int:
    """Open a file for writing, and make it if it is not there; return its descriptor.

    A file of before that others can read is closed to them first. What is no regular file, such as /dev/null
    or a pipe, is left as it is.

    Args:
        path: of the file.
        flags: besides os.O_WRONLY and os.O_CREAT.

    Raises:
        OSError: it cannot be written, or it is somebody else's and open to others.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, _MODE)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode) and mode & _OTHERS:
            os.fchmod(descriptor, _MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_private(path: Path, content: bytes) -> None:
    """Write a file, instead of what was in it before.

    Raises:
        OSError: as `open_private`.
    """
    with os.fdopen(open_private(path, os.O_TRUNC), "wb") as file:
        file.write(content)
