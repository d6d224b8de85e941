"""Files that only the user of a process can read: secrets, and what is known of a job."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["is_readable_by_others", "open_private", "write_private"]

_MODE: Final = 0o600
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def is_readable_by_others(state: os.stat_result) -> bool:
    """Return whether others than this process's user may use a file with a secret. What is no regular file,
    such as a pipe, is not asked.

    A container whose user is not root gets its secrets as files of root that a group of its processes may
    read, and do no more with: that is as private as they can be there.
    """
    others = stat.S_IMODE(state.st_mode) & _OTHERS
    if not stat.S_ISREG(state.st_mode) or not others:
        return False
    is_given = state.st_uid == 0 != os.geteuid() and state.st_gid in {os.getegid(), *os.getgroups()}
    return not (is_given and others == stat.S_IRGRP)


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
