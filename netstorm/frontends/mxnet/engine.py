"""Asynchronous operations of MXNet's dependency engine, written in Python, on the stock wheel.

`push_async` queues an operation that reads and writes NDArrays, and returns at once. When the arrays are
ready the engine calls `start`, which hands the work to another thread (our I/O thread) and returns. Whoever
finishes the work ends the operation through its `Completion`. What depends on the written arrays waits until
then, and nothing else does.

How the engine of MXNet 1.9.1 behaves (all of it tried), and what this package does about it:

* An exception in a callback is printed and the engine waits for ever. Our callbacks let none out.
* A callback that is collected as garbage while the engine holds it crashes the process. There are two
  callbacks, which live as long as this module; an operation is a number from a counter, its `func_param`.
* An operation whose input has failed is never started. The engine marks its outputs as failed and destroys
  it. The only sign is the call of `func_param`'s destructor, which becomes `skipped`.
* An operation that has one variable twice waits for itself for ever. Each variable is listed once, and
  writing wins. Views of an array (slices, reshapes, NumPy-style arrays) share its variable.
* The queue of the CPU workers ignores priorities. The queue of the priority workers (4 threads of its own)
  honours them: the largest first, among operations that are ready and wait for a thread. Our operations go
  there, so `start` does not wait behind a backward pass.
* An error is raised once: by the first `asnumpy`, `wait_to_read` or `waitall` on anything that depends on the
  operation, copies included. That clears it everywhere, and what else depends on it holds garbage from then
  on (memory that nobody wrote). So whoever fails operations must refuse all later calls: a script that has
  caught the error hears of it in no other way.
* The engine keeps pending errors in a `std::vector` without a lock. Failing hundreds of operations at a time,
  as when a node is lost, ended in "double free or corruption" whenever a worker read the vector while it
  grew. So `startup` makes it grow beforehand, and one operation fails at a time.
* `MXNET_ENGINE_TYPE=NaiveEngine` runs an operation inside the push, and wants it complete when its function
  returns. There `push_async` blocks until the completion. It raises the error itself, since that engine
  drops errors.
* Before a fork MXNet waits for all operations, in a handler that holds Python's lock: a deadlock if it takes
  a Python thread to complete one. `forking` waits before that, without the lock.
* At exit MXNet waits for all operations, and one that never completes is a process that never ends. So an
  atexit hook of ours fails whatever is outstanding. It is registered after MXNet's, and atexit runs the last
  one first. A runtime that wants to complete operations at exit registers its own hook later still.
* While Python is blocked inside MXNet no signal handler runs. `fail_all` from another thread unblocks it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.binding import (
    EngineCallback,
    NDArray,
    Operands,
    ReleaseFunction,
    RunFunction,
    push,
)
from netstorm.frontends.mxnet.engine.outstanding import (
    Completion,
    EngineOperation,
    add,
    discard,
    held_operation,
    release,
)
from netstorm.frontends.mxnet.engine.workers import compute_in_background
from netstorm.frontends.mxnet.errors import as_mxnet_error
from netstorm.pslite.system import active_calls, yield_to_call

__all__ = ["Completion", "NDArray", "Operands", "push_async", "push_on"]

_pushing: Final = threading.local()
"""The token of the operation that this thread is giving to the engine."""


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
        NetStormError: under NaiveEngine alone: `as_mxnet_error` of what `Completion.fail` was given.
    """
    operation = EngineOperation(start, skipped, name, silent=silent)
    token = operation.token
    add(operation)
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
    except mx.base.MXNetError:  # not accepted; anything else that is raised here (Ctrl-C) comes after that
        discard(operation)
        raise
    finally:
        _pushing.token = outer
    if operation.released:
        release(operation)
    if operation.inline is not None and operation.error is not None:
        if isinstance(operation.error, Exception):
            raise as_mxnet_error(operation.error) from operation.error
        raise operation.error


def _run_operation(_context: int, on_complete: int, token: int) -> None:
    callback = EngineCallback.at(on_complete)
    operation = held_operation(token)
    if operation is None:  # the parent's, from before a fork
        callback(None)
        return
    inline = getattr(_pushing, "token", None) == token
    if not inline:
        compute_in_background()
        if active_calls:
            yield_to_call()
    operation.run(callback, inline=inline)


def _release_operation(token: int) -> None:
    operation = held_operation(token)
    if operation is None:
        return
    if getattr(_pushing, "token", None) == token:
        operation.released = True  # `push_on` finds out whether the engine had accepted it
    else:
        release(operation)


_RUN: Final = RunFunction(_run_operation)
_RELEASE: Final = ReleaseFunction(_release_operation)
