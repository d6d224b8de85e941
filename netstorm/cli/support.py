"""What several commands share: how usage errors are reported, addresses in options, sizes and times in
tables, the scheduler's lines for the launcher, temporary folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import typer

from netstorm.addresses import split_host_port
from netstorm.errors import UsageError
from netstorm.units import format_duration

__all__ = [
    "BEGUN",
    "PREFIX",
    "USAGE_ERROR",
    "came_line",
    "check_job",
    "exit_on_usage_error",
    "first_failure",
    "first_failure_line",
    "has_dashboard",
    "rank_that_came",
    "scratch_folder",
    "size_text",
    "split_address",
    "time_text",
]


# How a subcommand reports a usage error: one line on standard error and an exit code, no traceback.

USAGE_ERROR: Final = 2
"""Exit code when the user's settings or arguments are wrong: as getopt and typer do."""


@contextmanager
def exit_on_usage_error() -> Iterator[None]:
    """Turn a `UsageError` into its message and exit code 2."""
    try:
        yield
    except UsageError as error:
        typer.echo(f"netstorm: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from error


# Parses HOST:PORT of an option.


def has_dashboard() -> bool:
    """Return whether the extra netstorm[dashboard] is installed."""
    return all(find_spec(name) is not None for name in ("starlette", "uvicorn"))


def check_job(job: str | None, jobs: Collection[str], where: str) -> None:
    """Check that a job, if one is named, is one of those that are there.

    Raises:
        UsageError: it is not.
    """
    if job is not None and job not in jobs:
        known = [name for name in jobs if name]
        there = f"there are: {', '.join(known)}; type --job {known[0]}" if known else "there is none yet"
        raise UsageError(f"--job {job}: no such job {where}; {there}")


def split_address(address: str, option: str) -> tuple[str, int]:
    """Return host and port; http:// or https:// may stand in front.

    Raises:
        UsageError: it is not HOST:PORT; names the option.
    """
    try:
        return split_host_port(address.removeprefix("https://").removeprefix("http://").rstrip("/"))
    except ValueError as error:
        raise UsageError(f"{option} {address!r}: {error}") from None


# Durations and sizes in tables, as people read them.


def time_text(seconds: float) -> str:
    """Return a duration to three digits, which is more than a prediction is worth; minutes from ten on."""
    return f"{seconds:.3g}s" if 1 <= seconds < 600 else format_duration(float(f"{seconds:.3g}"))


def size_text(nbytes: float) -> str:
    """Return a size to four digits, decimal: a table in which every other row is binary cannot be read."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g}{unit}"
    return f"{nbytes:.0f}B"


# The lines by which the scheduler tells the launcher which ranks have come, when the job begins, and which
# rank failed first.
#
# The order in which processes end does not show the latter: a failed node tells the others, and some of them
# end before its interpreter does. The lines are part of the scheduler's output, which reaches the launcher
# from any host.

BEGUN: Final = "netstorm-begun"
"""The line that all nodes have joined."""

_CAME: Final = re.compile(rb"netstorm-came ([0-9]{1,9})")
_LINE: Final = re.compile(rb"netstorm-verdict (-?[0-9]{1,9}) (.*)")


def came_line(rank: int) -> str:
    """Return the line that a rank has come to the scheduler, and hears from it how the job goes."""
    return f"netstorm-came {rank}"


def rank_that_came(line: bytes) -> int | None:
    """Return which rank such a line names; None: it is another line."""
    match = _CAME.fullmatch(line)
    return None if match is None else int(match[1])


def first_failure_line(rank: int, text: str) -> str:
    """Return the line for a rank, and for how the job went; -1: no rank in particular."""
    return f"netstorm-verdict {rank} {text}"


def first_failure(line: bytes) -> tuple[int, str] | None:
    """Return what such a line says; None: it is another line."""
    match = _LINE.fullmatch(line)
    return None if match is None else (int(match[1]), match[2].decode(errors="replace"))


# A temporary folder for a command; folders of killed commands are removed first.
#
# A command locks its folder while it lives; the kernel releases the lock, however the command ends. So a
# folder that is not locked is stale.

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
