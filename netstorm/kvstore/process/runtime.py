"""The runtime: what frontends call, from any thread. One runtime a process, shared by all its stores.

The node itself, its I/O thread and its sockets are in `node_process`.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import util
from types import FrameType, TracebackType
from typing import Final, NoReturn, Protocol, TypeVar, cast

from netstorm import clock
from netstorm.errors import Closed, NetStormError, UsageError, WaitTimeout
from netstorm.kvstore.forms import Key
from netstorm.kvstore.node import GeneralNode
from netstorm.kvstore.operations import (
    AsyncOperation,
    Done,
    Operation,
    PointToPointOperation,
    ReceiveOperation,
    SendOperation,
)
from netstorm.kvstore.process.node_process import NodeProcess
from netstorm.kvstore.process.step_report import StepMeter, StepReport
from netstorm.observe.log import Counters, configure_logging
from netstorm.observe.trace import Trace
from netstorm.protocol.frames import Buffer, checksum
from netstorm.pslite.io_thread import VanAhead
from netstorm.settings import Settings

__all__ = [
    "CompletionThread",
    "Runtime",
    "SignalWatch",
    "after_close",
    "before_finish",
    "describe_compression",
    "drain_io_thread",
    "future_end",
    "leave_job",
    "runtime_of_this_process",
]


T = TypeVar("T")

_SLICE_S: Final = 0.2
"""Blocking waits are cut into slices, so that Python's signal handlers run."""


class Runtime:
    """A general node at work in this process, as frontends use it.

    Attributes:
        node: the state machine; to be used on the I/O thread only (`post`).
        process: the node's threads, sockets and servers.
        counters: of this process.
        computing: a thread that may compute, as the I/O thread must not.
    """

    def __init__(self, settings: Settings, *, framework: str = "", ahead: VanAhead | None = None) -> None:
        """Listen, connect to the scheduler, and wait until all nodes have joined.

        Args:
            settings: of this process.
            framework: whose tensors the program sums.
            ahead: this node's van, made ahead; None: a new one.

        Raises:
            SettingsError: an address cannot be used.
            JoinRefused, Disagreement, WaitTimeout, SchedulerLost: why the job does not come together.
        """
        self.settings: Final = settings
        self.counters: Final = Counters() if ahead is None else ahead.counters
        self._busy: Final = BusyTime()
        self._namespaces = 0
        self.computing: Final = CompletionThread("netstorm-codecs")
        self._steps: StepMeter | None = None
        self._closing: Final = threading.Lock()
        self._closed = False
        self._pid: Final = os.getpid()
        self.process: Final = NodeProcess(settings, self.counters, framework, ahead)
        self.node: Final = self.process.node
        self._driver: Final = self.process.driver
        self._signals: Final = SignalWatch(self._driver.thread, self._interrupted)
        try:
            self._wait(self._driver.ask(lambda done, _: self.node.when_joined(done)))
            if ahead is not None:  # this scheduler is not the one of the connections that are left
                self._driver.thread.post(lambda _: ahead.van.close_ahead())
            self.process.serve_metrics()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------- who and whether

    @property
    def rank(self) -> int:
        """This node's rank."""
        return self.node.rank

    @property
    def size(self) -> int:
        """How many nodes the job has."""
        return len(self.node.members)

    @property
    def failure(self) -> NetStormError | None:
        """Why nothing works any more; None while it does."""
        return self.node.failure

    def check(self) -> None:
        """Raise the error that has made this runtime useless, if there is one.

        Raises:
            Closed: after `close`, or in a forked child.
            NetStormError: the failure of the job, the same for every call.
        """
        if not self.process.is_mine():
            raise Closed(
                f"this store belongs to process {self._pid}; process {os.getpid()} was forked from it and "
                "cannot use it: "
                "create the store in the process that trains"
            )
        failure = self.node.failure
        if failure is not None:
            raise type(failure)(*failure.args)
        if self._closed:
            raise Closed("the store has been closed")

    def refuse_if_reproducible(self, what: str) -> None:
        """Refuse what depends on the time, if the results of the job are to be the same in each run.

        Raises:
            UsageError: they are.
        """
        if self.node.reproducible:
            raise UsageError(
                f"{what} with NETSTORM_REPRODUCIBLE=1: expected one of them, since its results depend on "
                "which rank is faster; PyTorch's use_deterministic_algorithms(True) sets the latter, unless "
                "NETSTORM_REPRODUCIBLE=0"
            )

    def statistics(self) -> dict[str, float]:
        """Return what this node has done so far.

        Returns:
            `bytes_sent` and `bytes_received` to and from other nodes and the scheduler, headers included;
            `network_s`, the time with at least one operation under way; `clock_error_s`, by how much this
            node's cluster clock may be off (inf: not known yet); and every counter of the process.
        """
        sent, received = self.process.link_bytes()
        return {
            "bytes_sent": float(sent),
            "bytes_received": float(received),
            "network_s": self._busy.total(clock.monotonic()),
            "clock_error_s": self.process.cluster_clock.error_bound_s(clock.monotonic()),
            **self.counters.snapshot(),
        }

    def step_report(self) -> StepReport:
        """Return what this rank has waited for since the last report; the first one begins to watch.

        Raises:
            Closed: after `close`, or in a forked child.
            NetStormError: the failure of the job.
        """
        self.check()
        with self._closing:
            if self._steps is None:
                self._steps = StepMeter(self)
        return self._steps.report(self)

    # --------------------------------------------------------------------------------- keys and operations

    def open_namespace(self) -> int:
        """Return the number of a new store: the n-th of this process is the n-th of every process."""
        self.check()
        self._namespaces += 1
        return self._namespaces - 1

    def register(
        self,
        namespace: int,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        *,
        form: int = 0,
        members: tuple[int, ...] = (),
    ) -> Key:
        """Make a key known to the job; do not wait for the scheduler's answer. `form` is its codec; `members`
        are the ranks that push it (none: all).

        Raises:
            UsageError: a type that cannot be summed.
        """
        self.check()
        key = Key(namespace, name, shape, dtype, form=form, members=members)
        self._driver.thread.post(lambda now: self.node.register(key, now))
        return key

    def staging(self, nbytes: int) -> Buffer | None:
        """Return memory from which values go to ranks of this machine without a copy (`StagedValues`).

        It belongs to the caller for as long as he refers to it. None: ordinary memory does as well.

        Raises:
            Closed: after `close`, or in a forked child.
        """
        return self._driver.thread.call(lambda _: self.process.staging(nbytes)).result()

    def submit(self, operation: Operation | AsyncOperation | PointToPointOperation) -> None:
        """Begin an all-reduce, an asynchronous push or pull, a send or a receive.

        Never raises and never blocks. The operation's `done` is called on the I/O thread in any case.
        """
        busy, done = self._busy, operation.done
        if self.process.trace is not None:
            done = _traced(operation, self.process.trace)

        def ended(error: Exception | None) -> None:
            busy.end(clock.monotonic())
            # What is called may refer to the operation: both would wait for the garbage collector.
            operation.done = _ended_before
            done(error)

        operation.done = ended
        busy.begin(clock.monotonic())
        try:
            self._driver.thread.tell(lambda now: self.node.submit(operation, now), ended)
        except Closed as error:
            ended(error)

    def allreduce(self, operation: Operation, timeout_s: float | None = None) -> None:
        """Submit an operation and wait for the result.

        Raises:
            UsageError: no result within `timeout_s` (None: only NETSTORM_WAIT_TIMEOUT limits the wait).
            NetStormError: why it failed.
        """
        self.check()
        future, operation.done = future_end()
        self.submit(operation)
        self._wait(future, timeout_s)

    def wait_for_owners(self, ends: Sequence[concurrent.futures.Future[None]], otherwise: str) -> None:
        """Wait until owners of parameters have answered pushes and pulls.

        Args:
            ends: of these operations (`future_end`).
            otherwise: what it means that an owner does not answer, for the error.

        Raises:
            WaitTimeout: no answer of an owner within NETSTORM_WAIT_TIMEOUT.
            NetStormError: the job has failed.
        """
        limit_s, waited = self.settings.wait_timeout_s, 0.0
        while concurrent.futures.wait(ends, _SLICE_S).not_done:
            self.check()
            waited += _SLICE_S
            if waited > limit_s:
                raise WaitTimeout(
                    f"no answer of an owner of parameters within {limit_s:g} s (NETSTORM_WAIT_TIMEOUT): "
                    f"{otherwise}"
                )
        for end in ends:
            end.result()

    def report_replica(self, key: Key, round: int, value: Buffer) -> None:
        """Have a key's value after a round compared over all ranks; a difference ends the job.

        Does not block.
        """
        digest = checksum(value)
        self.post(lambda node, now: node.report_replica(key, round, digest, now))

    def barrier(self) -> None:
        """Wait until every rank has entered its n-th barrier.

        Raises:
            WaitTimeout: names the ranks that are missing.
            NetStormError: why it failed.
        """
        self.check()
        self._wait(self._driver.ask(self.node.barrier))

    def post(self, function: Callable[[GeneralNode, float], None]) -> None:
        """Have the I/O thread call `function` with the node and the time, soon; never after `close`."""
        self.process.post(lambda now: function(self.node, now))

    def at_end_of_turn(self, function: Callable[[], None]) -> None:
        """Call a function that wakes a thread, on the I/O thread once it has sent what there is; see
        `IoThread.at_end_of_turn`.
        """
        self._driver.thread.at_end_of_turn(function)

    def ask(self, function: Callable[[GeneralNode], T]) -> concurrent.futures.Future[T]:
        """Have the I/O thread call `function` with the node, and return its result as a future.

        Raises:
            Closed: after `close`, or in a forked child.
        """
        return self._driver.thread.call(lambda _: function(self.node))

    # --------------------------------------------------------------------------------------------- the end

    def fail(self, reason: str) -> None:
        """Announce that this rank's program has failed. Nothing works afterwards; `close` does not wait."""

        def announce(now: float) -> None:
            self._signals.poll()  # if a signal has ended the script, the signal is the reason
            after = f", after {self._signals.last}" if self._signals.last else ""
            self.node.fail(f"{reason}{after}", now)

        if self.process.is_mine() and not self._closed:
            self.process.post(announce)

    def finish(self, *, wait: bool = True) -> None:
        """Push no more, and wait until no rank needs this node. Until then it aggregates and forwards.

        Args:
            wait: if not, only announce it; a later call waits.

        Raises:
            NetStormError: the job has failed before all had finished.
        """
        self.check()
        finished = self._driver.ask(self.node.finish)
        if wait:
            self._wait(finished)

    def retire(self, reason: str, limit_s: float) -> threading.Thread:
        """Take part in the job no more. Calls under way fail with `reason`, here and at the others; if there
        are none, a thread forwards for the others until all have left, for `limit_s` at most.

        Returns:
            The thread; it closes this runtime in the end.
        """
        self._signals.close()  # the next runtime of this process watches them

        def end() -> None:
            with contextlib.suppress(NetStormError, concurrent.futures.TimeoutError):
                retired = self._driver.ask(lambda done, now: self.node.retire(reason, done, now))
                retired.result(limit_s)
            self.close()

        thread = threading.Thread(target=end, name="netstorm-retiring", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Stop the I/O thread and close the sockets. Twice does no harm; a forked child does nothing."""
        if not self.process.is_mine():
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if self._steps is not None:
            self._steps.close()
        self._signals.close()
        self.process.close()
        self.computing.close()

    def _interrupted(self, signal_name: str) -> None:
        """Fail what is outstanding: Python runs no handler while it is blocked inside a library."""
        self.node.fail(f"interrupted by {signal_name}", clock.monotonic())

    def _wait(self, future: concurrent.futures.Future[None], timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else clock.monotonic() + timeout_s
        while not concurrent.futures.wait([future], _SLICE_S).done:
            if deadline is not None and clock.monotonic() > deadline:
                raise UsageError(f"no result within {timeout_s:g} s")
        future.result()


def future_end() -> tuple[concurrent.futures.Future[None], Done]:
    """Return the future of an operation's end, and its `done`."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    return future, lambda error: future.set_result(None) if error is None else future.set_exception(error)


def describe_compression(runtime: Runtime, text: str) -> None:
    """Say how gradients travel: `netstorm top` and /status.json show it."""

    def describe(node: GeneralNode, _now: float) -> None:
        node.status.compression = text

    runtime.post(describe)


def _ended_before(_: Exception | None) -> None:
    """Stand for what has been called at the end of an operation."""


def _traced(operation: Operation | AsyncOperation | PointToPointOperation, trace: Trace) -> Done:
    """Return the operation's `done`, which also records the round in the trace."""
    began, done = clock.monotonic(), operation.done
    name = operation.name if isinstance(operation, (SendOperation, ReceiveOperation)) else operation.key.name

    def ended(error: Exception | None) -> None:
        trace.add_round(name, operation.round, began, clock.monotonic())
        done(error)

    return ended


# A thread that ends calls whose end runs code of the user's: continuations of futures, copies to devices.
#
# The I/O thread must never run such code: it might wait for another call.

_log = logging.getLogger(__name__)

_JOIN_S: Final = 5.0
"""How long `close` waits for a continuation of the user's that runs."""


class CompletionThread:
    """Runs functions one after the other; it starts with the first."""

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._queue: Final[queue.SimpleQueue[Callable[[], None] | None]] = queue.SimpleQueue()
        self._lock: Final = threading.Lock()
        self._thread: threading.Thread | None = None
        self._inner: CompletionThread | None = None
        """Ends calls that continuations on this thread have begun."""

    def for_caller(self) -> CompletionThread:
        """Return the thread that ends what the caller begins now.

        It is another one if the caller is a continuation: those of PowerSGD wait for calls of their own.
        """
        caller = threading.current_thread()
        level: CompletionThread | None = self
        while level is not None:
            if caller is level._thread:  # noqa: SLF001 -- one of our own
                if level._inner is None:  # noqa: SLF001
                    level._inner = CompletionThread(level._name)  # noqa: SLF001
                return level._inner  # noqa: SLF001
            level = level._inner  # noqa: SLF001
        return self

    def run(self, function: Callable[[], None]) -> None:
        """Call `function` on the thread, soon. An exception in it is logged."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
        self._queue.put(function)

    def close(self) -> None:
        """End the thread after what it was given. Twice does no harm."""
        if self._inner is not None:
            self._inner.close()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            function = self._queue.get()
            if function is None:
                return
            try:
                function()
            except Exception:  # noqa: BLE001 -- the user's code, or a device's error: the next call must end, too
                _log.exception("a continuation of a NetStorm call failed")
            del function  # what it refers to may be large


# The time in which operations are under way: how long a user waits for the network.


class BusyTime:
    """Adds up the time in which at least one operation is under way. Any thread may call it."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._total = 0.0

    def begin(self, now: float) -> None:
        """Count the begin of an operation."""
        with self._lock:
            if self._under_way == 0:
                self._since = now
            self._under_way += 1

    def end(self, now: float) -> None:
        """Count the end of an operation."""
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._total += now - self._since

    def total(self, now: float) -> float:
        """Return the time so far, in s."""
        with self._lock:
            return self._total + (now - self._since if self._under_way else 0.0)


# Finds out how a script ends, which Python does not tell the exit functions that it runs.
#
# An uncaught exception goes through `sys.excepthook`. The SystemExit that `sys.exit` raises does not. So our
# `sys.exit` raises a subclass that can be weakly referenced: if it is freed with no Python code left below,
# it was not caught, and the process ends with its code. `raise SystemExit(3)` goes unnoticed, and counts as
# an orderly end.


class _Exit(SystemExit):
    """What our `sys.exit` raises: unlike SystemExit itself it can be weakly referenced."""


class ScriptExit:
    """Watches for a script's end by an exception, or with a non-zero exit code."""

    def __init__(self) -> None:
        self.failed = False
        """The script has failed by itself; Python will exit with the right code."""
        self._failing: Callable[[str], None] | None = None
        self._exits: Final[set[weakref.ref[_Exit]]] = set()
        self._python_exit: Final = sys.exit
        self._python_hook = sys.excepthook

    def watch(self, failing: Callable[[str], None]) -> None:
        """Call `failing` with a description as soon as the script fails, while its threads still run."""
        self._failing = failing
        self._python_hook = sys.excepthook
        sys.excepthook = self._excepthook
        sys.exit = self._exit

    def check_last_exception(self) -> None:
        """Find an exception that went to another hook, or that ends a process of multiprocessing just now.
        Call it at the end of the process.
        """
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if error is None or self.failed or _is_interactive():
            return
        if not isinstance(error, SystemExit):
            self._fail(_description(error))
        elif code := _code_of(error.code):
            self._fail(f"its script ended with exit code {code}")

    def _fail(self, description: str) -> None:
        self.failed = True
        if self._failing is not None:
            self._failing(description)

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not _is_interactive():
            self._fail(_description(error))
        self._python_hook(kind, error, trace)

    def _exit(self, status: object = None, /) -> NoReturn:
        code = _code_of(status)
        if code == 0 or threading.current_thread() is not threading.main_thread():
            self._python_exit(cast("int | str | None", status))  # sys.exit takes any object

        def freed(reference: weakref.ref[_Exit]) -> None:
            self._exits.discard(reference)
            if _is_outermost() and threading.current_thread() is threading.main_thread():
                self._fail(f"its script ended with exit code {code}")

        error = _Exit(status)
        self._exits.add(weakref.ref(error, freed))
        try:
            raise error
        finally:
            del error  # or this frame, which the traceback refers to, would keep it


def _code_of(status: object) -> int:
    if status is None:
        return 0
    return int(status) if isinstance(status, int) else 1


def _description(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _is_interactive() -> bool:
    """Return whether Python runs interactively: an exception does not end the program."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _is_outermost() -> bool:
    """Return whether no Python code called our caller."""
    try:
        sys._getframe(2)  # noqa: SLF001 -- inspect.currentframe is the same under another name
    except ValueError:
        return True
    return False


# Ctrl-C and SIGTERM while Python is blocked inside a library.
#
# Python runs its handlers between two of its own instructions, and a thread that waits inside MXNet executes
# none. But the interpreter's C handler writes the signal's number to the wake-up descriptor at once. The I/O
# thread reads it there and fails what is outstanding. So the blocked call returns, and Python's handler runs.
#
# That is for signals that end the process. A handler of the script's own, or of its framework, has the word:
# it may set a flag, on which the ranks agree before they save and leave together. Then nothing is failed
# here. The job ends if the process ends without having left, and the reason names the signal.
#
# A forked child inherits the descriptor and the handler, and must lose them before it receives its first
# signal: a `multiprocessing.Pool` ends its workers with SIGTERM, which would be read here as a signal to the
# parent. So the two signals are blocked while the process forks.

_NAMES: Final = {int(signal.SIGINT): "Ctrl-C (SIGINT)", int(signal.SIGTERM): "SIGTERM"}


class _Watcher(Protocol):
    def watch(self, fd: int, callback: Callable[[], None]) -> None: ...

    def unwatch(self, fd: int) -> None: ...


class SignalWatch:
    """Passes SIGINT and SIGTERM to the I/O thread while it is open."""

    def __init__(self, driver: _Watcher, interrupted: Callable[[str], None]) -> None:
        """Begin to watch. On other threads than Python's main thread it does nothing.

        Args:
            driver: watches descriptors on the I/O thread.
            interrupted: called there with the signal's name.
        """
        self.last = ""
        """The last signal that was left to a handler of the script's, as text; empty: there was none."""
        self._open = threading.current_thread() is threading.main_thread()
        if not self._open:
            return
        self._driver: Final = driver
        self._interrupted: Final = interrupted
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)
        self.previous_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        """What signals woke before this watch began; -1: nothing."""
        self._took_sigterm = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._took_sigterm:
            # The default kills without an announcement, and the others would wait for a heartbeat time-out.
            signal.signal(signal.SIGTERM, _exit_on_sigterm)
        _watches.add(self)
        driver.watch(self._read_end.fileno(), self.poll)

    def poll(self) -> None:
        """Handle the signals that have come. On the I/O thread only."""
        with contextlib.suppress(OSError):  # none has, or it is closed
            numbers = self._read_end.recv(64) if self._open else b""
            if numbers and self.previous_fd >= 0:  # an event loop's, which calls the script's handlers
                with contextlib.suppress(OSError):
                    os.write(self.previous_fd, numbers)
            for number in set(numbers) & _NAMES.keys():
                handler = signal.getsignal(number)
                if handler in _ENDING:
                    self._interrupted(_NAMES[number])
                elif callable(handler):
                    self.last = _NAMES[number]

    def close(self) -> None:
        """Stop watching, and restore what was there before. Twice does no harm."""
        if not self._open:
            return
        self._driver.unwatch(self._read_end.fileno())  # the I/O thread may still poll once
        self._open = False
        if threading.current_thread() is threading.main_thread():
            self._restore()
        self._write_end.close()
        self._read_end.close()

    def close_in_child(self) -> None:
        """Stop watching in a forked child, which handles its signals itself."""
        if self._open:
            self._open = False
            self._restore()
            self._write_end.close()
            self._read_end.close()

    def _restore(self) -> None:
        replaced = signal.set_wakeup_fd(self.previous_fd)
        own = self._write_end.fileno()
        if replaced != own:  # an event loop's or another watch's, which began later
            signal.set_wakeup_fd(replaced)
            for watch in _watches:
                if watch.previous_fd == own:
                    watch.previous_fd = self.previous_fd
        if self._took_sigterm and signal.getsignal(signal.SIGTERM) is _exit_on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_on_sigterm(number: int, _frame: FrameType | None) -> None:
    # A handler that was installed later may call the one before it, as Lightning's does: it has the word.
    if signal.getsignal(number) is _exit_on_sigterm:
        sys.exit(128 + number)


_ENDING: Final = (_exit_on_sigterm, signal.default_int_handler)
"""Handlers that end the process."""

_blocked_before: Final[list[set[signal.Signals | int]]] = []
"""While the process forks: the signals that were blocked before."""
_watches: Final[weakref.WeakSet[SignalWatch]] = weakref.WeakSet()


def _block_signals() -> None:
    if _watches:
        _blocked_before.append(signal.pthread_sigmask(signal.SIG_BLOCK, _NAMES))


def _unblock_signals() -> None:
    if _blocked_before:
        signal.pthread_sigmask(signal.SIG_SETMASK, _blocked_before.pop())


def _close_all_in_child() -> None:
    for watch in list(_watches):
        watch.close_in_child()
    _unblock_signals()


os.register_at_fork(
    before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_close_all_in_child
)


# The one runtime of this process, and its end.
#
# A script that comes to its end completes what it has pushed, and forwards for the others until all have
# finished. A script that dies of an exception announces that at once. A failure that the script never noticed
# still makes the process exit with a non-zero code.


class _ProcessRuntime:
    """The state of this process."""

    def __init__(self) -> None:
        self.lock: Final = threading.Lock()
        self.runtime: Runtime | None = None
        self.framework = ""
        self.is_leaving = False
        """The program has left the job; the node goes on to forward for the others."""
        self.is_watched = False
        self.has_ended = False
        self.script: Final = ScriptExit()
        self.before_finish: Final[list[Callable[[], None]]] = []
        self.after_close: Final[list[Callable[[], None]]] = []


_process: Final = _ProcessRuntime()


def runtime_of_this_process(settings: Settings | None = None, *, framework: str = "") -> Runtime:
    """Return this process's runtime; the first call joins the job and waits until all nodes have joined.

    After `leave_job`, the next call waits until the job has ended, and joins another one.

    Args:
        settings: used by a call that joins; None: those of the environment.
        framework: whose tensors the program sums, the same at all nodes of a job; empty: a program's own.

    Raises:
        NetStormError: the job does not come together, has failed, or belongs to the process this one was
            forked from.
        UsageError: a frontend of another framework has joined the job in this process.
    """
    with _process.lock:
        if _process.is_leaving:
            _end_job()
        if _process.runtime is None:
            settings = settings or Settings.from_environment()
            configure_logging(settings)
            _process.runtime = Runtime(settings, framework=framework)
            _process.framework = framework
            _watch()
        if framework and _process.framework and framework != _process.framework:
            raise UsageError(
                f"this process is in a job of {_process.framework}, which {framework} cannot join, too: use "
                "one framework a process"
            )
        _process.runtime.check()
        return _process.runtime


def leave_job() -> None:
    """Announce that this rank's program will make no more calls. Does not wait: until all ranks have left,
    the node forwards for them.
    """
    with _process.lock:
        runtime = _process.runtime
        if runtime is None or not runtime.process.is_mine() or _process.is_leaving:
            return
        _process.is_leaving = True
        with contextlib.suppress(NetStormError):  # the job has failed: there is nothing to announce
            runtime.finish(wait=False)


def _watch() -> None:
    """See to the end of this process, and of its script; once."""
    if not _process.is_watched:
        _process.is_watched = True
        atexit.register(_at_exit)
        if multiprocessing.parent_process() is not None:
            # Before Python 3.14, multiprocessing ends what it has forked without the functions of atexit.
            util.Finalize(None, _at_exit, exitpriority=0)
        _process.script.watch(_fail)


def _fail(reason: str) -> None:
    if _process.runtime is not None:
        _process.runtime.fail(reason)


def _end_job() -> None:
    """Wait until no rank of the job that this program has left needs this node, and close it."""
    runtime = _process.runtime
    assert runtime is not None
    try:
        if runtime.failure is None:
            runtime.finish()
    finally:
        _close(runtime)
        _process.runtime, _process.is_leaving = None, False


def _close(runtime: Runtime) -> None:
    runtime.close()
    for function in _process.after_close:
        function()


def before_finish(function: Callable[[], None]) -> None:
    """Call `function` before this process announces that it will push no more. A frontend waits for its
    engine there.
    """
    _process.before_finish.append(function)


def after_close(function: Callable[[], None]) -> None:
    """Call `function` when nothing is outstanding any more. A frontend clears up there."""
    _process.after_close.append(function)


def drain_io_thread() -> None:
    """Wait until the I/O thread, if there is one, has done all that it was asked for before this call."""
    if _process.runtime is not None:
        _process.runtime.process.drain()


def _at_exit() -> None:
    runtime = _process.runtime
    if runtime is None or not runtime.process.is_mine() or _process.has_ended:
        return
    _process.has_ended = True
    code = 0
    try:
        _process.script.check_last_exception()
        if not _process.script.failed:
            for function in _process.before_finish:
                function()
            runtime.finish()
    except KeyboardInterrupt:
        runtime.fail("interrupted by Ctrl-C (SIGINT)")
        code = 130
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
        runtime.fail(f"it ended with exit code {code} while it waited for the others")
    except Exception as error:  # noqa: BLE001 -- any exception of a frontend means that the job has not ended well
        runtime.fail(f"{type(error).__name__}: {error}")
        sys.stderr.write(f"netstorm: rank {runtime.rank}: {type(error).__name__}: {error}\n")
        code = 1
    try:
        _close(runtime)
    except (KeyboardInterrupt, SystemExit):  # a second signal: the user does not want to wait
        code = code or 1
    if code:
        # The interpreter will exit with code 0, and a failed job must not look like a good one.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
