"""A thread of ours that queues operations on MXNet's engine, so that the script's does not have to.

What it does must not wait for anything: the operation that a script waits for may be next in its queue.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Final

from netstorm.errors import WaitTimeout
from netstorm.frontends.mxnet.engine_workers import compute_in_background
from netstorm.kvstore.lifetime import after_close
from netstorm.pslite.interpreter_lock import calls, give_way

__all__ = ["background"]

_TIMEOUT_S: Final = 30.0
"""For what is queued, which takes a tenth of a ms each, and for the thread to end."""

_log: Final = logging.getLogger(__name__)


class _Background:
    """Does one thing after another, in the order in which they were given."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given = self._done = 0

    def call(self, function: Callable[[], None]) -> None:
        """Have something done; it reports its errors itself. Does not wait."""
        with self._lock:
            self._given += 1
            self._work.put(function)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="netstorm-updates", daemon=True)
                self._thread.start()
                after_close(self.stop)

    def pass_through(self) -> None:
        """Wait until all that was given before has been done.

        Raises: netstorm.errors.WaitTimeout: it takes half a minute, which nothing should.
        """
        if self._done == self._given:
            return
        done = threading.Event()
        self.call(done.set)
        if not done.wait(_TIMEOUT_S):
            raise WaitTimeout(f"{self._given - self._done} updates are not queued after {_TIMEOUT_S:.0f} s")

    def stop(self) -> None:
        """Do what was given, and end the thread; the next call starts another."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join(_TIMEOUT_S)

    def forget(self) -> None:
        """In a forked child, which has none of the threads: what was given is the parent's."""
        self._lock, self._thread, self._done = threading.Lock(), None, self._given

    def _run(self) -> None:
        compute_in_background()
        while (function := self._work.get()) is not None:
            if calls:
                give_way()
            try:
                function()
            except Exception:  # noqa: BLE001 -- what comes next must be done nevertheless
                _log.exception("an update could not be queued")
            self._done += 1


background: Final = _Background()
os.register_at_fork(after_in_child=background.forget)
