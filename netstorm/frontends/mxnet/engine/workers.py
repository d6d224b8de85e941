"""The scheduling policy of the engine's threads: they compute in the background and interrupt nobody.

A call on a store gives the engine three or four operations, and each wakes one of its threads. Where all
cores are busy, Linux may run that thread first, as it has just slept. The call is then interrupted in its
middle and takes ms instead of a tenth of one. SCHED_BATCH (sched(7)) is for threads that compute: they get
as much of a core as before, but a thread that is woken waits until the running one has had its turn.
"""

from __future__ import annotations

import os
import threading
from typing import Final

from netstorm.frontends.mxnet.compat import mx

__all__ = ["compute_in_background", "forget_workers", "normal_workers"]

_known: Final[set[int]] = set()
"""Threads that have the policy, by the system's number. Python's thread-local data would not do: for a thread
that Python did not start it is gone after each callback."""


def normal_workers() -> int:
    """Return how many threads run MXNet's operators on the host."""
    return int(mx.util.getenv("MXNET_CPU_WORKER_NTHREADS") or 1)


def compute_in_background() -> None:
    """Give the calling thread, one of the engine's, the policy SCHED_BATCH.

    A thread that has another policy than the default keeps it, and so does one that may not change it.
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
