"""The one runtime of this process, and its end.

A script that comes to its end completes what it has pushed, and forwards for the others until all have
finished. A script that dies of an exception announces that at once. A failure that the script never noticed
still makes the process exit with a non-zero code.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Final

from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.process.script_exit import ScriptExit
from netstorm.observe.log import configure_logging
from netstorm.settings import Settings

__all__ = ["after_close", "before_finish", "drain_io_thread", "runtime_of_this_process"]


class _Process:
    """The state of this process."""

    def __init__(self) -> None:
        self.lock: Final = threading.Lock()
        self.runtime: Runtime | None = None
        self.script: Final = ScriptExit()
        self.before_finish: Final[list[Callable[[], None]]] = []
        self.after_close: Final[list[Callable[[], None]]] = []


_process: Final = _Process()


def runtime_of_this_process(settings: Settings | None = None) -> Runtime:
    """Return this process's runtime; the first call joins the job and waits until all nodes have joined.

    Args:
        settings: used by the first call; None: those of the environment.

    Raises:
        NetStormError: the job does not come together, has failed, or belongs to the process this one was
            forked from.
    """
    with _process.lock:
        if _process.runtime is None:
            settings = settings or Settings.from_environment()
            configure_logging(settings)
            _process.runtime = runtime = Runtime(settings)
            atexit.register(_at_exit)
            _process.script.watch(runtime.fail)
        _process.runtime.check()
        return _process.runtime


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
    if runtime is None or not runtime.process.is_mine():
        return
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
        runtime.close()
        for function in _process.after_close:
            function()
    except (KeyboardInterrupt, SystemExit):  # a second signal: the user does not want to wait
        code = code or 1
    if code:
        # The interpreter will exit with code 0, and a failed job must not look like a good one.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
