"""Operations that MXNet's engine has got and that have not ended: their completion, failure and release.

An operation is *outstanding* until it has completed or has been skipped. The engine *holds* it a little
longer, until it has destroyed it. `fail_all` and `drain` deal with all of them.
"""

from __future__ import annotations

import itertools
import logging
import queue
from collections.abc import Callable
from typing import Final

from netstorm import clock
from netstorm.errors import NetStormError
from netstorm.frontends.mxnet.engine.binding import EngineCallback

__all__ = [
    "Completion",
    "EngineOperation",
    "add",
    "discard",
    "drain",
    "fail_all",
    "finish",
    "forget_all",
    "held_operation",
    "live_count",
    "release",
]

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


def add(operation: EngineOperation) -> None:
    """Note an operation that is about to be given to the engine."""
    _live[operation.token] = _held[operation.token] = operation


def discard(operation: EngineOperation) -> None:
    """Forget an operation that the engine has not accepted."""
    _live.pop(operation.token, None)
    _held.pop(operation.token, None)


def held_operation(token: int) -> EngineOperation | None:
    """Return the operation that the engine calls back about; None: it was the parent's, before a fork."""
    return _held.get(token)


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


def finish(error: BaseException, timeout_s: float) -> bool:
    """Fail what is outstanding and wait until the engine has released it; return whether it has."""
    fail_all(error)
    return drain(timeout_s)


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


def forget_all() -> None:
    """In a forked child: the operations are the parent's, and no thread is here to call back about them."""
    _live.clear()
    _held.clear()
