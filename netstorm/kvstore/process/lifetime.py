"""The one runtime of this process, and its end.

A script that comes to its end completes what it has pushed, and forwards for the others until all have
finished. A script that dies of an exception announces that at once. A failure that the script never noticed
still makes the process exit with a non-zero code.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing import util
from typing import Final

from netstorm.errors import NetStormError, UsageError
from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.process.script_exit import ScriptExit
from netstorm.observe.log import configure_logging
from netstorm.settings import Settings

__all__ = ["after_close", "before_finish", "drain_io_thread", "leave_job", "runtime_of_this_process"]


class _Process:
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


_process: Final = _Process()


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
