"""The file of a replay log: opening, locking, and appending records."""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from netstorm.errors import UsageError
from netstorm.observe.private_files import open_private
from netstorm.scheduler.replay_log.records import MAGIC, Record, encode, read
from netstorm.scheduler.replay_log.replay import ReplayedJob

__all__ = ["StateFile", "boot_identity"]

_log = logging.getLogger(__name__)

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_identity() -> str:
    """Return an identity that changes when the host is started again; empty if the system has none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


class StateFile:
    """The replay log of one job. It must be closed.

    The operating system has a record before any node is told what it says, so the end of this process loses
    nothing. All records of one event are one write (measured: 2 µs). Records are not forced to the disk: a
    crash of the host may lose some, so a log from before the host's last start is refused.

    Attributes:
        path: of the file.
        replayed: the job as another process left it; None: the file was empty, or the job is over.
    """

    def __init__(self, folder: Path, job: str) -> None:
        """Open the log of a job, or create it.

        Raises:
            UsageError: the folder cannot be used, or the file is not such a log; says what to do.
        """
        self.path: Final = folder / _file_name(job)
        self._file: int | None = None
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            self._file = open_private(self.path, 0)
            self.replayed: Final = self._begin(self._file)
        except OSError as error:
            self.close()
            raise UsageError(
                f"NETSTORM_STATE_DIR={str(folder)!r}: {error.strerror} ({self.path}); it must be a folder in "
                "which files can be written"
            ) from None
        except UsageError:
            self.close()
            raise

    def _begin(self, file: int) -> ReplayedJob | None:
        self._lock(file)
        records, size = read(self.path.read_bytes(), str(self.path))
        job = ReplayedJob.replay(records, str(self.path))
        if job is not None and _file_name(job.began.job) != self.path.name:
            raise UsageError(
                f"{self.path} is the log of job {job.began.job!r}, whose file is "
                f"{_file_name(job.began.job)!r}: give that job (NETSTORM_JOB), or another NETSTORM_STATE_DIR"
            )
        if job is not None and job.began.boot != boot_identity():
            raise UsageError(
                f"{self.path} was written before this machine was last started, and may lack its end: its "
                "job cannot be taken over from it, but from its nodes, if they still wait (netstorm "
                "scheduler --recover); remove the file to begin anew"
            )
        os.truncate(file, 0 if job is None else size)
        os.lseek(file, 0, os.SEEK_END)
        if job is None:
            _write_all(file, MAGIC)
        return job

    def _lock(self, file: int) -> None:
        """Keep other schedulers from the file while this process lives."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{self.path} is in use by another scheduler: give each a NETSTORM_STATE_DIR of its own, or "
                "jobs different names (NETSTORM_JOB)"
            ) from None

    def write(self, records: Iterable[Record]) -> None:
        """Append records. If that fails the log is removed: the job goes on, but not from this log."""
        if self._file is None:
            return
        try:
            _write_all(self._file, encode(records))
        except OSError as error:
            left = self._give_up()
            _log.error(
                "%s: %s; the job goes on, but no scheduler can be started again with this log%s; one can "
                "take the job over from its nodes (netstorm scheduler --recover)",
                self.path,
                error.strerror,
                left,
            )

    def _give_up(self) -> str:
        """Remove a log that lacks its end, and return what the user must do if that fails, too."""
        self.close()
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:  # a file system that has become read-only
            return f", which lacks its end: remove it, which failed here ({error.strerror})"
        return ""

    def close(self) -> None:
        """Close the file. Twice does no harm."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _file_name(job: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", job) + ".log"


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
