"""Forking while MXNet's engine works, as `multiprocessing` and Gluon's DataLoader do during training.

Before a fork MXNet ends its worker threads and waits for them, in a handler of the C library that holds
Python's lock. A worker that needs the lock, because it is about to start one of our operations or is just
returning from one, then waits for ever, and so does the process. So before a fork we wait, without the lock,
until no thread runs our code.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Final

from netstorm import clock
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import drain
from netstorm.kvstore.process.runtime import drain_io_thread

__all__ = ["wait_until_idle"]

_TIMEOUT_S: Final = 5.0
"""At most; the engine releases completed operations within moments. A thread of the user's that cannot be
told from the engine's must not block a fork for ever."""

_POLL_S: Final = 0.0005


def wait_until_idle() -> None:
    """Wait until no thread of MXNet's engine is in our code or about to enter it."""
    with contextlib.suppress(mx.base.MXNetError):  # the store raises it again at its next call
        mx.nd.waitall()
    drain(_TIMEOUT_S)
    drain_io_thread()  # it completes operations, and may hold the engine's locks while it does
    deadline = clock.monotonic() + _TIMEOUT_S
    while _foreign_threads_in_python() and clock.monotonic() < deadline:
        clock.sleep(_POLL_S)


def _foreign_threads_in_python() -> set[int]:
    """Return the threads that run Python now but were not started by it: the engine's, in our callbacks."""
    started = {
        thread.ident
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)  # noqa: SLF001
    }
    return {ident for ident in sys._current_frames() if ident not in started}  # noqa: SLF001


os.register_at_fork(before=wait_until_idle)
