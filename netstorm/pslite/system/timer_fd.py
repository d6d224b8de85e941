"""A timer that is a file descriptor (timerfd_create(2)), for event loops that only watch descriptors.

Python has it from 3.13 on; here libc is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from typing import Final

__all__ = ["TimerFd"]

_CLOCK_MONOTONIC: Final = 1
_SOONEST_S: Final = 1e-6
"""0 would disarm the timer."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


_libc: Final = ctypes.CDLL(None, use_errno=True)


class TimerFd:
    """A one-shot timer: once armed, it becomes readable one time."""

    def __init__(self) -> None:
        """Make a timer that is not armed."""
        self._fd = int(_libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def fileno(self) -> int:
        """Return the descriptor to watch."""
        return self._fd

    def arm(self, seconds: float) -> None:
        """Become readable in `seconds`, at once if that is not positive; replaces an earlier setting."""
        fraction, whole = math.modf(max(seconds, _SOONEST_S))
        spec = _TimerSpec(value=_TimeSpec(int(whole), int(fraction * 1e9) or int(whole == 0)))
        if _libc.timerfd_settime(self._fd, 0, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def take(self) -> bool:
        """Return whether it has gone off since the last call; afterwards it is not readable."""
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._fd, 8))
        return False

    def close(self) -> None:
        """Close the descriptor; it must not be watched any more. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
