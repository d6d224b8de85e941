"""Ctrl-C and SIGTERM while Python is blocked inside a library.

Python runs its handlers between two of its own instructions, and a thread that waits inside MXNet executes
none. But the interpreter's C handler writes the signal's number to the wake-up descriptor at once. The I/O
thread reads it there and fails what is outstanding. So the blocked call returns, and Python's handler runs.

That is for signals that end the process. A handler of the script's own, or of its framework, has the word:
it may set a flag, on which the ranks agree before they save and leave together. Then nothing is failed here.
The job ends if the process ends without having left, and the reason names the signal.

A forked child inherits the descriptor and the handler, and must lose them before it receives its first
signal: a `multiprocessing.Pool` ends its workers with SIGTERM, which would be read here as a signal to the
parent. So the two signals are blocked while the process forks.
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
    """Passes SIGINT and SIGTERM to the I/O thread while it is open."""

    def __init__(self, driver: _Watcher, interrupted: Callable[[str], None]) -> None:
        """Begin to watch. On other threads than Python's main thread it does nothing.

        Args:
            driver: watches descriptors on the I/O thread.
            interrupted: called there with the signal's name.
        """
        self.last = ""
        """The last signal that was left to a handler of the script's, as text; empty: there was none."""
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
            # The default kills without an announcement, and the others would wait for a heartbeat time-out.
            signal.signal(signal.SIGTERM, _exit_on_sigterm)
        _watches.add(self)
        driver.watch(self._read_end.fileno(), self.poll)

    def poll(self) -> None:
        """Handle the signals that have come. On the I/O thread only."""
        with contextlib.suppress(OSError):  # none has, or it is closed
            numbers = self._read_end.recv(64) if self._open else b""
            if numbers and self._previous_fd >= 0:  # an event loop's, which calls the script's handlers
                with contextlib.suppress(OSError):
                    os.write(self._previous_fd, numbers)
            for number in set(numbers) & _NAMES.keys():
                handler = signal.getsignal(number)
                if handler in _ENDING:
                    self._interrupted(_NAMES[number])
                elif callable(handler):
                    self.last = _NAMES[number]

    def close(self) -> None:
        """Stop watching, and restore what was there before. Twice does no harm."""
        if not self._open:
            return
        self._driver.unwatch(self._read_end.fileno())  # the I/O thread may still poll once
        self._open = False
        if threading.current_thread() is threading.main_thread():
            self._restore()
        self._write_end.close()
        self._read_end.close()

    def close_in_child(self) -> None:
        """Stop watching in a forked child, which handles its signals itself."""
        if self._open:
            self._open = False
            self._restore()
            self._write_end.close()
            self._read_end.close()

    def _restore(self) -> None:
        replaced = signal.set_wakeup_fd(self._previous_fd)
        if replaced != self._write_end.fileno():  # an event loop's, which began later
            signal.set_wakeup_fd(replaced)
        if self._took_sigterm and signal.getsignal(signal.SIGTERM) is _exit_on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_on_sigterm(number: int, _frame: FrameType | None) -> None:
    # A handler that was installed later may call the one before it, as Lightning's does: it has the word.
    if signal.getsignal(number) is _exit_on_sigterm:
        sys.exit(128 + number)


_ENDING: Final = (_exit_on_sigterm, signal.default_int_handler)
"""Handlers that end the process."""

_blocked_before: Final[list[set[signal.Signals | int]]] = []
"""While the process forks: the signals that were blocked before."""
_watches: Final[weakref.WeakSet[SignalWatch]] = weakref.WeakSet()


def _block_signals() -> None:
    if _watches:
        _blocked_before.append(signal.pthread_sigmask(signal.SIG_BLOCK, _NAMES))


def _unblock_signals() -> None:
    if _blocked_before:
        signal.pthread_sigmask(signal.SIG_SETMASK, _blocked_before.pop())


def _close_all_in_child() -> None:
    for watch in list(_watches):
        watch.close_in_child()
    _unblock_signals()


os.register_at_fork(
    before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_close_all_in_child
)
