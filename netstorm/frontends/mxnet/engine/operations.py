"""Asynchronous operations of MXNet's dependency engine, written in Python, on the stock wheel.

`push_async` queues an operation that reads and writes NDArrays and returns at once. When the arrays are ready
the engine calls `start`, which hands the work to somebody else (our I/O thread) and returns; whoever finishes
the work says so through the `Completion`. What depends on the written arrays waits until then, and nothing
else does.

What was found out about the engine of MXNet 1.9.1 (all of it tried), and what follows from it here:

* An exception in a callback is printed and the engine waits for ever: ours let none out.
* A callback that is collected as garbage while the engine holds it crashes the process: there are two, which
  live as long as this module, and an operation is a number from a counter, passed as `func_param`.
* An operation whose input has failed is never started. The engine marks its outputs as failed, too, and
  destroys it; the destructor of `func_param` is the only sign of that, and becomes `skipped`.
* One variable twice in an operation waits for itself for ever: each is listed once, writing wins. Views of an
  array (slices, reshapes, NumPy-style arrays) share its variable.
* Priority: the CPU workers' queue is first come, first served, whatever the priority. The priority workers'
  queue (4 threads of its own) honours it, larger first, among operations that are ready and wait for a
  thread. Ours go there: `start` does not wait behind a backward pass.
* An error is raised once: by the first `asnumpy`, `wait_to_read` or `waitall` of whatever depends on the
  operation, copies included. That clears it everywhere, and what else depends on it holds garbage from then
  on (memory that nobody wrote). Whoever fails operations must refuse to go on; nothing else tells a script
  that caught the error.
* The engine keeps pending errors in a `std::vector` without a lock. To fail hundreds of operations at a time,
  as one does when a node is lost, ended in "double free or corruption" whenever a worker read the vector as
  it grew. So it grows beforehand (`_reserve_error_slots`), and one operation fails at a time.
* `MXNET_ENGINE_TYPE=NaiveEngine` runs an operation inside the push, and wants it complete when its function
  returns. There `push_async` blocks until the completion, and raises the error itself, since that engine
  drops errors.
* Before a fork MXNet waits for all operations, in a handler that runs with the interpreter locked: a deadlock
  if it takes a Python thread to complete one. `os.register_at_fork(before=mx.nd.waitall)` waits with it
  unlocked.
* At exit MXNet waits for all operations, too, and one that never completes is a process that never ends. So
  what is still outstanding when our atexit hook runs fails; it was registered after MXNet's, and atexit runs
  the last one first. A runtime that wants to complete operations at exit registers its own hook later still.
* While Python is blocked inside MXNet no signal handler runs. `fail_all` from another thread unblocks it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final

from netstorm import clock
from netstorm.errors import Closed, NetStormError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.binding import (
    EngineCallback,
    NDArray,
    Operands,
    ReleaseFunction,
    RunFunction,
    push,
)
from netstorm.frontends.mxnet.engine.workers import compute_in_background, forget_workers, normal_workers
from netstorm.frontends.mxnet.errors import as_mxnet_error
from netstorm.pslite.system.interpreter_lock import calls, give_way

__all__ = [
    "RUNS_INLINE",
    "Completion",
    "NDArray",
    "Operands",
    "drain",
    "fail_all",
    "finish",
    "live_count",
    "push_async",
    "push_on",
]

_ERROR_SLOTS: Final = 2048
"""More operations than the largest models leave outstanding; to fill them takes some 0.15 s."""

_EXIT_TIMEOUT_S: Final = 10.0
"""For the engine to let go of what has failed at exit: it may have to compute what an operation waits for."""

_MEETING_S: Final = 0.2
"""For threads that run operators to be free, where there are several."""

_log: Final = logging.getLogger(__name__)

# No lock: the engine calls back in whatever thread, also while that thread collects garbage or handles a
# signal, and would wait for a lock of its own. Single dict operations are atomic; to take an entry out of
# `_live` is the claim.
_tokens: Final = itertools.count(1)
_live: Final[dict[int, _Operation]] = {}  # not completed yet
_held: Final[dict[int, _Operation]] = {}  # the engine may still call back about these
_drainers: Final[list[queue.SimpleQueue[None]]] = []
_pushing: Final = threading.local()


class Completion:
    """Ends one operation: call `succeed`, `fail` or `end`, once, from any thread. Later calls do nothing."""

    __slots__ = ("_operation",)

    def __init__(self, operation: _Operation) -> None:
        self._operation = operation

    @property
    def done(self) -> bool:
        """Whether the operation has ended, by whomever: its arrays are not ours any more."""
        return self._operation.token not in _live

    def succeed(self) -> None:
        """The written arrays have their values; let those who wait for them go on."""
        self._operation.complete(None)

    def fail(self, error: BaseException) -> None:
        """Let whoever reads what depends on the written arrays raise `error`, as `as_mxnet_error` puts it."""
        self._operation.complete(error)

    def end(self, error: BaseException | None) -> None:
        """`fail` with what has gone wrong, or `succeed` if nothing has."""
        self._operation.complete(error)


class _Operation:
    """One pushed operation: waiting for its arrays, then started, then completed (or skipped)."""

    __slots__ = (
        "callback",
        "error",
        "inline",
        "name",
        "released",
        "silent",
        "skipped",
        "start",
        "token",
    )

    def __init__(
        self,
        start: Callable[[Completion], None],
        skipped: Callable[[], None] | None,
        name: str,
        *,
        silent: bool,
    ) -> None:
        self.token: Final = next(_tokens)
        self.name: Final = name
        self.silent: Final = silent
        self.start: Callable[[Completion], None] | None = start
        self.skipped: Callable[[], None] | None = skipped
        self.callback: EngineCallback | None = None  # from the start on
        self.inline: queue.SimpleQueue[None] | None = None  # NaiveEngine: where the pushing thread waits
        self.error: BaseException | None = None
        self.released = False  # by the engine, before the push had returned

    def run(self, callback: EngineCallback, *, inline: bool) -> None:
        start, self.start, self.skipped = self.start, None, None  # what they refer to is free from here on
        if inline:
            self.inline = queue.SimpleQueue()
        # The order matters: `fail_all` sets the error, then looks for the callback, so one of us sees both.
        self.callback = callback
        if self.error is not None:
            self.complete(self.error)
        elif start is not None:
            try:
                start(Completion(self))
            except BaseException as error:  # noqa: BLE001 -- whatever it is, the engine must hear of it
                if not isinstance(error, NetStormError):
                    _log.exception("%s: starting the operation raised", self.name)
                self.complete(error)
        if self.inline is not None:
            self._wait_inline(self.inline)
            callback(None)

    def complete(self, error: BaseException | None) -> None:
        if self.callback is None or _live.pop(self.token, None) is None:
            return
        if self.inline is None:
            self.callback(None if self.silent else error)
        else:
            self.error = error
            self.inline.put(None)

    def _wait_inline(self, completed: queue.SimpleQueue[None]) -> None:
        while True:
            try:
                return completed.get()
            except BaseException as error:  # noqa: BLE001 -- Ctrl-C: the push will raise it
                self.complete(error)


def push_async(
    start: Callable[[Completion], None],
    *,
    reads: Sequence[NDArray],
    writes: Sequence[NDArray],
    name: str,
    priority: int = 0,
    skipped: Callable[[], None] | None = None,
    among_operators: bool = False,
) -> None:
    """Queue an operation that the engine starts once `reads` and `writes` are ready; see `push_on`.

    Args:
        start: see `push_on`.
        reads: arrays whose values the operation uses; several operations may do so at a time.
        writes: arrays that it changes. An array may be in both, and several may be views of one.
        name: see `push_on`, and so for the others.

    Raises:
        UsageError: something in `reads` or `writes` is no NDArray, or one without memory.
        NetStormError: see `push_on`.
    """
    push_on(
        Operands(reads, writes),
        start,
        name=name,
        priority=priority,
        skipped=skipped,
        among_operators=among_operators,
    )


def push_on(
    operands: Operands,
    start: Callable[[Completion], None],
    *,
    name: str,
    priority: int = 0,
    skipped: Callable[[], None] | None = None,
    silent: bool = False,
    among_operators: bool = False,
) -> None:
    """Queue an operation that the engine starts once its arrays are ready, and return at once.

    Costs tens of microseconds. Under NaiveEngine it blocks until the operation has completed.

    Args:
        operands: the arrays; may be used again and again.
        start: called in a thread of the engine (under NaiveEngine in this one). It must not block, nor wait
            for an array: it hands the `Completion` on. An exception that it raises fails the operation. From
            here to the completion the arrays' memory is the operation's (`StagingBuffer.memory`).
        name: what MXNet's profiler and our log call it. Kept for ever: use a bounded number of names.
        priority: larger first, among operations that are ready and wait for a thread.
        skipped: called instead of `start`, in a thread of the engine or before this returns, if one of the
            arrays is what a failed operation should have written; must not block. Whoever reads what this
            one should have written gets that failure.
        silent: nobody but us reads what it writes: an error is no more than the operation's end.
        among_operators: start it in a thread that runs MXNet's operators, behind those that are ready.

    Raises:
        NetStormError: only under NaiveEngine, what `Completion.fail` was given, as `as_mxnet_error` puts it.
    """
    operation = _Operation(start, skipped, name, silent=silent)
    token = operation.token
    _live[token] = _held[token] = operation
    outer = getattr(_pushing, "token", None)
    _pushing.token = token
    try:
        push(
            _RUN,
            _RELEASE,
            token,
            operands,
            priority=priority,
            name=name,
            among_operators=among_operators,
        )
    except mx.base.MXNetError:  # not accepted; whatever else is raised here (Ctrl-C) comes after that
        _live.pop(token, None)
        _held.pop(token, None)
        raise
    finally:
        _pushing.token = outer
    if operation.released:
        _let_go(operation)
    if operation.inline is not None and operation.error is not None:
        if isinstance(operation.error, Exception):
            raise as_mxnet_error(operation.error) from operation.error
        raise operation.error


def live_count() -> int:
    """Return how many operations have been pushed and have neither completed nor been skipped."""
    return len(_live)


def fail_all(error: BaseException) -> None:
    """Fail every operation that has not completed; from any thread, also from a signal handler.

    Those that the engine has not started fail when it would start them. Operations pushed from now on are not
    affected. Whoever works on the memory of started ones must have stopped: it is not the operations' any
    more.
    """
    operations = list(_live.values())
    for operation in operations:  # all of them before the first completes and lets the engine start another
        if operation.error is None:
            operation.error = error
    for operation in operations:
        operation.complete(operation.error)


def drain(timeout_s: float) -> bool:
    """Wait until the engine has let go of all operations; return whether it has.

    It does so moments after their completion. At exit these matter: a callback into an interpreter that is
    being finalised ends the process with SIGABRT.
    """
    deadline = clock.monotonic() + timeout_s
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    _drainers.append(woken)
    try:
        while _held:
            try:
                woken.get(timeout=max(0.0, deadline - clock.monotonic()))
            except queue.Empty:
                return not _held
        return True
    finally:
        _drainers.remove(woken)


def finish(error: BaseException, timeout_s: float) -> bool:
    """Fail what is outstanding and wait until the engine has let go of it; return whether it has."""
    fail_all(error)
    return drain(timeout_s)


def _run_operation(_context: int, on_complete: int, token: int) -> None:
    callback = EngineCallback.at(on_complete)
    operation = _held.get(token)
    if operation is None:  # the parent's, from before a fork
        callback(None)
        return
    inline = getattr(_pushing, "token", None) == token
    if not inline:
        compute_in_background()
        if calls:
            give_way()
    operation.run(callback, inline=inline)


def _release_operation(token: int) -> None:
    operation = _held.get(token)
    if operation is None:
        return
    if getattr(_pushing, "token", None) == token:
        operation.released = True  # by the push itself: whether the engine had accepted it, we shall see
    else:
        _let_go(operation)


def _let_go(operation: _Operation) -> None:
    """The engine has destroyed an operation that it had accepted: completed or skipped."""
    try:
        if operation.callback is None:
            _live.pop(operation.token, None)
            if operation.skipped is not None and operation.error is None:
                operation.skipped()
    except BaseException:  # noqa: BLE001 -- the engine's thread has nobody to raise it to
        _log.exception("%s: the callback for a skipped operation raised", operation.name)
    finally:
        _held.pop(operation.token, None)
        if not _held:
            for woken in tuple(_drainers):
                woken.put(None)


_RUN: Final = RunFunction(_run_operation)
_RELEASE: Final = ReleaseFunction(_release_operation)


def _reserve_error_slots() -> bool:
    """Make the engine's list of errors so long that it is not moved later, while somebody reads it; return
    whether there is none, since operations run inside the push.

    Each error goes in with an operation, comes out by being raised, and leaves a slot that the next `waitall`
    empties; the memory stays. NaiveEngine has no such list.
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


def _meet_normal_workers() -> None:
    """Give each thread that runs operators one of ours, for what `_run_operation` does for a thread."""
    count = normal_workers()
    meeting = threading.Barrier(count)  # none takes two

    def start(completion: Completion) -> None:
        if count > 1:
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(_MEETING_S)
        completion.succeed()

    for _ in range(count):
        push_async(start, reads=(), writes=(), name="netstorm_meet", among_operators=True)


def _started_anew() -> None:
    """In a parent, after a fork."""
    forget_workers()
    _meet_normal_workers()


def _forget() -> None:
    """In a forked child: the operations are the parent's, and no thread is here to call back about them."""
    _live.clear()
    _held.clear()
    forget_workers()


RUNS_INLINE: Final = _reserve_error_slots()
"""The engine is NaiveEngine."""

_meet_normal_workers()
atexit.register(_finish_at_exit)
os.register_at_fork(after_in_parent=_started_anew, after_in_child=_forget)
