"""Ctrl-C and SIGTERM while Python is blocked inside a library.

Python runs its handlers between two of its own instructions; a thread that waits inside MXNet executes none.
The interpreter's C handler, though, writes the signal's number to the wake-up descriptor at once. The I/O
thread reads it there, fails what is outstanding, and so the blocked call returns and Python's handler gets
its turn.

A forked child inherits both the descriptor and the handler, and must lose them before it takes its first
signal: a `multiprocessing.Pool` ends its workers with SIGTERM, which would be read here as a signal to the
parent. So the two signals wait while the process forks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Final, Protocol

__all__ = ["SignalWatch"]

_NAMES: Final = {int(signal.SIGINT): "Ctrl-C (SIGINT)", int(signal.SIGTERM): "SIGTERM"}


class _Watcher(Protocol):
    def watch(self, fd: int, callback: Callable[[], None]) -> None: ...

    def unwatch(self, fd: int) -> None: ...


class SignalWatch:
    """Tells the I/O thread of SIGINT and SIGTERM for as long as it is open."""

    def __init__(self, driver: _Watcher, interrupted: Callable[[str], None]) -> None:
        """Begin; only Python's main thread may, elsewhere this does nothing.

        Args:
            driver: watches descriptors on the I/O thread.
            interrupted: called there with the signal's name.
        """
        self._open = threading.current_thread() is threading.main_thread()
        if not self._open:
            return
        self._driver: Final = driver
        self._interrupted: Final = interrupted
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        self._took_sigterm = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._took_sigterm:
            # The default kills without a word, and the others would wait for a heartbeat time-out.
            signal.signal(signal.SIGTERM, _exit_on_sigterm)
        _watches.add(self)
        driver.watch(self._read_end.fileno(), self.look)

    def look(self) -> None:
        """On the I/O thread: take the signals that have come."""
        with contextlib.suppress(OSError):  # none has, or it is closed
            for number in self._read_end.recv(64) if self._open else b"":
                if number in _NAMES and callable(signal.getsignal(number)):
                    self._interrupted(_NAMES[number])

    def close(self) -> None:
        """Stop watching and give back what was there before. Twice does no harm."""
        if not self._open:
            return
        self._driver.unwatch(self._read_end.fileno())  # what the I/O thread was told before still looks
        self._open = False
        if threading.current_thread() is threading.main_thread():
            self._give_back()
        self._write_end.close()
        self._read_end.close()

    def forget(self) -> None:
        """In a forked child: signals are the child's own business."""
        if self._open:
            self._open = False
            self._give_back()
            self._write_end.close()
            self._read_end.close()

    def _give_back(self) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        if self._took_sigterm and signal.getsignal(signal.SIGTERM) is _exit_on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_on_sigterm(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


_held: Final[list[set[signal.Signals | int]]] = []
"""The signals that were blocked before, while the process forks."""
_watches: Final[weakref.WeakSet[SignalWatch]] = weakref.WeakSet()


def _hold_signals() -> None:
    if _watches:
        _held.append(signal.pthread_sigmask(signal.SIG_BLOCK, _NAMES))


def _let_signals_through() -> None:
    if _held:
        signal.pthread_sigmask(signal.SIG_SETMASK, _held.pop())


def _forget_all() -> None:
    for watch in list(_watches):
        watch.forget()
    _let_signals_through()


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_through, after_in_child=_forget_all)
