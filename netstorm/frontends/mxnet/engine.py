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
* The queue of the CPU workers ignores priorities. The queue of the priority workers (one thread: `compat`)
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

import atexit
import contextlib
import ctypes
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias

from netstorm import clock
from netstorm.errors import Closed, NetStormError, UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.errors import as_mxnet_error, error_text, mxnet_error_class, registered_name
from netstorm.pslite.system import active_calls, yield_to_call

__all__ = [
    "LIBRARY",
    "LIBRARY_KEEPING_LOCK",
    "RUNS_INLINE",
    "Completion",
    "NDArray",
    "Operands",
    "check_call",
    "compute_in_background",
    "drain",
    "fail_all",
    "live_count",
    "push_async",
    "push_on",
    "variable_of",
]


# MXNet's C library, as its own code calls it and as we do: without giving up Python's lock.

check_call: Final = mx.base.check_call
"""Raises MXNet's last error if a C function has not returned 0."""

LIBRARY: Final = mx.base._LIB  # noqa: SLF001 -- the only handle there is
"""Each call gives up Python's lock and then waits for it again."""

LIBRARY_KEEPING_LOCK: Final = ctypes.PyDLL(LIBRARY._name)  # noqa: SLF001 -- ctypes has no other name for it
"""For functions that wait for nothing. While this thread held the lock, one that waits for a thread of the
engine in our code would wait for ever."""


# Errors as MXNet's engine takes them from an operation: C++ exceptions.
#
# An operation fails by giving the engine a `const dmlc::Error*`, which the engine copies. `dmlc::Error` is a
# `std::runtime_error` without members of its own (dmlc/logging.h). So one of those is enough, if it is
# constructed in our memory by the C++ library that libmxnet itself uses. Only its text survives. MXNet picks
# the Python class by what stands before the first colon (`mxnet.base.register_error`), so the class's full
# name goes there.

# dlsym on libmxnet's handle also searches what libmxnet was linked with. So these are the functions of the
# very C++ library (libstdc++, or libc++ on macOS) that will copy and destroy the object; both use these
# names.
_construct: Final = LIBRARY["_ZNSt13runtime_errorC1EPKc"]
_construct.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_construct.restype = None
_destruct: Final = LIBRARY["_ZNSt13runtime_errorD1Ev"]
_destruct.argtypes = [ctypes.c_void_p]
_destruct.restype = None

# A vtable pointer and a reference-counted string: two words in libstdc++ and libc++. The rest is spare.
_RuntimeError = ctypes.c_void_p * 8


@contextmanager
def native_error(error: BaseException) -> Iterator[int]:
    """Yield the address of a C++ exception with the text of `error`; it lives as long as the block.

    That is long enough: the engine copies the exception before `on_complete` returns, and copies share the
    text by reference count.
    """
    # C strings end at NUL, and the message's first line must not hide the class behind it.
    text = f"{registered_name(mxnet_error_class(error))}: {error_text(error)}".replace("\0", "\\0")
    memory = _RuntimeError()
    address = ctypes.addressof(memory)
    _construct(address, text.encode("utf-8", "replace"))
    try:
        yield address
    finally:
        _destruct(address)


# The C structures and the C function by which operations reach MXNet's dependency engine.

NDArray: TypeAlias = mx.nd.NDArray

RunFunction: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
"""`EngineAsyncFunc(run_context, on_complete, func_param)`, mxnet/c_api.h."""

ReleaseFunction: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""`EngineFuncParamDeleter(func_param)`: called when the engine destroys the operation."""

# The two calls into the engine keep Python's lock. They take microseconds and never wait (the engine holds
# none of its locks when it calls us). If they gave the lock up, the script would wait behind every engine
# thread that wants it: the slowest push of 200 took 0.5 to 3 ms, against 0.12 ms. Under NaiveEngine `start`
# runs, and waits, in this very thread.
_OnCompleteFunction: Final = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_push: Final = LIBRARY_KEEPING_LOCK["MXEnginePushAsyncND"]
_push.restype = ctypes.c_int
_push.argtypes = [
    RunFunction,
    ctypes.c_void_p,
    ReleaseFunction,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_bool,
]


class _Context(ctypes.Structure):
    """`mxnet::Context`: where the operation runs, not where its arrays are."""

    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _CallbackOnComplete(ctypes.Structure):
    """`mxnet::engine::CallbackOnComplete`, mxnet/engine.h."""

    _fields_ = (("function", ctypes.c_void_p), ("engine", ctypes.c_void_p), ("operation", ctypes.c_void_p))


_CPU: Final = _Context(1, 0)
_NORMAL: Final = ctypes.c_int(0)  # mxnet::FnProperty, mxnet/engine.h: kNormal, which operators have
_CPU_PRIORITIZED: Final = ctypes.c_int(3)
_CPU_AT: Final = ctypes.addressof(_CPU)
_NORMAL_AT: Final = ctypes.byref(_NORMAL)
_CPU_PRIORITIZED_AT: Final = ctypes.byref(_CPU_PRIORITIZED)
_names: Final[dict[str, bytes]] = {}  # the engine keeps the pointer, and the profiler reads it much later

# One error at a time goes into the engine's list of errors, which has no lock of its own. Reentrant, since a
# signal handler or a destructor may fail operations in a thread that is doing so already.
_failing: Final = threading.RLock()


class EngineCallback(NamedTuple):
    """What ends one operation: a function of the engine and its two arguments."""

    function: int
    engine: int
    operation: int

    @classmethod
    def at(cls, address: int) -> EngineCallback:
        """Return a copy of the structure at `address`, which is on the stack of our caller."""
        fields = _CallbackOnComplete.from_address(address)
        return cls(fields.function, fields.engine, fields.operation)

    def __call__(self, error: BaseException | None) -> None:
        """End the operation; exactly once, from any thread."""
        on_complete = _OnCompleteFunction(self.function)
        if error is None:
            on_complete(self.engine, self.operation, None)
        else:
            with native_error(error) as address, _failing:
                on_complete(self.engine, self.operation, address)


class Operands:
    """The arrays that an operation reads and writes, as the engine takes them.

    Making one takes several us. Keep it if there will be more operations on the same arrays.
    """

    __slots__ = ("_arrays", "reads", "reads_count", "writes", "writes_count")

    def __init__(self, reads: Iterable[NDArray], writes: Iterable[NDArray]) -> None:
        """List each variable once; writing wins. An operation that has a variable twice waits for itself for
        ever.

        Raises:
            UsageError: something is no NDArray, or one without memory.
        """
        written = {variable_of(array): array for array in writes}
        read = {variable: array for array in reads if (variable := variable_of(array)) not in written}
        self._arrays: Final = (*read.values(), *written.values())  # they must live as long as their handles
        self.reads: Final = _handles(read.values())
        self.reads_count: Final = len(read)
        self.writes: Final = _handles(written.values())
        self.writes_count: Final = len(written)


def variable_of(array: NDArray) -> int:
    """Return an address that identifies the engine variable of `array`; its views share it.

    The C API does not give the variable. But the first member of `mxnet::NDArray` is the pointer to the chunk
    that owns memory and variable (mxnet/ndarray.h). `_check_layout` makes sure of it.

    Raises:
        UsageError: it is no NDArray, or one without memory.
    """
    if not isinstance(array, mx.nd.NDArray):
        raise UsageError(f"MXNet's engine works on NDArrays, not on {type(array).__name__} ({array!r:.60})")
    assert array.handle.value is not None
    chunk = ctypes.c_void_p.from_address(array.handle.value).value
    if chunk is None:
        raise UsageError("an NDArray without shape and memory can be neither read nor written")
    return chunk


def _handles(arrays: Collection[NDArray]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*[array.handle.value for array in arrays])


def _check_layout() -> None:
    whole, other = mx.nd.empty((2, 2)), mx.nd.empty((2, 2))
    chunk = variable_of(whole)
    views = (whole[1:], whole.reshape((4,)), whole.detach(), whole.as_np_ndarray())
    if any(variable_of(view) != chunk for view in views) or variable_of(other) == chunk:
        raise UsageError(
            f"this build of MXNet {mx.__version__} does not lay out NDArrays as the 1.9.1 wheels do; "
            "pip install --force-reinstall mxnet==1.9.1"
        )


_check_layout()


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
    _live[token] = _held[token] = operation
    outer = getattr(_pushing, "token", None)
    _pushing.token = token
    try:
        # It will call `_RUN` with the token at most once, and `_RELEASE` once after.
        check_call(
            _push(
                _RUN,
                token,
                _RELEASE,
                _CPU_AT,
                operands.reads,
                operands.reads_count,
                operands.writes,
                operands.writes_count,
                _NORMAL_AT if among_operators else _CPU_PRIORITIZED_AT,
                priority,
                _names.setdefault(name, name.encode()),
                False,
            )
        )
    except mx.base.MXNetError:  # not accepted; anything else that is raised here (Ctrl-C) comes after that
        _live.pop(token, None)
        _held.pop(token, None)
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
    operation = _held.get(token)
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
    operation = _held.get(token)
    if operation is None:
        return
    if getattr(_pushing, "token", None) == token:
        operation.released = True  # `push_on` finds out whether the engine had accepted it
    else:
        release(operation)


_RUN: Final = RunFunction(_run_operation)
_RELEASE: Final = ReleaseFunction(_release_operation)


# The scheduling policy of the engine's threads: they compute in the background and interrupt nobody.
#
# A call on a store gives the engine three or four operations, and each wakes one of its threads. Where all
# cores are busy, Linux may run that thread first, as it has just slept. The call is then interrupted in its
# middle and takes ms instead of a tenth of one. SCHED_BATCH (sched(7)) is for threads that compute: they get
# as much of a core as before, but a thread that is woken waits until the running one has had its turn.

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


# Operations that MXNet's engine has got and that have not ended: their completion, failure and release.
#
# An operation is *outstanding* until it has completed or has been skipped. The engine *holds* it a little
# longer, until it has destroyed it. `fail_all` and `drain` deal with all of them.

_log = logging.getLogger(__name__)

# No lock: the engine calls back in whatever thread, also while that thread collects garbage or handles a
# signal, and would wait for a lock of its own. Single dict operations are atomic. Whoever takes an entry out
# of `_live` is the one who may end the operation.
_tokens: Final = itertools.count(1)
_live: Final[dict[int, EngineOperation]] = {}  # outstanding
_held: Final[dict[int, EngineOperation]] = {}  # the engine may still call back about these
_drainers: Final[list[queue.SimpleQueue[None]]] = []


class Completion:
    """Ends one operation: call `succeed`, `fail` or `end`, once, from any thread. Later calls do nothing."""

    __slots__ = ("_operation",)

    def __init__(self, operation: EngineOperation) -> None:
        self._operation = operation

    @property
    def done(self) -> bool:
        """Whether the operation has ended, by whomever. Its arrays are not ours any more."""
        return self._operation.token not in _live

    def succeed(self) -> None:
        """The written arrays have their values: let those who wait for them go on."""
        self._operation.complete(None)

    def fail(self, error: BaseException) -> None:
        """Let whoever reads what depends on the written arrays raise `as_mxnet_error(error)`."""
        self._operation.complete(error)

    def end(self, error: BaseException | None) -> None:
        """`fail` with an error, or `succeed` if it is None."""
        self._operation.complete(error)


class EngineOperation:
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
        """Start the work; the engine's thread calls this. `inline`: under NaiveEngine, inside the push."""
        start, self.start, self.skipped = self.start, None, None  # free what they refer to
        if inline:
            self.inline = queue.SimpleQueue()
        # The order matters: `fail_all` sets the error and then reads the callback, so one thread sees both.
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
        """End the operation, if it has been started and has not ended."""
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


def live_count() -> int:
    """Return how many operations have been pushed and have neither completed nor been skipped."""
    return len(_live)


def fail_all(error: BaseException) -> None:
    """Fail every operation that has not completed; from any thread, also from a signal handler.

    Those that the engine has not started fail when it would start them. Operations pushed from now on are not
    affected. Whoever works on the memory of started ones must have stopped: they do not own it any more.
    """
    operations = list(_live.values())
    for operation in operations:  # all of them before the first completes and lets the engine start another
        if operation.error is None:
            operation.error = error
    for operation in operations:
        operation.complete(operation.error)


def drain(timeout_s: float) -> bool:
    """Wait until the engine has released all operations; return whether it has.

    It does so moments after their completion. These moments matter at exit: a callback into an interpreter
    that is being finalised ends the process with SIGABRT.
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


def release(operation: EngineOperation) -> None:
    """Forget an operation that the engine has destroyed: it was completed, or skipped."""
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


# What the engine needs before the first operation, and what happens to operations at a fork and at exit.
#
# It all happens when this module is imported, which importing the package does.

_ERROR_SLOTS: Final = 2048
"""More operations than the largest models leave outstanding. Filling them takes some 0.15 s."""

_EXIT_TIMEOUT_S: Final = 10.0
"""For the engine to release what has failed at exit: it may have to compute what an operation waits for."""

_MEETING_S: Final = 0.2
"""For threads that run operators to be free, where there are several."""


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
    fail_all(Closed("the process ended before the network operation did"))
    drain(_EXIT_TIMEOUT_S)


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
    _known.clear()
    _prepare_workers()


def _forget_parents() -> None:
    """In a forked child: the operations are the parent's, and no thread is here to call back about them."""
    _live.clear()
    _held.clear()
    _known.clear()


RUNS_INLINE: Final = _reserve_error_slots()
"""The engine is NaiveEngine."""

_prepare_workers()
atexit.register(_finish_at_exit)
os.register_at_fork(after_in_parent=_after_fork, after_in_child=_forget_parents)
