"""What jobs with priorities know of each other's traffic on one host: a table in shared memory."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from netstorm import clock
from netstorm.errors import SettingsError

__all__ = ["SharedHostTraffic"]

_SLOTS: Final = 64
_WORDS: Final = 3
"""Of 8 bytes, of a slot: the process, its priority, and until when it sends, in ns."""
_LOCK_S: Final = 2.0
_FOLDER: Final = Path("/dev/shm")  # noqa: S108 - the table is private, and its owner is checked


class SharedHostTraffic:
    """One process's place in the table of its host. See `HostTraffic`.

    Processes of one user that share a network namespace and /dev/shm share a table: their traffic leaves
    through the same interfaces. A word is written in one piece, so readers need no lock. The place of a
    process that has ended is free again.
    """

    def __init__(self, priority: int, folder: Path = _FOLDER) -> None:
        """Take a place.

        Raises:
            SettingsError: there is no shared memory, or the table is not this user's own.
        """
        namespace = Path("/proc/self/ns/net").stat().st_ino
        path = folder / f"netstorm-traffic-{os.geteuid()}-{namespace}"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SettingsError(
                f"NETSTORM_JOB_PRIORITY needs shared memory: {path}: {error.strerror}"
            ) from None
        try:
            state = os.fstat(file)
            if state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o077:
                raise SettingsError(
                    f"NETSTORM_JOB_PRIORITY: {path} is not this user's alone; have it removed"
                )
            with _locked(file, path):
                os.ftruncate(file, 8 * _WORDS * _SLOTS)
                self._words: Final = memoryview(mmap.mmap(file, 8 * _WORDS * _SLOTS)).cast("q")
                self._at: Final = self._free_place()
                if self._at < 0:
                    raise SettingsError(f"NETSTORM_JOB_PRIORITY: {_SLOTS} processes use {path} already")
                self._words[self._at + 2] = 0
                self._words[self._at + 1] = priority
                self._words[self._at] = os.getpid()
        finally:
            os.close(file)
        self._priority: Final = priority

    def higher_s(self) -> float:
        """See `HostTraffic`."""
        words, latest = self._words, 0
        for at in range(0, _WORDS * _SLOTS, _WORDS):
            if words[at + 2] > latest and words[at + 1] > self._priority:
                latest = words[at + 2]
        return max(0.0, latest * 1e-9 - clock.monotonic())

    def sends(self, seconds: float) -> None:
        """See `HostTraffic`."""
        self._words[self._at + 2] = int((clock.monotonic() + seconds) * 1e9)

    def _free_place(self) -> int:
        words, own = self._words, os.getpid()
        places = range(0, _WORDS * _SLOTS, _WORDS)
        return next((at for at in places if words[at] in (0, own) or not _lives(words[at])), -1)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def _locked(file: int, path: Path) -> Iterator[None]:
    deadline = clock.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if clock.monotonic() > deadline:
                raise SettingsError(f"NETSTORM_JOB_PRIORITY: another process keeps {path} locked") from None
            clock.sleep(0.01)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing does not do: the memory map has a copy of the descriptor
