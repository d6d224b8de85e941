"""A thread that writes one checkpoint while the training goes on; one at a time in a process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from netstorm import clock
from netstorm.errors import WaitTimeout

__all__ = ["Saving", "finished_saving", "start_saving", "wait_for_last_saving"]

_log = logging.getLogger(__name__)

_SLICE_S: Final = 0.2
"""Blocking waits are cut into slices, so that Python's signal handlers run."""


class Saving:
    """A checkpoint that is being written.

    Attributes:
        step: of the checkpoint.
        path: its folder; it is complete once `wait` has returned.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step: Final = step
        self.path: Final = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_complete = False

    @property
    def is_done(self) -> bool:
        """Whether it is complete, or has failed: `wait` then returns, or raises, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is complete, and return its folder.

        Args:
            timeout_s: longest wait; None: as long as it takes, which the save's own time-out limits.

        Raises:
            CheckpointError: why it could not be written, here or at another rank.
            WaitTimeout: the deadline, here or at rank 0, has passed; at rank 0 it names the ranks that are
                missing.
        """
        deadline = None if timeout_s is None else clock.monotonic() + timeout_s
        while not self.is_done:
            assert self._thread is not None
            self._thread.join(_SLICE_S)
            if deadline is not None and clock.monotonic() > deadline and not self.is_done:
                raise WaitTimeout(f"{self.path} is not complete after {timeout_s:g} s; it is still written")
        if self._error is not None:
            raise self._error
        return self.path

    def _start(self, write: Callable[[], Path]) -> None:
        def run() -> None:
            try:
                write()
            except BaseException as error:  # noqa: BLE001 -- `wait` raises it
                self._error = error
                _log.error("the checkpoint of step %d was not written: %s", self.step, error)

        # Not a daemon: the last checkpoint of a program is completed before the program ends.
        self._thread = threading.Thread(target=run, name="netstorm-checkpoint")
        self._thread.start()


_last: Saving | None = None


def wait_for_last_saving() -> None:
    """Wait until the checkpoint before has been written, or has failed, which has been logged."""
    while _last is not None and not _last.is_done:
        assert _last._thread is not None  # noqa: SLF001 -- of this module
        _last._thread.join(_SLICE_S)  # noqa: SLF001


def start_saving(step: int, path: Path, write: Callable[[], Path]) -> Saving:
    """Have a thread call `write`, after that of the checkpoint before has ended."""
    global _last  # noqa: PLW0603 -- one a process
    wait_for_last_saving()
    _last = Saving(step, path)
    _last._start(write)  # noqa: SLF001
    return _last


def finished_saving(step: int, path: Path) -> Saving:
    """Return one that has nothing to write: another rank writes everything."""
    return Saving(step, path)
