"""Recordings: statuses of jobs in a file, a line of JSON each, as `netstorm top --json` prints them.

A file has a most size. When that is reached, every second status of it goes, and from then on every second
one that comes: so it always has the whole job, a long one in larger steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from netstorm.dashboard.history import History, JobEvent, Point, PolicyFrame
from netstorm.errors import UsageError
from netstorm.observe.private_files import open_private
from netstorm.protocol.frames import clean
from netstorm.scheduler.status import JobStatus

__all__ = ["JobRecord", "StatusRecorder", "page_data", "read_recording"]

_LONGEST_LINE: Final = 64 * 2**20
"""A full mesh of 512 measured nodes has 40 MB."""

PAGE_BYTES: Final = 8_000_000
"""Of all frames of a page: a browser reads them in 0.1 s."""


class StatusRecorder:
    """Writes a recording. Close it.

    Args:
        path: of the file; what is there is overwritten.
        most_bytes: of the file.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path: Final = path
        self._most: Final = most_bytes
        self._size = 0
        self._thinning: Final = _Thinning()
        self._file = self._open(path)

    def add(self, status: JobStatus) -> None:
        """Write a status, or leave it out.

        Raises:
            UsageError: the file cannot be written.
        """
        if not self._thinning.keeps(status.job):
            return
        line = msgspec.json.encode(status) + b"\n"
        try:
            if self._size + len(line) > self._most:
                self._thin()
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise UsageError(f"{self._path}: cannot be written: {error.strerror}") from None
        self._size += len(line)

    def close(self) -> None:
        """Close the file. Twice does no harm."""
        self._file.close()

    def _open(self, path: Path) -> BinaryIO:
        try:
            return os.fdopen(open_private(path, os.O_TRUNC), "wb")
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror}") from None

    def _thin(self) -> None:
        """Write the file anew with about half of its statuses. It is whole at any moment."""
        self._thinning.halve()
        again = _Thinning(every=2)
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        self._file.close()
        with self._open(draft) as file, self._path.open("rb") as before:
            for line in before:
                if again.keeps(msgspec.json.decode(line, type=_Named).job):
                    file.write(line)
            self._size = file.tell()
        draft.replace(self._path)
        self._file = os.fdopen(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), "ab")


class _Named(msgspec.Struct, frozen=True):
    """The part of a status that says whose it is."""

    job: str


class _Thinning:
    """Keeps the first of every so many statuses of each job."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self._next: Final[dict[str, int]] = {}
        """By job: how many statuses are left out before the next one is kept."""

    def keeps(self, job: str) -> bool:
        left = self._next.get(job, 0)
        self._next[job] = self.every - 1 if left == 0 else left - 1
        return left == 0

    def halve(self) -> None:
        self.every *= 2


def read_recording(path: Path) -> Iterator[JobStatus]:
    """Yield the statuses of a recording. A last line without an end is left out: its writer was killed.

    Raises:
        UsageError: the file cannot be read, or a line of it is no status.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                if not line.endswith(b"\n"):
                    return
                try:
                    yield clean(msgspec.json.decode(line, type=JobStatus))
                except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
                    raise UsageError(
                        f"{path}:{number}: expected a job's status, as netstorm record writes it: {error}"
                    ) from None
    except OSError as error:
        raise UsageError(f"{path}: the recording cannot be read: {error.strerror}") from None


class JobRecord(msgspec.Struct, kw_only=True):
    """One job of a recording, as the page shows it."""

    frames: list[msgspec.Raw]
    points: list[Point]
    events: list[JobEvent]
    policies: list[PolicyFrame]


def page_data(path: Path, most_bytes: int = PAGE_BYTES) -> dict[str, JobRecord]:
    """Return what the page shows of a recording, by job: as many frames, at equal steps, as have room.

    Raises:
        UsageError: the file is no recording, or has no status.
    """
    histories: dict[str, History] = {}
    frames: dict[str, list[msgspec.Raw]] = {}
    thinning, last, size = _Thinning(), dict[str, msgspec.Raw](), 0
    for status in read_recording(path):
        update = histories.setdefault(status.job, History()).add(status)
        last[status.job] = frame = msgspec.Raw(msgspec.json.encode(update.frame))
        if thinning.keeps(status.job):
            frames.setdefault(status.job, []).append(frame)
            size += len(frame)
        while size > most_bytes and any(len(kept) > 1 for kept in frames.values()):
            thinning.halve()
            frames = {job: kept[::2] for job, kept in frames.items()}
            size = sum(len(frame) for kept in frames.values() for frame in kept)
    if not histories:
        raise UsageError(f"{path}: expected a recording, a line of JSON a status; it has none")
    return {
        job: JobRecord(
            frames=frames[job] if frames[job][-1] is last[job] else [*frames[job], last[job]],
            points=history.points,
            events=history.events,
            policies=list(history.policies.values()),
        )
        for job, history in histories.items()
    }
