"""The one runtime of this process, and how it ends.

A script that comes to its end finishes what it has pushed and goes on forwarding for the others; one that
dies of an exception says so at once. A failure that the script never looked at still makes the process exit
with a non-zero code.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from netstorm import clock
from netstorm.errors import NetStormError
from netstorm.kvstore.runtime import Runtime
from netstorm.observe.logging import configure_logging
from netstorm.settings import Settings

__all__ = ["before_finish", "runtime_of_this_process"]

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_runtime: Runtime | None = None
_before_finish: list[Callable[[], None]] = []
_script_error: BaseException | None = None
_hooked = False


def runtime_of_this_process(settings: Settings | None = None) -> Runtime:
    """Return this process's runtime; the first call joins the job and waits until all nodes are here.

    Args:
        settings: for the first call; the environment's if None.
    Raises: NetStormError: the job does not come together, has failed, or belongs to the process this one was
        forked from.
    """
    global _runtime, _hooked
    with _lock:
        if _runtime is None:
            settings = settings or Settings.from_environment()
            configure_logging(settings)
            _runtime = Runtime(settings)
            if not _hooked:
                _hooked = True
                atexit.register(_at_exit)
                _watch_exceptions()
        _runtime.check()
        return _runtime


def before_finish(function: Callable[[], None]) -> None:
    """Call `function` before this process announces that it will push no more: a frontend waits for its
    engine there.
    """
    if function not in _before_finish:
        _before_finish.append(function)


def _watch_exceptions() -> None:
    previous = sys.excepthook

    def tell_the_others(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _script_error
        _script_error = error
        if _runtime is not None:
            _runtime.fail(f"{kind.__name__}: {error}")
        previous(kind, error, trace)

    sys.excepthook = tell_the_others


def _at_exit() -> None:
    runtime = _runtime
    if runtime is None or not runtime.is_mine():
        return
    code = 0
    try:
        if _script_error is None:
            _finish(runtime)
    except KeyboardInterrupt:
        runtime.fail("interrupted by Ctrl-C (SIGINT)")
        code = 130
    except NetStormError as error:
        print(f"netstorm: rank {runtime.rank}: {type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    finally:
        runtime.close()
    if code:
        # The interpreter has settled on exit code 0 by now, and a failed job must not look like a good one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _finish(runtime: Runtime) -> None:
    for function in _before_finish:
        function()
    began = clock.monotonic()
    runtime.finish()
    _log.info("rank %d finished; the others took %.1f s more", runtime.rank, clock.monotonic() - began)
