"""A thread of ours that queues operations on MXNet's engine, so that the script's thread does not have to.

It processes all items that have come meanwhile as one batch. Each time this thread wants Python's lock, the
I/O thread has to stop in the middle of its work: with a turn for every sum, a round of 32 keys took a tenth
longer.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from netstorm.frontends.mxnet.engine.workers import compute_in_background
from netstorm.kvstore.process.runtime import after_close
from netstorm.pslite.system import active_calls, yield_to_call

__all__ = ["Batches"]

_JOIN_S: Final = 10.0
"""For the thread to end, at exit."""

_log = logging.getLogger(__name__)

Item = TypeVar("Item")


class Batches(Generic[Item]):
    """Items that are added one by one, and processed many at a time in a thread of its own."""

    def __init__(self, function: Callable[[list[Item]], None]) -> None:
        """Prepare; the thread starts with the first item.

        Args:
            function: processes items, in the order in which they were added. It must not wait for anything:
                what a script waits for may be in the next batch. It reports its errors itself.
        """
        self._function: Final = function
        self._lock = threading.Lock()
        self._items: Final[queue.SimpleQueue[Item | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forget)

    def add(self, item: Item) -> None:
        """Have an item processed. Does not wait."""
        self._items.put(item)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="netstorm-updates", daemon=True)
                    self._thread.start()
                    after_close(self._stop)

    def _stop(self) -> None:
        if self._thread is not None:
            self._items.put(None)
            self._thread.join(_JOIN_S)

    def _forget(self) -> None:
        """In a forked child, which has none of the threads."""
        self._lock, self._thread = threading.Lock(), None

    def _run(self) -> None:
        compute_in_background()
        stopped = False
        while not stopped:
            taken = [self._items.get()]
            if active_calls:
                yield_to_call()
            while not self._items.empty():  # no other thread takes any
                taken.append(self._items.get())
            items = [item for item in taken if item is not None]
            stopped = len(items) < len(taken)
            try:
                self._function(items)
            except Exception:  # noqa: BLE001 -- the next batch must be processed nevertheless
                _log.exception("updates could not be queued")
