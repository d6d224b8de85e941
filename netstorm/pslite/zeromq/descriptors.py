"""Waits for file descriptors, and can be woken by any thread."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["DescriptorPoller"]

_write_eventfd: Final = ctypes.PyDLL(None).eventfd_write
"""Adds to an eventfd, as `os.eventfd_write`, but keeps the interpreter lock meanwhile. Otherwise the woken
thread takes the lock at once, and the caller gets it back only after a switch interval."""
_write_eventfd.argtypes = (ctypes.c_int, ctypes.c_uint64)


class DescriptorPoller:
    """Calls a callback for each descriptor that is readable. All methods but `wake` belong to one thread."""

    def __init__(self, woken: Callable[[], None]) -> None:
        """`woken` is called from `poll` after each `wake`."""
        self._woken: Final = woken
        self._callbacks: Final[dict[int, Callable[[], None]]] = {}
        self._epoll: Final = select.epoll()
        self._wake_fd: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock: Final = threading.Lock()
        self._closed = False
        self.watch(self._wake_fd, self._read_wake_ups)

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` from `poll` whenever `fd` is readable, until `unwatch`."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching; a descriptor that is not watched is ignored."""
        if self._callbacks.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # already closed
                self._epoll.unregister(fd)

    def poll(self, timeout_s: float) -> None:
        """Wait until a descriptor is readable, at most `timeout_s`; call the callbacks of those that are."""
        for descriptor, _ in self._epoll.poll(max(0.0, timeout_s)):
            callback = self._callbacks.get(descriptor)
            if callback is not None:  # otherwise an earlier callback has closed it
                callback()

    def wake(self) -> None:
        """Make a waiting `poll` return. May be called by any thread."""
        with self._lock:  # otherwise the descriptor could be closed, and its number belong to another file
            if not self._closed:
                _write_eventfd(self._wake_fd, 1)

    def stop_waking(self) -> None:
        """Ignore `wake` from now on."""
        with self._lock:
            self._closed = True

    def close(self) -> None:
        """Close the poller's own descriptors; call `stop_waking` first, except in a forked child."""
        self._closed = True  # without the lock: in a forked child a thread that is gone may hold it
        self._epoll.close()
        os.close(self._wake_fd)

    def _read_wake_ups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        self._woken()
