"""The folder of a job's checkpoints: whole files that survive a loss of power, lists, removal."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from netstorm.checkpoint.checksums import Bytes
from netstorm.checkpoint.names import MANIFEST, folder_of_step, step_of_folder
from netstorm.errors import CheckpointError

__all__ = [
    "claim_step",
    "complete_by_step",
    "explained_errors",
    "make_folder",
    "remove_checkpoint",
    "sync_folder",
    "write_whole",
]

_OWN: Final = 0o700

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
def explained_errors(path: Path) -> Iterator[None]:
    """Within this, an error of the operating system names the file, and says what to do."""
    try:
        yield
    except OSError as error:
        file = error.filename2 or error.filename or path
        advice = _ADVICE.get(error.errno or 0)
        raise CheckpointError(
            f"checkpoint {file}: {error.strerror or error}" + (f"; {advice}" if advice else "")
        ) from error


def write_whole(path: Path, data: Bytes) -> None:
    """Write a file that is there with all its bytes, on the disk, or not there at all. Its owner alone can
    read it: a model is not for all users of a machine.

    The caller must `sync_folder` before it relies on the file's name.

    Raises:
        CheckpointError: why it cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    with explained_errors(path):
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


def sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk."""
    with explained_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def complete_by_step(base: Path) -> dict[int, bool]:
    """Return which steps have a checkpoint in a folder, and whether it is complete; none if it is missing.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    found = {}
    with explained_errors(base):
        if not base.exists():
            return {}
        for entry in base.iterdir():
            step = step_of_folder(entry.name)
            if step is not None:
                found[step] = (entry / MANIFEST).exists()
    return found


def claim_step(base: str | Path, least: int | None) -> int:
    """Make the folder of a new checkpoint in another one, and return its step: after those of all others, and
    not before `least`. No other process gets the same.

    Raises:
        CheckpointError: the folder cannot be read or written.
    """
    folder = Path(base)
    with explained_errors(folder):
        make_folder(folder)
        while True:
            step = max(max(complete_by_step(folder), default=-1) + 1, least or 0)
            with contextlib.suppress(FileExistsError):  # another process was faster
                (folder / folder_of_step(step)).mkdir(_OWN)
                return step


def make_folder(folder: Path) -> None:
    """Make a folder for its owner alone, if it is not there; one that is there stays as it is."""
    folder.mkdir(_OWN, parents=True, exist_ok=True)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, its manifest first: what is half-removed is not complete."""
    with explained_errors(folder):
        (folder / MANIFEST).unlink(missing_ok=True)
        sync_folder(folder)
        shutil.rmtree(folder)
