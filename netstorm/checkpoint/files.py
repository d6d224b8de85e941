"""Files of checkpoints: each is there whole or not at all, and every byte is checked when it is read.

Ranks that write one checkpoint meet in its folder alone: by then the training goes on, and its calls must not
mix with these. Each writes its file, and then another one that says so. The first waits for all of these, and
writes the index.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from netstorm import clock
from netstorm.checkpoint.format import (
    INDEX,
    Bytes,
    File,
    Index,
    ValueTree,
    checksum,
    decode_index,
    encode_index,
    folder_of_step,
    numbered_file,
    step_of_folder,
    superfluous,
)
from netstorm.errors import CheckpointError, NetStormError, WaitTimeout

__all__ = [
    "Found",
    "ShareWriter",
    "claim_step",
    "complete_by_step",
    "find_checkpoint",
    "latest_step",
    "read_files",
]

_log = logging.getLogger(__name__)

_OWN: Final = 0o700
_FORMER_INDEX: Final = "manifest.json"
"""Of the first format, which only `netstorm checkpoint convert` reads."""
_FIRST_CHECK_S: Final = 0.01
_LONGEST_CHECK_S: Final = 0.5
"""Between two looks at the folder: the time doubles, as others' shares take milliseconds or minutes."""
_LEFT_S: Final = 10.0
"""How long to wait for a rank that has left the job: its thread may still write, if its process lives."""

_ADVICE: Final = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints (keep=N)",
    errno.EDQUOT: "free some space, or keep fewer checkpoints (keep=N)",
    errno.EROFS: "choose a folder on a file system that is mounted for writing",
    errno.EACCES: "the job's user must be allowed to read and write there",
    errno.EPERM: "the job's user must be allowed to read and write there",
    errno.ENOTDIR: "give the path of a folder",
    errno.EEXIST: "give the path of a folder",
    errno.EIO: "the disk or the network file system fails; see the system's log",
}


@contextlib.contextmanager
def _explained_errors(path: Path) -> Iterator[None]:
    """Within this, an error of the operating system names the file, and says what to do."""
    try:
        yield
    except OSError as error:
        file = error.filename2 or error.filename or path
        advice = _ADVICE.get(error.errno or 0)
        raise CheckpointError(
            f"checkpoint {file}: {error.strerror or error}" + (f"; {advice}" if advice else "")
        ) from error


def _write_whole(path: Path, data: Bytes) -> None:
    """Write a file that is there with all its bytes, on the disk, or not there at all. Its owner alone can
    read it: a model is not for all users of a machine.

    The caller must `_sync` the folder before it relies on the file's name.
    """
    temporary = path.with_name(path.name + ".tmp")
    with _explained_errors(path):
        try:
            temporary.unlink(missing_ok=True)  # that an attempt before has left
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _sync(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    with _explained_errors(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Make a folder for its owner alone, if it is not there; one that is there stays as it is."""
    folder.mkdir(_OWN, parents=True, exist_ok=True)


def complete_by_step(base: Path) -> dict[int, bool]:
    """Return which steps have a checkpoint in a folder, and whether it is complete; none if it is missing.

    Raises:
        CheckpointError: the folder cannot be read, or has checkpoints of the former format.
    """
    steps = {}
    with _explained_errors(base):
        for entry in base.iterdir() if base.exists() else ():
            step = step_of_folder(entry.name)
            if step is not None:
                steps[step] = (entry / INDEX).exists()
                if not steps[step] and (entry / _FORMER_INDEX).exists():
                    raise CheckpointError(
                        f"{entry} has the format that NetStorm wrote until 0.2: go on in a new folder, which "
                        f"`netstorm checkpoint convert {base} NEW` makes of {base}"
                    )
    return steps


def claim_step(base: str | Path, least: int | None) -> int:
    """Make the folder of a new checkpoint in another one, and return its step: after those of all others, and
    not before `least`. No other process gets the same.

    Raises:
        CheckpointError: the folder cannot be read or written.
    """
    folder = Path(base)
    with _explained_errors(folder):
        _make_folder(folder)
        while True:
            step = max(max(complete_by_step(folder), default=-1) + 1, least or 0)
            with contextlib.suppress(FileExistsError):  # another process was faster
                (folder / folder_of_step(step)).mkdir(_OWN)
                return step


# ---------------------------------------------------------------------------------------------------- writing


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has written."""

    file: File
    own: ValueTree | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareWriter:
    """Writes one rank's share. For a thread of its own."""

    base: Path
    """Folder of the job's checkpoints."""
    index: Index
    """Of the checkpoint, without what comes of files."""
    ranks: Sequence[int]
    """Those that write a share, ascending; the first of them completes the checkpoint."""
    place: int
    """Of this process among them."""
    share: Bytes
    """Of its file."""
    own: ValueTree | None
    """What this rank keeps for itself; the tensors are in the share."""
    keep: int | None
    """Number of complete checkpoints to keep; None: all."""
    timeout_s: float
    """Longest wait for the other ranks."""
    is_leaving: Callable[[], bool]
    """Whether the program is over; ranks but the first then wait for nobody."""
    has_left: Callable[[int], bool] = lambda _: False
    """Whether the process that was a rank at the beginning has left the job; any thread may ask."""

    def run(self) -> Path:
        """Write, wait, and return the checkpoint's folder once the checkpoint is complete.

        Raises:
            CheckpointError: a file cannot be written, here or at another rank.
            WaitTimeout: names the ranks whose shares are missing.
        """
        try:
            with _explained_errors(self._folder):
                _make_folder(self.base)
                if self.place == 0:
                    self._check_job()
                _make_folder(self._folder)
            self._write_share()
            if self.place == 0:
                self._complete(self._wait_for_parts())
            else:
                self._wait_for_index()
        except NetStormError as error:  # nobody shall wait in vain; a full disk may prevent that
            with contextlib.suppress(NetStormError):
                _write_whole(self._path("failed.txt", self.place), str(error).encode())
            raise
        return self._folder

    @property
    def _folder(self) -> Path:
        return self.base / folder_of_step(self.index.step)

    def _path(self, kind: str, place: int) -> Path:
        return self._folder / numbered_file(kind, place, len(self.ranks), self.index.token)

    def _write_share(self) -> None:
        path = self._path("model.safetensors", self.place)
        _write_whole(path, self.share)
        _sync(self._folder)
        file = File(
            file=path.name,
            bytes=len(self.share),
            crc32c=f"{checksum(self.share):08x}",
            rank=self.ranks[self.place],
        )
        part = msgspec.json.encode(_Part(file=file, own=self.own))
        _write_whole(self._path("part.json", self.place), part)

    def _wait_for_index(self) -> None:
        """Wait until the first rank has completed the checkpoint."""
        path = self._folder / INDEX

        def is_complete() -> bool:
            with contextlib.suppress(FileNotFoundError):  # one of the same step may be of another attempt
                if decode_index(path.read_bytes(), str(path)).token == self.index.token:
                    return True
            return self.is_leaving()

        if not self._wait(is_complete, lambda: (0,)):
            raise WaitTimeout(
                f"{self._folder} has no index after {self.timeout_s:g} s: rank {self.ranks[0]} writes it "
                "when all shares are there; its own error says what it waits for"
            )

    def _wait(self, condition: Callable[[], bool], places: Callable[[], Iterable[int]]) -> bool:
        """Return whether a condition has come true in time.

        Args:
            condition: looks at the folder.
            places: those that are waited for.

        Raises:
            CheckpointError: one of them has reported an error, or has left the job.
        """
        left_at: dict[int, float] = {}
        deadline = clock.monotonic() + self.timeout_s
        delay = _FIRST_CHECK_S
        while True:
            with _explained_errors(self._folder):
                if condition():
                    return True
                for place in places():
                    self._check_place(place, left_at)
            left = deadline - clock.monotonic()
            if left <= 0:
                return False
            clock.sleep(min(delay, left))
            delay = min(2 * delay, _LONGEST_CHECK_S)

    def _check_place(self, place: int, left_at: dict[int, float]) -> None:
        """Raise the error that a rank has reported, or one if it left the job some time ago."""
        rank = self.ranks[place]
        reported = self._path("failed.txt", place)
        if place != self.place and reported.exists():
            raise CheckpointError(f"{self._folder} is not complete: rank {rank} says: {reported.read_text()}")
        now = clock.monotonic()
        if self.has_left(rank) and now - left_at.setdefault(place, now) > _LEFT_S:
            raise CheckpointError(f"{self._folder} is not complete: rank {rank} has left the job")

    # ----------------------------------------------------------------------------------------- the first rank

    def _check_job(self) -> None:
        """Refuse a folder that another job uses: each would remove what the other has written."""
        newest = latest_step(self.base)
        if newest is None:
            return
        path = self.base / folder_of_step(newest) / INDEX
        job = decode_index(path.read_bytes(), str(path)).job
        if job != self.index.job:
            raise CheckpointError(
                f"{self.base} has checkpoints of the job {job!r}, and this is job {self.index.job!r}: "
                "give each job a folder of its own, or set NETSTORM_JOB to go on with that job"
            )

    def _wait_for_parts(self) -> list[_Part]:
        missing = {place: self._path("part.json", place) for place in range(len(self.ranks))}
        parts: dict[int, _Part] = {}

        def are_there() -> bool:
            for place, path in list(missing.items()):
                if path.exists():
                    parts[place] = msgspec.json.decode(path.read_bytes(), type=_Part)
                    del missing[place]
            return not missing

        if not self._wait(are_there, lambda: list(missing)):
            ranks = ", ".join(str(self.ranks[place]) for place in sorted(missing))
            raise WaitTimeout(
                f"{self._folder} is not complete after {self.timeout_s:g} s: no share of rank {ranks}. Has "
                "it ended? Is the folder on a file system that all ranks share? If not, use shares=False: "
                "rank 0 then writes everything"
            )
        return [parts[place] for place in range(len(self.ranks))]

    def _complete(self, parts: Sequence[_Part]) -> None:
        own = tuple(part.own for part in parts if part.own is not None) or self.index.own
        own_files = {name: part.file.file for part in parts if part.own for name in part.own.tensors}
        index = msgspec.structs.replace(
            self.index,
            written_at=self.index.written_at or clock.wall(),
            files=tuple(part.file for part in parts),
            own=own if len(own) == self.index.world_size else (),
            weight_map={**self.index.weight_map, **own_files},
        )
        _write_whole(self._folder / INDEX, encode_index(index))
        _sync(self._folder)
        _sync(self.base)
        try:
            self._tidy({INDEX, *(file.file for file in index.files)})
        except CheckpointError as error:
            _log.warning("%s is complete, but what is no longer needed stays: %s", self._folder, error)

    def _tidy(self, needed: set[str]) -> None:
        """Remove what this checkpoint does not need, and the checkpoints that are not to be kept."""
        with _explained_errors(self._folder):
            for path in self._folder.iterdir():
                if path.name not in needed:
                    path.unlink(missing_ok=True)
            for step in superfluous(complete_by_step(self.base), self.keep):
                folder = self.base / folder_of_step(step)
                (folder / INDEX).unlink(missing_ok=True)  # first: what is half-removed is not complete
                _sync(folder)
                shutil.rmtree(folder)


# ---------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint, whose files have yet to be read."""

    folder: Path
    text: bytes
    """Its index as it is in the file."""
    index: Index


def latest_step(path: str | Path) -> int | None:
    """Return the step of the newest complete checkpoint in a folder; None: there is none.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return max((step for step, complete in complete_by_step(Path(path)).items() if complete), default=None)


def find_checkpoint(base: Path, step: int | None = None) -> Found | None:
    """Return the newest complete checkpoint, or that of `step`; None: there is none at all.

    Those that are half-written are skipped, with a warning.

    Raises:
        CheckpointError: the one of `step` is missing or half-written, or the index is damaged.
    """
    steps = complete_by_step(base)
    have = sorted(other for other, complete in steps.items() if complete)
    if step is not None and step not in have:
        why = "was only written in part" if step in steps else "does not exist"
        known = ", ".join(map(str, have)) or "none"
        raise CheckpointError(f"{base / folder_of_step(step)} {why}; complete ones are of steps: {known}")
    newest = step if step is not None else max(have, default=None)
    for other in sorted(steps, reverse=True):
        if step is None and not steps[other] and (newest is None or other > newest):
            _log.warning(
                "%s is skipped: it was only written in part (it has no index)", base / folder_of_step(other)
            )
    if newest is None:
        return None
    folder = base / folder_of_step(newest)
    with _explained_errors(folder / INDEX):
        text = (folder / INDEX).read_bytes()
    return Found(folder, text, decode_index(text, str(folder / INDEX)))


def read_files(found: Found) -> list[Bytes]:
    """Return the bytes of all files of a checkpoint, each in memory of its own, checked.

    Raises:
        CheckpointError: names a file that is missing or damaged.
    """
    return [_read(found.folder, file) for file in found.index.files]


def _read(folder: Path, file: File) -> Bytes:
    path = folder / file.file
    advice = f"restore it from a copy, or remove {folder} to use the checkpoint before it"
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing, though the index names it: {advice}") from None
    if size != file.bytes:
        raise CheckpointError(f"{path} has {size} bytes, and should have {file.bytes}: {advice}")
    into = np.empty(file.bytes, np.uint8).data
    with _explained_errors(path), path.open("rb", buffering=0) as stream:
        done = 0
        while done < file.bytes:
            count = stream.readinto(into[done:])
            if not count:
                raise CheckpointError(f"{path} ends after {done} bytes of {file.bytes}: {advice}")
            done += count
    if f"{checksum(into):08x}" != file.crc32c:
        raise CheckpointError(
            f"{path} is damaged: its checksum is {checksum(into):08x}, and should be {file.crc32c}: {advice}"
        )
    return into
