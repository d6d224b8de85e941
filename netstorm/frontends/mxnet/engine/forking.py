"""Forking with MXNet's engine at work, as `multiprocessing` and Gluon's DataLoader do while a model trains.

Before a fork MXNet ends its worker threads and waits for them, in a handler of the C library that runs with
the interpreter locked. A worker that needs the interpreter, because it is about to start one of our
operations or has not quite returned from having done so, then waits for ever, and so does everybody. So we
wait first, with the interpreter unlocked, until nothing of ours is under way in any thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Final

from netstorm import clock
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import drain
from netstorm.kvstore.process.lifetime import drain_io_thread

__all__ = ["settle"]

_TAIL_S: Final = 5.0
"""Operations that have completed are let go within moments. A thread of the user's that looks like the
engine's must not keep us for ever."""

_LOOK_AGAIN_S: Final = 0.0005


def settle() -> None:
    """Wait until no thread of MXNet's engine is in our code or will enter it."""
    with contextlib.suppress(mx.base.MXNetError):  # the store raises it again at its next call
        mx.nd.waitall()
    drain(_TAIL_S)
    drain_io_thread()  # it completes operations, and may hold the engine's locks while it does
    deadline = clock.monotonic() + _TAIL_S
    while _foreign_threads_in_python() and clock.monotonic() < deadline:
        clock.sleep(_LOOK_AGAIN_S)


def _foreign_threads_in_python() -> set[int]:
    """Return the threads that run Python now but were not started by it: the engine's, in our callbacks."""
    started = {
        thread.ident
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)  # noqa: SLF001
    }
    return {ident for ident in sys._current_frames() if ident not in started}  # noqa: SLF001


os.register_at_fork(before=settle)
