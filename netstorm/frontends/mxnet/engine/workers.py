"""The engine's threads compute in the background: whoever gives them work is not interrupted for it.

A call on a store hands the engine three or four operations, and each wakes one of its threads. Where all
cores are busy Linux may let that thread go first, as it has just slept: in the middle of the call, which then
takes ms instead of a tenth of one. SCHED_BATCH (sched(7)) is for threads that compute: they get as much of a
core as before, and wait for it until whoever runs has had its turn.
"""

from __future__ import annotations

import os
import threading
from typing import Final

from netstorm.frontends.mxnet.compat import mx

__all__ = ["compute_in_background", "forget_workers", "normal_workers"]

_known: Final[set[int]] = set()
"""Threads that have been here, by the system's number: of a thread that it did not start Python keeps
nothing from one callback to the next."""


def normal_workers() -> int:
    """Return how many threads run MXNet's operators on the host."""
    return int(mx.util.getenv("MXNET_CPU_WORKER_NTHREADS") or 1)


def compute_in_background() -> None:
    """Let the calling thread, one of the engine's, interrupt nobody when it is woken.

    A policy that somebody has chosen for it stays, and so does what the system refuses to change.
    """
    thread = threading.get_native_id()
    if thread in _known:
        return
    _known.add(thread)
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):  # not on Linux; not allowed
        return


def forget_workers() -> None:
    """Forget the threads: a fork ends them, and the engine starts others, in the parent as in the child."""
    _known.clear()
