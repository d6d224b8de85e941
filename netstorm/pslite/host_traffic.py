"""What jobs with priorities know of each other's traffic from one host: a table in shared memory."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from netstorm import clock
from netstorm.errors import SettingsError
from netstorm.pslite.sending import LinkTraffic

__all__ = ["SharedLinkTraffic", "SharedTraffic"]

_log = logging.getLogger(__name__)

_ROWS: Final = 2048
_WORDS: Final = 4
"""Of 8 bytes, of a row: a process, its priority, the host that it sends to, and until when, in ns."""
_HEADER: Final = 1
"""Words before the rows: how often a row was taken."""
_BYTES: Final = 8 * (_HEADER + _WORDS * _ROWS)
_LOCK_S: Final = 2.0
_FOLDER: Final = Path("/dev/shm")  # noqa: S108 - the table is private, and its owner is checked


class SharedTraffic:
    """`HostTraffic` of a real process.

    Processes of one user that share a network namespace and /dev/shm share a table: their traffic leaves
    through the same interfaces. A word is written in one piece, so readers need no lock. The rows of a
    process that has ended are free again.
    """

    def __init__(self, priority: int, folder: Path = _FOLDER) -> None:
        """Open the table, or make it.

        Raises:
            SettingsError: there is no shared memory, or the table is not this user's own.
        """
        namespace = Path("/proc/self/ns/net").stat().st_ino
        self._path: Final = folder / f"netstorm-traffic-{os.geteuid()}-{namespace}"
        self._priority: Final = priority
        with self._locked() as file:
            os.ftruncate(file, _BYTES)
            self._words: Final = memoryview(mmap.mmap(file, _BYTES)).cast("q")

    def towards(self, host: str) -> LinkTraffic:
        """See `HostTraffic`. A job goes on without its priority where the table has no room."""
        try:
            return self._take_row(host)
        except SettingsError as error:
            _log.warning("no priority towards %s: %s", host, error)
            return _Unshared()

    def _take_row(self, host: str) -> SharedLinkTraffic:
        words, own = self._words, os.getpid()
        link = int.from_bytes(hashlib.blake2b(host.encode(), digest_size=8).digest(), "little", signed=True)
        with self._locked():
            rows = range(_HEADER, len(words), _WORDS)
            row = next((at for at in rows if words[at] == own and words[at + 2] == link), -1)
            if row < 0:
                row = next((at for at in rows if not words[at] or not _lives(words[at])), -1)
            if row < 0:
                raise SettingsError(f"NETSTORM_JOB_PRIORITY: {self._path} has no free row of {_ROWS}")
            words[row + 3] = 0
            words[row + 1], words[row + 2], words[row] = self._priority, link, own
            words[0] += 1
        return SharedLinkTraffic(words, row)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the table's lock; yield the descriptor of its file."""
        path, deadline = self._path, clock.monotonic() + _LOCK_S
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
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if clock.monotonic() > deadline:
                    raise SettingsError(f"NETSTORM_JOB_PRIORITY: another process keeps {path} locked")
                clock.sleep(0.01)
            yield file
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(
                    file, fcntl.LOCK_UN
                )  # closing does not: a memory map has a copy of the descriptor
            os.close(file)


class SharedLinkTraffic:
    """`LinkTraffic` of a real process: one row, and those of others for the same link."""

    def __init__(self, words: memoryview[int], row: int) -> None:
        self._words: Final = words
        self._row: Final = row
        self._taken = -1
        """How often a row had been taken when `_higher` was found."""
        self._higher: list[int] = []
        """Rows of higher priority for the same link."""

    def higher_s(self) -> float:
        """See `LinkTraffic`."""
        words, own = self._words, self._row
        if words[0] != self._taken:
            self._taken = words[0]
            self._higher = [
                at
                for at in range(_HEADER, len(words), _WORDS)
                if words[at + 2] == words[own + 2] and words[at + 1] > words[own + 1] and words[at]
            ]
        if not self._higher:
            return 0.0
        return max(0.0, max(words[at + 3] for at in self._higher) * 1e-9 - clock.monotonic())

    def sends(self, seconds: float) -> None:
        """See `LinkTraffic`."""
        self._words[self._row + 3] = int((clock.monotonic() + seconds) * 1e9)


class _Unshared:
    """`LinkTraffic` that nobody hears of."""

    def higher_s(self) -> float:
        """See `LinkTraffic`."""
        return 0.0

    def sends(self, seconds: float) -> None:
        """See `LinkTraffic`."""


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
