"""What the engine needs before the first operation, and what happens to operations at a fork and at exit.

It all happens when this module is imported, which importing the package does.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from typing import Final

from netstorm.errors import Closed, NetStormError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import push_async
from netstorm.frontends.mxnet.engine.outstanding import Completion, finish, forget_all
from netstorm.frontends.mxnet.engine.workers import forget_workers, normal_workers

__all__ = ["RUNS_INLINE"]

_ERROR_SLOTS: Final = 2048
"""More operations than the largest models leave outstanding. Filling them takes some 0.15 s."""

_EXIT_TIMEOUT_S: Final = 10.0
"""For the engine to release what has failed at exit: it may have to compute what an operation waits for."""

_MEETING_S: Final = 0.2
"""For threads that run operators to be free, where there are several."""

_log = logging.getLogger(__name__)


def _reserve_error_slots() -> bool:
    """Make the engine's list of errors so long that it is never moved later, while somebody reads it.

    Each error goes in with an operation, comes out by being raised, and leaves a slot that the next `waitall`
    empties; the memory stays.

    Returns:
        Whether the engine is NaiveEngine, which has no such list: operations run inside the push.
    """
    array, error = mx.nd.zeros((1,)), NetStormError("reserved")
    for _ in range(_ERROR_SLOTS):
        try:
            push_async(
                lambda completion: completion.fail(error), reads=(), writes=(array,), name="netstorm_reserve"
            )
            array.wait_to_read()
        except NetStormError as raised:
            if raised.__cause__ is not None:  # raised by the push itself
                _log.warning("MXNET_ENGINE_TYPE=NaiveEngine: nothing overlaps with the network")
                return True
    mx.nd.waitall()
    return False


def _finish_at_exit() -> None:
    finish(Closed("the process ended before the network operation did"), _EXIT_TIMEOUT_S)


def _prepare_workers() -> None:
    """Give each thread that runs operators one of our operations, so that it sets its scheduling policy."""
    count = normal_workers()
    meeting = threading.Barrier(count)  # none takes two

    def start(completion: Completion) -> None:
        if count > 1:
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(_MEETING_S)
        completion.succeed()

    for _ in range(count):
        push_async(start, reads=(), writes=(), name="netstorm_prepare", among_operators=True)


def _after_fork() -> None:
    """In the parent: the engine has started other threads."""
    forget_workers()
    _prepare_workers()


def _forget_parents() -> None:
    """In a forked child, which has none of the threads."""
    forget_all()
    forget_workers()


RUNS_INLINE: Final = _reserve_error_slots()
"""The engine is NaiveEngine."""

_prepare_workers()
atexit.register(_finish_at_exit)
os.register_at_fork(after_in_parent=_after_fork, after_in_child=_forget_parents)
