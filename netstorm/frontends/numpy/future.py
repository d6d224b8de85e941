"""A call under way, for programs that go on meanwhile: to be waited for, or awaited."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Generator
from typing import Any, Final, Generic, TypeVar

from netstorm import clock
from netstorm.errors import NetStormError, WaitTimeout

__all__ = ["GroupFuture"]

Result = TypeVar("Result")

_GRACE_S: Final = 5.0
"""How long the scheduler's error of a time-out may take: it names who is missing."""


class GroupFuture(Generic[Result]):
    """A call of a group under way. `result()` waits for its end; in a coroutine, `await` does.

    What the call was given must stay unchanged until its end. Whoever stops waiting, by a time-out or a
    cancelled task, does not end the call: the other ranks take part in it.
    """

    def __init__(
        self,
        text: str,
        *,
        timeout_s: float,
        deliver: Callable[[], Result],
        waiting_for: Callable[[], str],
        timed_out: Callable[[str], None],
    ) -> None:
        """Begin; `Group` does.

        Args:
            text: the call, as error messages show it.
            timeout_s: of the call; reaching it fails the job, as nobody knows what is still in flight.
            deliver: returns the result; called once, by whoever waits first.
            waiting_for: says what the call waits for; it may take a moment.
            timed_out: called with the reason if the call has reached its time-out.
        """
        self._text: Final = text
        self._timeout_s: Final = timeout_s
        self._deadline: Final = clock.monotonic() + timeout_s + _GRACE_S
        self._deliver: Final = deliver
        self._waiting_for: Final = waiting_for
        self._timed_out: Final = timed_out
        self._lock: Final = threading.Lock()
        self._ended: Final[concurrent.futures.Future[None]] = concurrent.futures.Future()
        self._ended.set_running_or_notify_cancel()  # a cancelled task must not cancel it
        self._error: Exception | None = None
        self._contributors: frozenset[int] | None = None
        self._results: Final[list[Result]] = []

    def finish(self, error: Exception | None, contributors: frozenset[int] | None = None) -> None:
        """End the call; from any thread, once. `contributors` are those of its result."""
        self._error, self._contributors = error, contributors
        self._ended.set_result(None)

    def done(self) -> bool:
        """Return whether the call has ended, well or not."""
        return self._ended.done()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the call's end, and return its result.

        Args:
            timeout: seconds to wait; None: until the call's own time-out, which ends the job.

        Raises:
            WaitTimeout: the call has not ended by then; the message says who is missing.
            NetStormError: why there is no result.
        """
        limit_s = max(0.0, self._deadline - clock.monotonic()) if timeout is None else timeout
        try:
            self._ended.result(min(limit_s, threading.TIMEOUT_MAX))
        except concurrent.futures.TimeoutError:
            self._raise_timeout(timeout)
        if self._error is not None:
            error = self._error  # a new one: several threads may raise it, each with its own traceback
            raise type(error)(*error.args) if isinstance(error, NetStormError) else error
        with self._lock:
            if not self._results:
                self._results.append(self._deliver())
        return self._results[0]

    @property
    def contributors(self) -> frozenset[int] | None:
        """The ranks whose values are in all parts of the result; None: the call has not ended well.

        All of them but in an elastic job. All ranks have the same.
        """
        return self._contributors if self.done() and self._error is None else None

    def __await__(self) -> Generator[Any, None, Result]:
        """Wait in a coroutine; see `result`."""
        import asyncio  # 50 ms, which only such programs need

        yield from asyncio.wrap_future(self._ended).__await__()
        return self.result()

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "ended" if self._error is None else "failed"
        return f"<GroupFuture {self._text}: {state}>"

    def _raise_timeout(self, timeout: float | None) -> None:
        waits = self._waiting_for()
        if self.done():  # in the meantime
            return
        seconds = self._timeout_s if timeout is None else timeout
        text = f"{self._text} has not ended within {seconds:g} s{waits and ': it waits for ' + waits}"
        if timeout is None:
            self._timed_out(text)
        raise WaitTimeout(text)
