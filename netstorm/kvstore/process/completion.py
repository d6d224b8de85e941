"""A thread that ends calls whose end runs code of the user's: continuations of futures, copies to devices.

The I/O thread must never run such code: it might wait for another call.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["CompletionThread"]

_log = logging.getLogger(__name__)

_JOIN_S: Final = 5.0
"""How long `close` waits for a continuation of the user's that runs."""


class CompletionThread:
    """Runs functions one after the other; it starts with the first."""

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._queue: Final[queue.SimpleQueue[Callable[[], None] | None]] = queue.SimpleQueue()
        self._lock: Final = threading.Lock()
        self._thread: threading.Thread | None = None
        self._inner: CompletionThread | None = None
        """Ends calls that continuations on this thread have begun."""

    def for_caller(self) -> CompletionThread:
        """Return the thread that ends what the caller begins now.

        It is another one if the caller is a continuation: those of PowerSGD wait for calls of their own.
        """
        caller = threading.current_thread()
        level: CompletionThread | None = self
        while level is not None:
            if caller is level._thread:  # noqa: SLF001 -- one of our own
                if level._inner is None:  # noqa: SLF001
                    level._inner = CompletionThread(level._name)  # noqa: SLF001
                return level._inner  # noqa: SLF001
            level = level._inner  # noqa: SLF001
        return self

    def run(self, function: Callable[[], None]) -> None:
        """Call `function` on the thread, soon. An exception in it is logged."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
        self._queue.put(function)

    def close(self) -> None:
        """End the thread after what it was given. Twice does no harm."""
        if self._inner is not None:
            self._inner.close()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            function = self._queue.get()
            if function is None:
                return
            try:
                function()
            except Exception:  # noqa: BLE001 -- the user's code, or a device's error: the next call must end, too
                _log.exception("a continuation of a NetStorm call failed")
            del function  # what it refers to may be large
