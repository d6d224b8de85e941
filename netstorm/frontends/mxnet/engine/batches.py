"""A thread of ours that queues operations on MXNet's engine, so that the script's does not have to.

It takes what has come meanwhile together: each time that it wants Python's lock the I/O thread has to stop in
the middle of what it does, and with a turn for every sum a round of 32 keys took a tenth longer.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from netstorm.frontends.mxnet.engine.workers import compute_in_background
from netstorm.kvstore.process.lifetime import after_close
from netstorm.pslite.system.interpreter_lock import active_calls, yield_to_call

__all__ = ["Batches"]

_JOIN_S: Final = 10.0
"""For the thread to end, when this process does."""

_log: Final = logging.getLogger(__name__)

Item = TypeVar("Item")


class Batches(Generic[Item]):
    """Has a function do with many things at a time what it was given one by one, in a thread of its own."""

    def __init__(self, function: Callable[[list[Item]], None]) -> None:
        """Begin to, with the first.

        Args:
            function: given things in the order in which they came. It must not wait for anything: what a
                script waits for may be next. It reports its errors itself.
        """
        self._function: Final = function
        self._lock = threading.Lock()
        self._things: Final[queue.SimpleQueue[Item | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forget)

    def add(self, thing: Item) -> None:
        """Have something done with a thing. Does not wait."""
        self._things.put(thing)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="netstorm-updates", daemon=True)
                    self._thread.start()
                    after_close(self._stop)

    def _stop(self) -> None:
        if self._thread is not None:
            self._things.put(None)
            self._thread.join(_JOIN_S)

    def _forget(self) -> None:
        """In a forked child, which has none of the threads."""
        self._lock, self._thread = threading.Lock(), None

    def _run(self) -> None:
        compute_in_background()
        goes_on = True
        while goes_on:
            taken = [self._things.get()]
            if active_calls:
                yield_to_call()
            while not self._things.empty():  # nobody else takes any
                taken.append(self._things.get())
            things = [thing for thing in taken if thing is not None]
            goes_on = len(things) == len(taken)
            try:
                self._function(things)
            except Exception:  # noqa: BLE001 -- what comes next must be done nevertheless
                _log.exception("updates could not be queued")
